"""What a chunk's bytes depend on besides its tokens: the namespace and the extras of its key."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamina.keys import Extra, Namespace

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10


def namespace_of(
    vllm_config: Any, vllm_version: str, geometry_digest: bytes, layout: str, backend: str
) -> Namespace:
    """The namespace of an engine, without a request's salt."""
    model = vllm_config.model_config
    described = {
        "hf_config": model.hf_config.to_dict(),
        "quantization": str(model.quantization),
        "vllm": ".".join(vllm_version.split(".")[:2]),
    }
    cache_dtype = vllm_config.cache_config.cache_dtype
    return Namespace(
        model=json.dumps(described, sort_keys=True, default=str),
        weights=fingerprint(str(model.model), model.revision, vllm_config.load_config, model.seed),
        dtype=f"{model.dtype} {cache_dtype}",
        geometry=geometry_digest,
        layout=layout,
        backend=backend,
        ranks="tp1 pp1",
    )


def fingerprint(model: str, revision: str | None, load_config: Any, seed: int) -> str:
    """Tells weights apart: names, sizes and samples of the files, spread evenly over each.

    A model that is not a local directory is told by name and revision, random weights by their
    seed.
    """
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return f"dummy {model} {seed}"
    files = sorted(path for pattern in _WEIGHT_PATTERNS for path in Path(model).glob(pattern))
    if not files:
        return f"named {model} {revision} {load_format}"
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // max(1, _SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def extras_of(request: Any, chunk_tokens: int) -> dict[int, list[Extra]]:
    """The extras of a request's chunks, by chunk: LoRA adapter and multimodal items."""
    extras: dict[int, list[Extra]] = {}
    if request.lora_request is not None:
        lora = request.lora_request
        content = fingerprint_adapter(lora.lora_path)
        every_chunk = range(-(-request.num_tokens // chunk_tokens) + 1)
        for chunk in every_chunk:
            extras.setdefault(chunk, []).append(Extra("lora", f"{lora.lora_path} {content}"))
    for item in request.mm_features:
        start, length = item.mm_position.offset, item.mm_position.length
        for chunk in range(start // chunk_tokens, -(-(start + length) // chunk_tokens)):
            extra = Extra("mm", item.identifier, start - chunk * chunk_tokens)
            extras.setdefault(chunk, []).append(extra)
    return extras


def fingerprint_adapter(path: str) -> str:
    """The content of an adapter's files; read when they are new or have changed."""
    files = [(file, file.stat()) for file in sorted(Path(path).glob("adapter_*"))]
    return _fingerprint(tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in files))


@lru_cache(256)
def _fingerprint(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for file, _, _ in files:
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
