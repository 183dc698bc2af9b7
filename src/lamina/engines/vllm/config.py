"""The connector's settings, and the configurations that it refuses, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lamina.client import ReleasePolicy, release_policy
from lamina.errors import SettingsError
from lamina.settings import AUTO, DEFAULT_CHUNK_TOKENS, WHOLE, ClientSettings, parse_overlap

_PREFIX = "lamina."
_REQUEST_KEYS = ("layerwise_overlap", "release_after_slices", "retrieve", "store")
_MOST_SLICES = 10**6
"""More than any model has layers."""
MOST_RANKS_WAIT_MS = 60_000
"""Far below the 300 s after which vLLM gives a step up, and below the watchdogs of collectives."""


_QUANTISATION_BY_FILE = ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG")
"""Variables that hold a configuration, or the name of a file with one."""


class ConnectorSettings(ClientSettings, frozen=True, kw_only=True):
    """The `lamina.*` keys of `kv_connector_extra_config`."""

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # type: ignore[assignment]  # here it is always known
    """Must be the server's."""
    model_id: str | None = None
    """Names the weights, in place of their content: another name for other weights."""
    store_decode: bool = True
    """Store what is generated too: multi-turn chat reuses answers."""
    held_blocks_share: float = 0.25
    """How much of the KV memory may be held for stores."""
    pipeline_parallel: bool = False
    """Serve pipeline stages too, which no real engine has run with Lamina yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_blocks_share <= 1:
            raise SettingsError(
                f"held_blocks_share is {self.held_blocks_share}", "Use a share from 0 to 1"
            )


class RequestSettings:
    """What a request's `kv_transfer_params` force: `lamina.layerwise_overlap`,
    `lamina.release_after_slices` (0: a synchronous retrieve), `lamina.retrieve`, `lamina.store`.

    Users write these: anything but the right types raises `SettingsError`.
    """

    def __init__(self, settings: ConnectorSettings, params: Mapping[str, Any] | None) -> None:
        forced = {
            key[len(_PREFIX) :]: value
            for key, value in (params or {}).items()
            if key.startswith(_PREFIX)
        }
        if unknown := forced.keys() - set(_REQUEST_KEYS):
            raise SettingsError(
                f"a request has no setting {_PREFIX + min(unknown)!r}",
                "Known: " + ", ".join(_PREFIX + key for key in _REQUEST_KEYS),
            )
        self.retrieve = _bool("retrieve", forced.get("retrieve", True))
        self.store = _bool("store", forced.get("store", True))
        width = parse_overlap(forced.get("layerwise_overlap", settings.layerwise_overlap))
        after = forced.get("release_after_slices", settings.release_after_slices)
        slices = None if after is None else _slices(after)
        self.policy: ReleasePolicy = release_policy(width, slices)


def _bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise SettingsError(f"{_PREFIX}{name} of a request is {value!r}", "Use true or false")


def _slices(value: object) -> int:
    """As many slices as an int or a decimal string says; no bool."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(_MOST_SLICES)):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_SLICES:
        return value
    raise SettingsError(
        f"{_PREFIX}release_after_slices of a request is {value!r}",
        "Use a number of slices, or 0 for a synchronous retrieve",
    )


def check_transfer(transfer: Any) -> None:
    """Raise `SettingsError` for a `kv_transfer_config` that cannot work: ours, and the one that
    vLLM itself acts on where we are one of a MultiConnector's."""
    _refuse_first(
        (
            transfer.kv_role != "kv_both",
            f"kv_role of {transfer.kv_connector} is {transfer.kv_role!r}",
            'Use "kv_role":"kv_both": it also makes vLLM fence blocks before it reuses them',
        ),
        (
            transfer.kv_load_failure_policy == "recompute",
            f"kv_load_failure_policy of {transfer.kv_connector} is 'recompute'",
            "vLLM would emit tokens computed on missing KV, or compute in blocks that are still "
            "written: use 'fail' (what fails before its request runs is recomputed anyway)",
        ),
    )


def check_supported(vllm_config: Any) -> None:
    """Raise `SettingsError` for a configuration that is not proven or cannot work."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    _refuse_first(
        (
            vllm_config.diffusion_config is not None,
            "diffusion decoding is on",
            "Its tokens attend to later ones: serve this model without Lamina",
        ),
        (
            vllm_config.ec_transfer_config is not None,
            "encoder outputs come from other engines",
            "Keys do not name those engines: start without ec_transfer_config",
        ),
        (
            model.enable_sleep_mode,
            "sleep mode is on",
            "vLLM discards KV in it without telling the cache: start without --enable-sleep-mode",
        ),
        (
            not cache.enable_prefix_caching,
            "vLLM's prefix caching is off",
            "Start with --enable-prefix-caching",
        ),
        (
            # `getattr`: only some versions of vLLM have it
            bool(getattr(cache, "calculate_kv_scales", False)),
            "KV scales are calculated from the first requests",
            "Keys cannot tell them apart: use a checkpoint's, start without --calculate-kv-scales",
        ),
        (
            str(cache.cache_dtype).endswith("_per_token_head"),
            f"cache_dtype is {cache.cache_dtype!r}",
            "vLLM resets the scales in retrieved pages: use another --kv-cache-dtype",
        ),
        (
            cache.kv_sharing_fast_prefill,
            "fast prefill for layers that share KV is on",
            "It is not proven yet: start without --kv-sharing-fast-prefill",
        ),
        (
            getattr(vllm_config.attention_config, "hisparse_config", None) is not None,
            "sparse attention keeps KV in host memory (hisparse_config)",
            "It is not proven yet: start without it",
        ),
    )
    _check_files(model)


def settings_for(parallel: Any, settings: ConnectorSettings) -> ConnectorSettings:
    """With experts spread over data-parallel engines a step that waits keeps all of them waiting,
    which `AUTO` does not weigh: whole retrieves there, until that is measured."""
    spreads_experts = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    if settings.layerwise_overlap == AUTO and spreads_experts:
        return msgspec.structs.replace(settings, layerwise_overlap=WHOLE, release_after_slices=None)
    return settings


def has_several_ranks(parallel: Any) -> bool:
    """Whether several workers compute one model together."""
    return bool(parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1)


def check_ranks(parallel: Any, settings: ConnectorSettings, hands_over_manager: bool) -> None:
    """Raise `SettingsError` for ranks that are not proven to get right tokens together.
    `hands_over_manager`: whether this vLLM lets a request that waits be given other blocks."""
    has_ranks = has_several_ranks(parallel)
    _refuse_first(
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is on",
            "Context parallelism is not supported yet: switch it off",
        ),
        (
            parallel.pipeline_parallel_size > 1 and not settings.pipeline_parallel,
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}",
            "No real engine has run it with Lamina yet: set lamina.pipeline_parallel to try it",
        ),
        (
            has_ranks and not hands_over_manager,
            "this engine has several ranks",
            "A retrieve that fails on one of them needs other blocks: use vLLM 0.32 or newer",
        ),
        (
            has_ranks and settings.retrieve_timeout_ms > MOST_RANKS_WAIT_MS,
            f"retrieve_timeout_ms is {settings.retrieve_timeout_ms} with several ranks",
            f"All ranks spin while one waits: use {MOST_RANKS_WAIT_MS} at most",
        ),
        (
            parallel.enable_dbo,
            "batches are cut into micro-batches (enable_dbo)",
            "It is not proven yet: start without --enable-dbo",
        ),
    )


def _check_files(model: Any) -> None:
    """Raise `SettingsError` where files change KV that no key can tell by content."""
    multimodal = model.multimodal_config
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    remedy = "Keys cannot tell its content: put it into the model's own files, or go without"
    for name in _QUANTISATION_BY_FILE:
        _refuse_first((Path(os.environ.get(name, "")).is_file(), f"{name} names a file", remedy))
    _refuse_first(
        (
            "quantization_config_file" in overrides,
            "hf_overrides names a quantization_config_file",
            remedy,
        ),
        (
            multimodal is not None
            and getattr(multimodal, "mm_encoder_fp8_scale_path", None) is not None,
            "mm_encoder_fp8_scale_path is set",
            remedy,
        ),
        (
            multimodal is not None and getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8",
            "mm_encoder_attn_dtype is 'fp8'",
            "Its scales follow the items of other requests: start without it",
        ),
    )


def _refuse_first(*refusals: tuple[bool, str, str]) -> None:
    """Raise `SettingsError` for the first that applies: whether it does, cause and remedy."""
    for refused, cause, remedy in refusals:
        if refused:
            raise SettingsError(cause, remedy)
