"""A retrieve: leased chunks into a worker's pages, one slice of layers after another."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lamina.board import Board, TransferStatus
from lamina.copies import CopyPlan
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError, RequestRefusedError
from lamina.geometry import Slice
from lamina.server.index import Chunk, Index
from lamina.server.limits import refuse
from lamina.server.transfer import Transfer
from lamina.server.turns import Turns, each_part


class Landed(NamedTuple):
    """How a retrieve ended; times from its receipt.

    `first_slice_us` is when the first slice was announced to the stream: with a stream that only
    enqueues, as a GPU's, when it was enqueued and not when it landed. `total_us` is to the end of
    the last copy.
    """

    status: TransferStatus
    nbytes: int
    first_slice_us: int
    total_us: int
    error: DeviceError | None


class RetrieveTransfer(Transfer):
    """Copies slice `i` and then announces `base + i + 1` on the slot.

    A retrieve that fails or is cancelled gets its status and then its final count, so that no
    wait of the engine outlives it. `ended` is called on the lane's thread.
    """

    def __init__(
        self,
        memory: EngineMemory,
        board: Board,
        ticket: int | None,
        plan: CopyPlan,
        slices: tuple[Slice, ...],
        slot: int,
        base: int,
        ended: Callable[[Landed], None],
    ) -> None:
        super().__init__(memory, board, ticket)
        self._plan = plan
        self._slices = slices
        self._slot = slot
        self._base = base
        self._ended = ended
        self._started_s = time.perf_counter()
        self._nbytes = 0
        self._announced = 0
        self._first_slice_us = 0

    def run(self, stream: CopyStream) -> Iterator[None]:
        for part in self._slices:
            for batch in self._plan.batches(part.first_layer, part.end_layer):
                yield
                stream.copy(self.memory, batch)
                self._nbytes += batch.nbytes
            stream.announce(self.memory, self._slot, self._base + part.number + 1)
            self._announced += 1
            self._first_slice_us = self._first_slice_us or _us_since(self._started_s)

    def end(self, error: DeviceError | None) -> None:
        status = TransferStatus.OK
        if error is not None or self._announced < len(self._slices):
            status = self.cancelled_as or TransferStatus.COPY_FAILED
        if status:
            self.board.fail(self._slot, status, self._base + len(self._slices))
        total_us = _us_since(self._started_s)
        self._ended(Landed(status, self._nbytes, self._first_slice_us, total_us, error))


def pin_for_retrieve(index: Index, chunks: Sequence[Chunk], layout: bytes) -> Turns[array[int]]:
    """Pin leased chunks once more; return their addresses.

    Raises `RequestRefusedError`, with nothing pinned, when one has another layout.
    """
    addresses = array("q")

    def pin(part: Sequence[Chunk]) -> None:
        if any(chunk.layout != layout for chunk in part):
            raise refuse(
                "the leased chunks were stored with another geometry",
                "Make the geometry part of the namespace of the keys",
            )
        index.pin(part)
        addresses.extend([chunk.address for chunk in part])

    try:
        yield from each_part(chunks, pin)
    except RequestRefusedError:
        index.unpin(chunks[: len(addresses)])
        raise
    return addresses


def _us_since(reading_s: float) -> int:
    return int((time.perf_counter() - reading_s) * 1e6)
