"""What the scheduler's side tells the worker's each step, and what that tells back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class LoadSpec:
    """Load leased chunks, from token `start_tokens` of the prompt, into `blocks`."""

    number: int
    request: str
    lease: int
    start_tokens: int
    blocks: list[int]
    layers_per_slice: int
    release_after_slices: int
    """0: a synchronous load, read by a forward of this very step."""
    needs_ticket: bool
    """Whether work enqueued before may still write the blocks."""


@dataclass(frozen=True)
class StoreSpec:
    """Store full chunks; `parent` is the key of the chunk before."""

    number: int
    parent: bytes
    keys: list[bytes]
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step. `gates` are the loads that a request of this step may read before they have
    settled; `bad_blocks` those of loads that failed after their request was released."""

    loads: list[LoadSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)
    bad_blocks: set[int] = field(default_factory=set)
    tokens: int = 0


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What became of loads and stores, by number; counted over ranks, each reports once.

    `over`: nothing more will touch the blocks. `failed`: after release, the blocks are bad.
    `recompute`: failed before release and over, the request can compute instead.
    """

    loads_over: Counter[int] = field(default_factory=Counter)
    loads_failed: Counter[int] = field(default_factory=Counter)
    loads_to_recompute: Counter[int] = field(default_factory=Counter)
    stores_over: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Add another rank's report."""
        assert isinstance(other, StepReport)
        return StepReport(
            self.loads_over + other.loads_over,
            self.loads_failed + other.loads_failed,
            self.loads_to_recompute + other.loads_to_recompute,
            self.stores_over + other.stores_over,
        )

    def __bool__(self) -> bool:
        return any((self.loads_over, self.loads_failed, self.loads_to_recompute, self.stores_over))


@dataclass(frozen=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What only the worker knows, for the keys: geometry, order inside a page, backend."""

    geometry_digest: bytes
    layers: int
    layout: str
    backend: str
