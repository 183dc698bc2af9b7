"""A store: chunks out of a worker's pages into the arena, one chunk after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lamina.board import Board, TransferStatus
from lamina.copies import CopyPlan, batches
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError
from lamina.geometry import BlockIds, Geometry
from lamina.server.index import Chunk, Index
from lamina.server.lane import Transfer


class Saved(NamedTuple):
    """How a store ended: the first `whole_chunks` of its chunks have all their bytes."""

    status: TransferStatus
    whole_chunks: int
    error: DeviceError | None


class StoreTransfer(Transfer):
    """Copies whole chunks, one per plan. `ended` is called on the lane's thread."""

    def __init__(
        self,
        memory: EngineMemory,
        board: Board,
        ticket: int,
        plans: list[CopyPlan],
        layers: int,
        ended: Callable[[Saved], None],
    ) -> None:
        super().__init__(memory, board, ticket)
        self._plans = plans
        self._layers = layers
        self._ended = ended
        self._whole = 0

    def run(self, stream: CopyStream) -> Iterator[None]:
        for plan in self._plans:
            for batch in batches(plan.copies(0, self._layers)):
                if self.cancelled_as:
                    return
                stream.copy(self.memory, batch)
                yield
            self._whole += 1

    def end(self, error: DeviceError | None) -> None:
        status = TransferStatus.OK
        if self._whole < len(self._plans):
            status = self.cancelled_as or TransferStatus.COPY_FAILED
        self._ended(Saved(status, self._whole, error))


class Room(NamedTuple):
    """What a store found and got: chunks pinned because they are of its chain and present, and
    chunks reserved for it with their position in its keys."""

    held: list[Chunk]
    reserved: list[tuple[int, Chunk]]


def make_room(index: Index, geometry: Geometry, parent_key: bytes, keys: Sequence[bytes]) -> Room:
    """Reserve what is missing of a chain of chunks, as far as there is room.

    What is present is pinned meanwhile, so that making room for the tail cannot evict the head. A
    chain whose parent is gone could never be found: nothing is reserved for it.
    """
    room = Room([], [])
    parent = index.get(parent_key) if parent_key else None
    if parent_key and parent is None:
        return room
    if parent is not None:
        index.pin([parent])
        room.held.append(parent)
    for number, key in enumerate(keys):
        chunk = index.get(key)
        if chunk is not None:
            index.pin([chunk])
            room.held.append(chunk)
        else:
            chunk = index.reserve(key, parent, geometry.chunk_bytes, geometry.digest)
            if chunk is None:
                break
            room.reserved.append((number, chunk))
        parent = chunk
    return room


def blocks_of_chunk(
    geometry: Geometry, block_ids: Sequence[BlockIds], number: int
) -> list[BlockIds]:
    """The blocks of chunk `number` among those of a run of full chunks, one array a group."""
    counts = [geometry.blocks_per_chunk(group) for group in range(len(geometry.groups))]
    return [ids[number * n : (number + 1) * n] for ids, n in zip(block_ids, counts, strict=True)]
