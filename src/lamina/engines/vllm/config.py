"""The connector's settings, and the configurations that it refuses, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.client import ReleasePolicy, release_policy
from lamina.errors import SettingsError
from lamina.settings import DEFAULT_CHUNK_TOKENS, ClientSettings, parse_overlap

_PREFIX = "lamina."
_REQUEST_KEYS = ("layerwise_overlap", "release_after_slices", "load", "store")
_MOST_SLICES = 10**6
"""More than any model has layers."""


class ConnectorSettings(ClientSettings, frozen=True, kw_only=True):
    """The `lamina.*` keys of `kv_connector_extra_config`."""

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # type: ignore[assignment]  # here it is always known
    """Must be the server's."""
    store_decode: bool = True
    """Store what is generated too: multi-turn chat reuses answers."""
    held_blocks_share: float = 0.25
    """How much of the KV memory may be held for stores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_blocks_share <= 1:
            raise SettingsError(
                f"held_blocks_share is {self.held_blocks_share}", "Use a share from 0 to 1"
            )


class RequestSettings:
    """What a request's `kv_transfer_params` force: `lamina.layerwise_overlap`,
    `lamina.release_after_slices` (0: a synchronous load), `lamina.load`, `lamina.store`.

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
        self.load = _bool("load", forced.get("load", True))
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
        "Use a number of slices, or 0 for a synchronous load",
    )


def check_supported(vllm_config: Any) -> None:
    """Raise `SettingsError` for a configuration that is not proven or cannot work."""
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    refusals = [
        (
            transfer.kv_role != "kv_both",
            f"kv_role is {transfer.kv_role!r}",
            'Use "kv_role":"kv_both": it also makes vLLM fence blocks before it reuses them',
        ),
        (
            parallel.tensor_parallel_size > 1,
            f"tensor_parallel_size is {parallel.tensor_parallel_size}",
            "Tensor parallelism is not supported yet: run one GPU per engine",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}",
            "Pipeline parallelism is not supported yet: run one GPU per engine",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism is on",
            "Context parallelism is not supported yet: switch it off",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding is on",
            "Speculative decoding is not supported yet: start without it",
        ),
        (
            bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
            "sleep mode is on",
            "vLLM discards KV in it without telling the cache: start without --enable-sleep-mode",
        ),
        (
            not vllm_config.cache_config.enable_prefix_caching,
            "vLLM's prefix caching is off",
            "Start with --enable-prefix-caching",
        ),
        (
            transfer.kv_load_failure_policy == "recompute",
            "kv_load_failure_policy is 'recompute'",
            "vLLM would emit tokens computed on missing KV, or compute in blocks that are still "
            "written: use 'fail' (a load that fails before its request runs is recomputed anyway)",
        ),
    ]
    for refused, cause, remedy in refusals:
        if refused:
            raise SettingsError(cause, remedy)
