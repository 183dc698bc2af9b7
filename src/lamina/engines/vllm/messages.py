"""What the scheduler's side tells the worker's each step, and what that tells back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class RetrieveSpec:
    """Retrieve leased chunks, from token `start_tokens` of the prompt, into `blocks`."""

    number: int
    request: str
    lease: int
    start_tokens: int
    blocks: list[int]
    layers_per_slice: int
    release_after_slices: int
    """0: a synchronous retrieve, read by a forward of this very step."""
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
    """One step. `gates` are the retrieves that a request of this step may read before they have
    settled; `bad_blocks` those of retrieves that failed after their request was released. Steps are
    numbered from 1."""

    number: int = 0

    retrieves: list[RetrieveSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)
    bad_blocks: set[int] = field(default_factory=set)
    tokens: int = 0
    look_at_weights: int = 0
    """The number of a reset after which the weights may be others; 0: there is nothing to ask."""


class LandedRetrieve(NamedTuple):
    """The server's account of a retrieve: asked for and landed at these times of
    `time.monotonic`."""

    number: int
    nbytes: int
    begun_s: float
    end_s: float


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What became of retrieves and stores, by number; counted over ranks, each reports once.

    `over`: nothing more will touch the blocks. `failed`: after release, the blocks are bad.
    `recompute`: failed before release and over, the request can compute instead. `step` is the
    number of a step that computed something, `landed` what the server told since the last report.
    `weights` answers `StepMetadata.look_at_weights`, an entry a rank, with the reset's number.
    """

    step: int = 0

    retrieves_over: Counter[int] = field(default_factory=Counter)
    retrieves_failed: Counter[int] = field(default_factory=Counter)
    retrieves_to_recompute: Counter[int] = field(default_factory=Counter)
    stores_over: Counter[int] = field(default_factory=Counter)
    landed: list[LandedRetrieve] = field(default_factory=list)
    weights: list[tuple[int, str | None]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Add another rank's report."""
        assert isinstance(other, StepReport)
        return StepReport(
            max(self.step, other.step),
            self.retrieves_over + other.retrieves_over,
            self.retrieves_failed + other.retrieves_failed,
            self.retrieves_to_recompute + other.retrieves_to_recompute,
            self.stores_over + other.stores_over,
            self.landed + other.landed,
            self.weights + other.weights,
        )

    def __bool__(self) -> bool:
        return bool(
            self.step
            or self.retrieves_over
            or self.retrieves_failed
            or self.retrieves_to_recompute
            or self.stores_over
            or self.landed
            or self.weights
        )


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What only the worker's side knows, for the keys. It travels over Lamina's own connection:
    beside other connectors vLLM's handshake belongs to whichever comes first."""

    geometry_digest: bytes
    layers: int
    token_bytes: int
    """The KV of a token, in all layers."""
    layout: str
    """Tells apart orders inside a page."""
    backend: str
    scales: str
    watches_weights: bool
    """Whether it can tell that the weights in memory have changed."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> WorkerDescription:
        return msgspec.msgpack.decode(encoded, type=cls)
