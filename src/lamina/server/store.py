"""A store: full chunks out of a worker's pages into the arena."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from lamina.board import Board, TransferStatus
from lamina.copies import CopyPlan
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError
from lamina.geometry import BlockIds, Geometry
from lamina.server.index import Chunk, Index
from lamina.server.transfer import Transfer
from lamina.server.turns import Pace, Turns, each_part


class Saved(NamedTuple):
    """How a store ended: with OK, all bytes of all its chunks are in."""

    status: TransferStatus
    error: DeviceError | None


class StoreTransfer(Transfer):
    """Copies whole chunks, all or nothing. `ended` is called on the lane's thread.

    One that the engine voids on its board is cancelled by that, so that the lane spends no more
    time on it. Whoever makes the chunks findable looks again (`Board.is_void`).
    """

    def __init__(
        self,
        memory: EngineMemory,
        board: Board,
        ticket: int,
        plan: CopyPlan,
        layers: int,
        ended: Callable[[Saved], None],
    ) -> None:
        super().__init__(memory, board, ticket)
        self._is_void = partial(board.is_void, ticket)
        self._plan = plan
        self._layers = layers
        self._ended = ended
        self._is_whole = False

    @property
    def cancelled_as(self) -> TransferStatus | None:
        if self._cancelled_as is None and self._is_void():
            return TransferStatus.CANCELLED
        return self._cancelled_as

    def run(self, stream: CopyStream) -> Iterator[None]:
        for batch in self._plan.batches(0, self._layers):
            yield
            stream.copy(self.memory, batch)
        self._is_whole = True

    def end(self, error: DeviceError | None) -> None:
        status = TransferStatus.OK
        if error is not None or not self._is_whole:
            status = self.cancelled_as or TransferStatus.COPY_FAILED
        self._ended(Saved(status, error))


class Room(NamedTuple):
    """What a store found and got: chunks pinned because they are of its chain and present, and
    chunks reserved for it, with their positions in its keys and their addresses."""

    present: list[Chunk]
    reserved: list[Chunk]
    numbers: array[int]
    addresses: array[int]


def no_room() -> Room:
    """Of a store that may reserve nothing."""
    return Room([], [], array("q"), array("q"))


def make_room(
    index: Index, geometry: Geometry, parent_key: bytes, keys: Sequence[bytes], most_chunks: int
) -> Turns[Room]:
    """Reserve what is missing of a chain of chunks, as far as there is room, `most_chunks` at most.

    What is present is pinned meanwhile, so that making room for the tail cannot evict the head. A
    chain whose parent is gone could never be found: nothing is reserved for it. Between two turns
    another store may reserve a later part of the same chain: that counts as present.
    """
    room = no_room()
    parent = index.get(parent_key) if parent_key else None
    if parent_key and parent is None:
        return room
    if parent is not None:
        index.pin([parent])
        room.present.append(parent)
    pace = Pace()
    for number, key in enumerate(keys):
        if pace.is_spent():
            yield None
        if index.get(key) is None and (
            len(room.reserved) >= most_chunks
            or not (yield from index.make_room(geometry.chunk_bytes, pace))
        ):
            break
        chunk = index.get(key)
        if chunk is not None:
            index.pin([chunk])
            room.present.append(chunk)
        else:
            chunk = index.reserve(key, parent, geometry.chunk_bytes, geometry.digest)
            assert chunk is not None, "no turn since there was room"
            room.reserved.append(chunk)
            room.numbers.append(number)
            room.addresses.append(chunk.address)
        parent = chunk
    return room


def end_room(index: Index, room: Room, is_whole: bool) -> Turns[None]:
    """Make what was reserved findable, from its head; or forget it, from its tail."""

    def commit(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.commit(chunk)

    def discard(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.discard(chunk)

    if is_whole:
        yield from each_part(room.reserved, commit, are_chunks=True)
    else:
        yield from each_part(room.reserved[::-1], discard, are_chunks=True)
    index.unpin(room.present)


def blocks_of_chunks(
    geometry: Geometry, block_ids: Sequence[BlockIds], numbers: array[int]
) -> list[BlockIds]:
    """The blocks of some chunks of a run of full chunks, one array a group."""
    rows = np.asarray(numbers)
    chosen = []
    for group, ids in enumerate(block_ids):
        by_chunk = ids.reshape(-1, geometry.blocks_per_chunk(group))
        chosen.append(by_chunk[rows].reshape(-1))
    return chosen
