"""Which ways of speculative decoding may run with the cache: those whose drafts are nobody's KV.

A step computes drafted tokens beside the last one that is known, and their KV lies in the request's
own blocks until other tokens overwrite it. vLLM counts drafts as computed when it schedules them,
as in flight until their step is over, and takes the rejected ones off both counts. What is computed
and not in flight is therefore committed, which is all that `stores` stores.

A drafter with layers of its own (a draft model, EAGLE, MTP) has KV in the very blocks, groups and
chunks of the model's: keys would have to name it, no layer of the model waits for its slices, and
the KV of a chunk's last token depends on the token after it.
"""

from __future__ import annotations

from typing import Any

from lamina.engines.vllm.config import has_several_ranks
from lamina.errors import SettingsError

PROVEN = "ngram"
_KEEP_KV = ("eagle", "eagle3", "draft_model", "dflash", "dspark", "extract_hidden_states")


def check_speculation(vllm_config: Any, is_proven_version: bool) -> None:
    """Raise `SettingsError` for speculative decoding that is not proven to give right tokens.
    `is_proven_version`: whether this vLLM counts as 0.32 does."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    method = str(speculative.method)
    cause, otherwise = f"speculative decoding with {method!r} is on", "or start without it"
    if method in _KEEP_KV or method.endswith("mtp"):
        raise SettingsError(
            cause,
            "Its drafter's KV lies in the model's blocks, and no key names the drafter: "
            f"use {PROVEN!r}, {otherwise}",
        )
    if method != PROVEN:
        raise SettingsError(cause, f"It is not proven yet: use {PROVEN!r}, {otherwise}")
    if not is_proven_version:
        raise SettingsError(cause, f"Use vLLM 0.32 or newer for it, {otherwise}")
    sampling = getattr(speculative, "rejection_sample_method", "standard")
    if sampling != "standard":
        raise SettingsError(
            f"rejection_sample_method is {sampling!r}", "It is not proven yet: use 'standard'"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None) is not None:
        raise SettingsError(
            "num_speculative_tokens_per_batch_size is set",
            "It is not proven yet: use num_speculative_tokens alone",
        )
    if has_several_ranks(vllm_config.parallel_config):
        raise SettingsError(
            f"{cause} with several ranks", f"It is not proven yet: use one rank, {otherwise}"
        )
