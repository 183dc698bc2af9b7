"""How the chunks of an engine with several workers are divided.

A *shard* is one piece of every chunk: what one worker keeps of it, or several that keep the same
(*replicas*, as all ranks of an MLA model). A chunk has one key, one place in the arena and one time
of eviction however many shards it has; each shard is a *column* of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from lamina.errors import GeometryError
from lamina.geometry import Geometry

MOST_RANKS = 1024
"""Workers of one engine."""


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Which shard of `shards` a worker keeps, and which of its `replicas` the worker is; both from
    0 on. All workers of an engine say the same of `shards` and `replicas`. Raises `GeometryError`
    when it does not add up."""

    number: int = 0
    shards: int = 1
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not (
            0 <= self.number < self.shards
            and 0 <= self.replica < self.replicas
            and self.ranks <= MOST_RANKS
        ):
            raise GeometryError(
                f"shard {self.number} of {self.shards}, replica {self.replica} of {self.replicas}",
                f"Count both from 0 on; an engine has {MOST_RANKS} workers at most",
            )

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return self.shards * self.replicas

    @property
    def rank(self) -> int:
        """The worker's number among them."""
        return self.number * self.replicas + self.replica

    def writes(self, key: bytes) -> bool:
        """Whether this replica is the one that stores a chunk: they share the work by keys."""
        return self.replicas == 1 or int.from_bytes(key[-4:], "little") % self.replicas == (
            self.replica
        )


ALONE = Shard()
"""Of an engine's only worker."""


class ChunkLayout:
    """Where the columns of a chunk lie, in the order of the shards' `geometries`."""

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        sizes = [geometry.chunk_bytes for geometry in geometries]
        self.offsets_bytes = tuple(accumulate(sizes, initial=0))[:-1]
        """Each column's distance from the chunk's beginning; aligned as chunks are."""
        self.chunk_bytes = sum(sizes)
        self.all_columns = (1 << len(sizes)) - 1
        """A bit a column."""
        self.digest = digest_of([geometry.digest for geometry in geometries])


def digest_of(digests: Sequence[bytes]) -> bytes:
    """Names what an engine's chunks are, by the digests of all shards' geometries: 32 bytes."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
