"""An engine's GPU memory and board, as the server sees them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from lamina.board import Board
from lamina.devices import cuda_driver as driver
from lamina.errors import DeviceError
from lamina.protocol import Region

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
