"""What a chunk's bytes depend on besides its tokens: the namespace and the extras of its key.

`docs/identity.md` has the table; `fields.py` is its part about vLLM's configuration.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import PurePath
from typing import Any

from lamina.client.checks import check_name
from lamina.engines.vllm.adapters import Adapters
from lamina.engines.vllm.environment import ENVIRONMENT
from lamina.engines.vllm.epochs import Epochs
from lamina.engines.vllm.fields import FIELDS, WHOLE, Treatment
from lamina.engines.vllm.messages import WorkerDescription
from lamina.engines.vllm.weights import Weights
from lamina.keys import Extra, Namespace

_NO_CONTENT = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
"""Entries of a model's configuration that say where it came from."""
_DEEPEST = 12
_KERNELS = ("torch", "flashinfer-python", "deep-gemm", "deep_gemm", "flash-attn", "triton")
"""Packages whose kernels vLLM uses where they are installed; some round where others do not."""


class Identity:
    """What names the KV of an engine; parts of it become known after its start."""

    def __init__(
        self,
        vllm_config: Any,
        vllm_version: str,
        weights: Weights,
        adapters: Adapters,
        epochs: Epochs,
    ) -> None:
        self._config = vllm_config
        self._version = vllm_version
        self._workers: WorkerDescription | None = None
        self._model = ""
        self.weights = weights
        self.adapters = adapters
        self.epochs = epochs

    @property
    def is_known(self) -> bool:
        """Whether all is known but perhaps the epoch."""
        return self._workers is not None and self.weights.identity is not None

    def workers_told(self, workers: WorkerDescription) -> None:
        """What only the worker's side knows, of all ranks together."""
        self._workers = workers
        self._model = _digest(described(self._config, self._version))
        self.epochs.watched(workers.watches_weights)

    def namespace(self) -> Namespace | None:
        """The engine's namespace, without a request's salt and adapter; None while unknown."""
        workers, weights, epoch = self._workers, self.weights.identity, self.epochs.current
        if workers is None or weights is None or epoch is None:
            return None
        stages = self._config.parallel_config.pipeline_parallel_size
        dtype, cache_dtype = self._config.model_config.dtype, self._config.cache_config.cache_dtype
        return Namespace(
            model=self._model,
            weights=weights,
            dtype=f"{dtype} {cache_dtype}",
            geometry=workers.geometry_digest,
            layout=workers.layout,
            backend=workers.backend,
            ranks=f"{stages} stages of {workers.shard.shards // stages} shards",
            scales=workers.scales,
            epoch=epoch,
        )


def described(vllm_config: Any, vllm_version: str) -> dict[str, Any]:
    """All of vLLM's configuration that counts, as plain values."""
    return {
        "vllm": ".".join(vllm_version.split(".")[:2]),
        "configuration": _counted(vllm_config),
        # Where vLLM is to find the length itself, models are made for the longest there is.
        "longest": vllm_config.model_config.original_max_model_len,
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "kernels": [_version(name) for name in _KERNELS],
        "plugins": sorted(_plugins()),
    }


def extras_of(request: Any, chunk_tokens: int) -> dict[int, list[Extra]]:
    """The extras of a request's chunks, by chunk: the multimodal items that overlap it."""
    extras: dict[int, list[Extra]] = {}
    for item in request.mm_features:
        start, length = item.mm_position.offset, item.mm_position.length
        for chunk in range(start // chunk_tokens, -(-(start + length) // chunk_tokens)):
            extra = Extra("mm", item.identifier, start - chunk * chunk_tokens)
            extras.setdefault(chunk, []).append(extra)
    return extras


def check_texts(request: Any) -> None:
    """Raise `UsageError` unless what users name can be sent and hashed: the request, its salt, its
    multimodal items. JSON may hold lone surrogates."""
    check_name("the request's id", request.request_id)
    check_name("the request's cache_salt", request.cache_salt or "")
    for item in request.mm_features:
        check_name("the identifier of a multimodal item", item.identifier)


def _counted(config: Any) -> dict[str, Any]:
    """The fields of one of vLLM's configuration classes that count; those that the table does not
    name, of a newer vLLM, count too."""
    rows = FIELDS.get(type(config).__name__, {})
    return {
        field.name: _plain(getattr(config, field.name, None))
        for field in dataclasses.fields(config)
        if field.name not in rows or rows[field.name].treatment is not Treatment.NEUTRAL
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON can have it, alike in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        kept = {str(k): _plain(v, depth + 1) for k, v in value.items() if k not in _NO_CONTENT}
        return dict(sorted(kept.items()))
    if hasattr(value, "to_dict") and not isinstance(value, type):  # a model's: it iterates as well
        return _plain(value.to_dict(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        row = WHOLE.get(type(value).__name__)
        neutral = row is not None and row.treatment is Treatment.NEUTRAL
        return None if neutral else _counted(value) or None  # as where it is not set at all
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(v, depth + 1)) for v in value)
    if isinstance(value, Sequence):
        return [_plain(v, depth + 1) for v in value]
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "__dict__") and vars(value):
        return [type(value).__qualname__, _plain(vars(value), depth + 1)]
    return str(value)


def _plugins() -> Iterable[str]:
    """vLLM's plugins that are installed: they may change any model."""
    for entry in entry_points(group="vllm.general_plugins"):
        version = entry.dist.version if entry.dist is not None else ""
        yield f"{entry.name} {entry.value} {version}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
