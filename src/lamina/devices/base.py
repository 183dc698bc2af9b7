"""The device interface: what Lamina asks of the memory that holds an engine's KV.

Two sides. A `WorkerDevice` lives in the engine's process: `export`, `admit`, `write_ticket`,
`wait_landed`, and `rings` where the server is not to touch pages. A `ServerDevice` lives in the
server: `open` gives an `EngineMemory`, `stream` a `CopyStream` per direction, on which a lane's
slices are copied and announced in order.

What every device promises, checked by one conformance suite (`tests/devices/conformance.py`):
a count is never visible before the bytes it announces; announcements of one stream take effect in
the order of the calls, each after all copies before it (copies may overtake each other); nothing
outside the given pieces is touched; once `CopyStream.is_done(mark)` no copy before the mark will
touch memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from lamina.board import Board
from lamina.copies import CopyList
from lamina.geometry import Allocation, BlockIds, Geometry, PageMap
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.records import Shape, Span


class Direction(Enum):
    """Of a copy, seen from the engine."""

    RETRIEVE = "retrieve"
    STORE = "store"


class WorkerDevice(Protocol):
    """The engine's side. Called by the thread that launches the model unless said otherwise."""

    @property
    def name(self) -> str:
        """Names the device to the server, for example `host`."""

    def export(self, allocation: Allocation) -> Region:
        """Describe one allocation so that the server can open it. Raises `DeviceError`."""

    def prefers_rings(self, geometry: Geometry) -> bool:
        """Whether pages of this kind are better placed by the engine itself than copied into."""

    def rings(
        self, geometry: Geometry, page_map: PageMap, allocations: Sequence[Allocation]
    ) -> EngineRings:
        """Make the rings of this worker, once, and what moves records. Raises `DeviceError`.

        Nothing may be running on the device that must not be waited for.
        """

    def event(self, stream: Any = None) -> Any:
        """What stands for all that is enqueued on the compute stream so far (`EngineRings`)."""

    def admit(self, server: Peer) -> None:
        """Let this server open what is exported. Called at each (re)connect."""

    def attach(self, board: Board) -> None:
        """Make the board's words usable by compute streams. Raises `DeviceError`."""

    def detach(self, board: Board) -> None:
        """Undo `attach`, once no work enqueued before uses the board any more."""

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        """Set the board's ticket once everything enqueued on the compute stream is done."""

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        """Make the compute stream wait until the slot's count reaches `count`.

        Anyone can end the wait by forcing the count (see `client.watchdog`).
        """


class EngineRings(Protocol):
    """A worker's rings, and two streams of its own beside its compute streams: one places what has
    landed, one gathers what is stored. Called by the engine's thread.

    `block_ids` has an array a group, of whole chunks; an id below 0 is not wanted. What is enqueued
    on a stream happens in order. Nothing of it waits for a later act of the engine.
    """

    @property
    def regions(self) -> tuple[Region, Region]:
        """The retrieve ring and the store ring, as the server opens them."""

    def place(
        self,
        board: Board,
        slot: int,
        base: int,
        span: Span,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        """Enqueue a retrieve: for each of its records wait until the slot's count says that it has
        landed, move it to its pages, count it on `PLACED`.

        With `after`, an `event`, nothing moves before that has happened. Raises `DeviceError` and
        may have enqueued a part: `skip` must follow.
        """

    def skip(self, board: Board, number: int) -> None:
        """Count all records up to `number` on `PLACED`, once what is enqueued is done."""

    def gather(
        self,
        board: Board,
        number: int,
        shape: Shape,
        position: int,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        """Enqueue a record of a store: move it from its pages into the store ring, count it on
        `GATHERED`. `block_ids` are those of its own chunks. Raises `DeviceError`."""

    def synchronize(self) -> None:
        """Wait until all that is enqueued is done."""

    def close(self) -> None:
        """No more is enqueued."""


class EngineMemory(Protocol):
    """An engine's exported allocations and its board, opened by the server."""

    @property
    def addresses(self) -> Sequence[int]:
        """Where each region starts, in the addresses that `CopyStream.copy` takes."""

    def close(self) -> None:
        """Give the memory back; on the thread that opened it. No copy may be in flight."""


class CopyStream(Protocol):
    """One ordered queue of copies in one direction. Called by one thread at a time."""

    @property
    def only_enqueues(self) -> bool:
        """Whether `copy` returns at once and the bytes move by themselves."""

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        """Enqueue copies; may wait while too much is in flight. Raises `DeviceError`."""

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        """Set the slot's count on the memory's board after all copies enqueued so far.

        Raises `DeviceError`.
        """

    def mark(self) -> int:
        """A number that stands for everything enqueued so far."""

    def is_done(self, mark: int) -> bool:
        """Whether everything up to `mark` has taken effect. Raises `DeviceError`."""

    def drain(self) -> None:
        """Wait until nothing that was enqueued will touch memory any more; never raises.

        For when `mark` or `is_done` has failed. A device whose context is dead moves nothing.
        """


class ServerDevice(Protocol):
    """The server's side."""

    def near_cpus(self) -> set[int] | None:
        """The CPUs nearest to the device, whose memory the arena should be; None: no matter."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make a resident segment of the arena fast to copy; on the arena filler's thread.

        Never raises: a device that cannot says so once and works more slowly.
        """

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        """Open a worker's allocations; on the thread that closes them too.

        Raises `CopyDeniedError` or `DeviceError`.
        """

    def stream(self, direction: Direction) -> CopyStream:
        """A stream; one lane has one."""
