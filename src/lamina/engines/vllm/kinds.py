"""Which models may have their KV cached: those whose every layer is proven, and no other.

Proven is attention over all tokens, whose blocks stay a request's until its end, and whose every
read comes after vLLM's per-layer hook. A window's blocks are given to others while their request
runs; states and index caches are read where no hook is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lamina.errors import SettingsError

_PROVEN_SPECS = {"FullAttentionSpec", "MLAAttentionSpec"}
"""vLLM's cache specs by exact name: subclasses keep less, or something else."""
_KINDS = {
    "SlidingWindowSpec": "keep only a sliding window of their KV",
    "SlidingWindowMLASpec": "keep only a sliding window of their KV",
    "RSWASpec": "keep only a sliding window of their KV",
    "ChunkedLocalAttentionSpec": "attend only within local chunks of tokens",
    "MambaSpec": "keep a state instead of KV",
    "SinkFullAttentionSpec": "keep sink tokens of their own",
    "CrossAttentionSpec": "attend to an encoder",
    "EncoderOnlyAttentionSpec": "belong to an encoder",
}
_REMEDY = "That is not proven yet: serve this model without Lamina"


def check_model(model_config: Any) -> None:
    """Raise `SettingsError` for a model with layers that keep states, before vLLM itself stops at
    what our not supporting its hybrid manager does to it."""
    if model_config.is_attention_free:
        raise SettingsError("no layer of this model keeps KV, only states", _REMEDY)
    if model_config.is_hybrid:
        raise SettingsError("layers of this model keep states (Mamba or the like)", _REMEDY)


def check_groups(groups: Iterable[Any]) -> None:
    """Raise `SettingsError` unless all layers are one group of attention over all tokens.

    `groups` are vLLM's `KVCacheGroupSpec`s.
    """
    seen = list(groups)
    for spec in (spec for group in seen for spec in _specs(group.kv_cache_spec)):
        kind = type(spec).__name__
        if kind not in _PROVEN_SPECS:
            raise SettingsError(
                f"layers of this model {_KINDS.get(kind, f'are a {kind}')}", _REMEDY
            )
        if spec.non_causal:
            raise SettingsError("layers of this model attend to later tokens too", _REMEDY)
        compression = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
        if compression != 1:
            raise SettingsError("layers of this model keep several tokens in one", _REMEDY)
    if len(seen) > 1:
        raise SettingsError(f"this model's KV is in {len(seen)} groups of blocks", _REMEDY)


def check_layers(names: Iterable[str], layers: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a cached layer that is read where no hook is.

    `names` are those of the cached tensors, `layers` is vLLM's static forward context. Only these
    two classes read their cache in a function that calls `wait_for_layer_load` first.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    for name in names:
        layer = layers.get(name)
        if type(layer) not in (Attention, MLAAttention):
            kind = "unknown" if layer is None else f"a {type(layer).__name__}"
            raise SettingsError(f"the cached layer {name!r} is {kind}, without a hook", _REMEDY)


def _specs(spec: Any) -> list[Any]:
    """The spec of a group, or those of its layers where they differ in size only."""
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        return list(spec.kv_cache_specs.values())
    return [spec]
