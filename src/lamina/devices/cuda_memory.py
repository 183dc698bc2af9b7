"""What a GPU of the server can reach: engines' memory and boards, and the pinned arena."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.errors import DeviceError
from lamina.geometry import Int64Array
from lamina.protocol import Region

log = logging.getLogger(__name__)

OFFSET = struct.Struct("<Q")
"""Follows the handle of an allocation in a region's: where in it the region begins."""


def map_board(board: Board) -> int:
    """Pin a board; return where the GPU sees it."""
    driver.pin(board.address, board.mapped_bytes)
    return driver.device_pointer(board.address)


class Mappings(Protocol):
    """A GPU's mappings of other processes' allocations, counted."""

    def make_current(self) -> None: ...

    def open_handle(self, handle: bytes) -> int: ...

    def close_handle(self, handle: bytes) -> None: ...


class CudaMemory:
    """An engine's allocations and board, mapped into the server."""

    def __init__(self, device: Mappings, board: Board, regions: Sequence[Region]) -> None:
        self._device = device
        self._board = board
        self._handles: list[bytes] = []
        self.addresses: tuple[int, ...] = ()
        try:
            addresses = []
            for region in regions:
                handle = region.handle[: driver.IPC_HANDLE_BYTES]
                offset = region.handle[driver.IPC_HANDLE_BYTES :]
                if len(offset) != OFFSET.size:
                    raise DeviceError(
                        "a region's handle is no CUDA handle", "Export with CudaWorkerDevice"
                    )
                base = device.open_handle(handle)
                self._handles.append(handle)
                begin = OFFSET.unpack(offset)[0]
                if begin + region.nbytes > driver.address_range(base)[1]:
                    raise DeviceError(
                        f"a region of {region.nbytes} bytes is larger than its allocation",
                        "Export regions as they are",
                    )
                addresses.append(base + begin)
            self.addresses = tuple(addresses)
            self.board_pointer = map_board(board)
        except DeviceError:
            self._close_handles()
            raise

    def word(self, slot: int) -> int:
        """Where the GPU sees a slot's count."""
        return self.board_pointer + self._board.offset_bytes(slot)

    def close(self) -> None:
        self._device.make_current()
        driver.unpin(self._board.address)
        self._close_handles()

    def _close_handles(self) -> None:
        for handle in self._handles:
            self._device.close_handle(handle)
        self._handles.clear()


class PinnedSegments:
    """What is pinned of the arena, once for all GPUs. Filled by one thread, read by the lanes."""

    def __init__(self) -> None:
        self._base = 0
        self._segment_bytes = 0  # all segments but the last are of one size
        self._pinned: set[int] = set()
        self._failed: set[int] = set()

    @property
    def incomplete(self) -> bool:
        """Whether something could not be pinned."""
        return bool(self._failed)

    def has(self, address: int) -> bool:
        """Whether this segment is pinned: one GPU's device is enough for all."""
        return address in self._pinned

    def split(self, copies: CopyList) -> CopyList:
        """Cut pieces at the edges of segments: a copy may not span two registrations."""
        while (across := self._spanned_by(copies)) is not None:
            copies = _cut(copies, across, self._next_edge(copies.host))
        return copies

    def add(self, address: int, nbytes: int) -> None:
        """Pin a segment; some GPU's context must be current. Raises `DeviceError`."""
        if not self._segment_bytes:
            self._base, self._segment_bytes = address, nbytes
        driver.pin(address, nbytes)
        self._pinned.add(address)
        self._failed.discard(address)

    def note_failure(self, address: int, error: DeviceError) -> None:
        """A device could not pin a segment; the next one may."""
        if not self._failed:
            log.warning(
                "host memory cannot be pinned, copies will be slow: %s; give a smaller `--arena`",
                error.cause,
            )
        self._failed.add(address)

    def _spanned_by(self, copies: CopyList) -> npt.NDArray[np.bool_] | None:
        """Which pieces span two segments; None when none does, which is nearly always."""
        if not self._segment_bytes:
            return None
        begin = (copies.host - self._base) % self._segment_bytes
        across: npt.NDArray[np.bool_] = begin + copies.size > self._segment_bytes
        return across if across.any() else None

    def _next_edge(self, host: Int64Array) -> Int64Array:
        """Where the segment of each address ends."""
        segment = (host - self._base) // self._segment_bytes
        edge: Int64Array = self._base + (segment + 1) * self._segment_bytes
        return edge


def _cut(copies: CopyList, across: npt.NDArray[np.bool_], edge: Int64Array) -> CopyList:
    """Cut the pieces in `across` in two, at `edge` of the host side."""
    head = np.where(across, edge - copies.host, copies.size)
    rest = CopyList(*(array[across] for array in copies))
    skipped = head[across]
    return CopyList(
        np.concatenate([copies.engine, rest.engine + skipped]),
        np.concatenate([copies.host, rest.host + skipped]),
        np.concatenate([head, rest.size - skipped]),
    )
