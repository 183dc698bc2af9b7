"""KV whose bytes follow from its keys: whoever finds a chunk knows what must be in it."""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lamina.geometry import BlockIds, Geometry, Group, Layer

Pages = npt.NDArray[np.uint8]
Blocks = Sequence[int] | BlockIds
POISON = 0xA5
"""What every byte is of pages that are nobody's."""


def equal_layers(
    layers: int = 8,
    page_bytes: int = 512,
    planes: int = 1,
    *,
    chunk_tokens: int = 64,
    block_tokens: int = 16,
) -> Geometry:
    """One group, `layers` equal layers."""
    return Geometry(
        chunk_tokens,
        (Group(block_tokens),),
        tuple(Layer(f"layers.{index}", 0, planes, page_bytes) for index in range(layers)),
    )


def ids(blocks: Blocks) -> BlockIds:
    return np.asarray(blocks, np.int32)


def random_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def chain(*names: str) -> list[bytes]:
    """Keys of a prompt of named chunks: equal beginnings have equal keys."""
    keys = [b""]
    for name in names:
        keys.append(hashlib.sha256(keys[-1] + name.encode()).digest())
    return keys[1:]


def random_prompt(rng: random.Random) -> list[bytes]:
    """Keys of one of 60 prompts: the first are asked for most, and many begin alike."""
    number = int(rng.paretovariate(0.7)) % 60
    parts = range(1, rng.randint(1, 5))
    return chain(f"document {number // 3}", *(f"{number} {part}" for part in parts))


def keys_of_shard(keys: Sequence[bytes], shard: int) -> list[bytes]:
    """What names the content of a shard of these chunks; of shard 0, the keys themselves."""
    if not shard:
        return list(keys)
    return [hashlib.sha256(key + b"shard %d" % shard).digest() for key in keys]


@functools.lru_cache(maxsize=4096)
def content_of(key: bytes, geometry: Geometry) -> Pages:
    """The bytes of a chunk as they lie in the arena, shape (layers, planes, blocks, page bytes)."""
    layer = geometry.layers[0]
    shape = len(geometry.layers), layer.planes, geometry.blocks_per_chunk(0), layer.page_bytes
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    return rng.integers(0, 256, shape, np.uint8)


def content_of_run(keys: Sequence[bytes], geometry: Geometry) -> Pages:
    """The same of consecutive chunks, block after block."""
    return np.concatenate([content_of(key, geometry) for key in keys], axis=2)
