"""What the scheduler's side tells the worker's each step, and what that tells back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lamina.shards import ALONE, Shard


class TransferState(IntEnum):
    """What has become of a retrieve or a store, on both sides; each but the first two is reported.

    A retrieve waits, is released, and is over; it may fail before or after its release. A store is
    over.
    """

    WAITING = 0
    """A retrieve whose request waits for its first slices."""
    RELEASED = 1
    """Its request may run: steps that read its blocks wait for its slices."""
    RECOMPUTED = 2
    """It failed before its request ran: that computes instead."""
    FAILED = 3
    """It failed after its release: its blocks hold no KV though vLLM may count on it."""
    OVER = 4
    """Nothing more will touch its blocks."""


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
    deadline_s: float
    """By the host's monotonic clock, which all ranks read: they give up together."""


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
    cancelled: list[int] = field(default_factory=list)
    """Retrieves that failed on some rank before their requests ran: no rank needs them now."""
    give_up_stores: bool = False
    """Whether stores of former steps are given up: a reset waits for their blocks."""
    look_at_weights: int = 0
    """The number of a reset after which the weights may be others; 0: there is nothing to ask."""


class Account(NamedTuple):
    """The server's account of a retrieve: asked for and landed at these times of
    `time.monotonic`."""

    number: int
    nbytes: int
    begun_s: float
    end_s: float


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What became of transfers, by number and state, counted over ranks: each reports once.

    `step` is the number of a step that computed something, `accounts` what the server told since
    the last report. `weights` answers `StepMetadata.look_at_weights`, an entry a rank, with the
    reset's number.
    """

    step: int = 0
    states: Counter[tuple[int, TransferState]] = field(default_factory=Counter)
    accounts: list[Account] = field(default_factory=list)
    weights: list[tuple[int, str | None]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Add another rank's report."""
        assert isinstance(other, StepReport)
        return StepReport(
            max(self.step, other.step),
            self.states + other.states,
            self.accounts + other.accounts,
            self.weights + other.weights,
        )

    def take(self, state: TransferState, ranks: int) -> list[int]:
        """Remove and return the transfers that so many ranks say have come to `state`."""
        numbers = [
            n for (n, told), count in self.states.items() if told is state and count >= ranks
        ]
        for number in numbers:
            del self.states[number, state]
        return numbers

    def __bool__(self) -> bool:
        return bool(self.step or self.states or self.accounts or self.weights)


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What only the worker's side of a rank knows, for the keys; unlike any other rank's. It
    travels over Lamina's own connection: beside other connectors vLLM's handshake belongs to
    whichever comes first."""

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
    shard: Shard = ALONE

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> WorkerDescription:
        return msgspec.msgpack.decode(encoded, type=cls)
