"""The CUDA device: engines whose KV is in GPU memory.

The server maps the engine's allocations by CUDA IPC and moves bytes with copy engines only: it
launches no kernel, so it takes no time from the engine's. Counts are written by the GPU's front
end after the copies of a slice; the engine's stream waits on the same word in host memory. One
lane's stream per direction and GPU, helped by a second where calls are slow; its host side runs
ahead of the link by a bounded amount.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.base import CopyStream, Direction, EngineMemory, EngineRings
from lamina.devices.cuda_memory import OFFSET, CudaMemory, PinnedSegments, map_board
from lamina.devices.cuda_rings import CudaEvent, CudaRings
from lamina.devices.cuda_stream import CudaCopyStream
from lamina.errors import DeviceError
from lamina.geometry import Allocation, Geometry, PageMap
from lamina.linux import Peer
from lamina.protocol import Region

log = logging.getLogger(__name__)
_SMALL_PAGE_BYTES = 32 << 10
_thread = threading.local()  # which context is current on a thread, of all GPUs' devices


def device_name(uuid: str) -> str:
    """How a GPU is called on the wire: the same in both processes, whatever they may see."""
    return f"cuda:{uuid}"


class CudaWorkerDevice:
    """The engine's side, on the GPU whose context is current when it is made."""

    def __init__(self) -> None:
        self.name = device_name(driver.current_device_uuid())
        self._boards: dict[Board, int] = {}

    def prefers_rings(self, geometry: Geometry) -> bool:
        """Below 32 KiB a page: there direct copies reach 0.05 (4 KiB) to 0.5 of an H200's link, and
        rings 0.87 to 0.97. Above, direct copies are no slower, and need nothing of a GPU that long
        kernels keep busy. Not where all streams share one queue: all would wait for a record."""
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            return False
        return geometry.mean_page_bytes < _SMALL_PAGE_BYTES

    def rings(
        self, geometry: Geometry, page_map: PageMap, allocations: Sequence[Allocation]
    ) -> EngineRings:
        return CudaRings(self.export, self._boards, geometry, page_map, allocations)

    def event(self, stream: Any = None) -> Any:
        return CudaEvent(stream or 0)

    def export(self, allocation: Allocation) -> Region:
        address, nbytes = allocation
        base, size = driver.address_range(address)
        if address + nbytes > base + size:
            raise DeviceError(
                f"{nbytes} bytes at {address:#x} leave their allocation",
                "Export each allocation that holds KV",
            )
        try:
            handle = driver.ipc_handle(base)
        except DeviceError as error:
            raise DeviceError(
                f"the KV memory cannot be shared with another process: {error.cause}",
                "Allocate it with cudaMalloc: switch off expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF and the engine's sleep mode",
            ) from error
        return Region(handle + OFFSET.pack(address - base), nbytes)

    def admit(self, server: Peer) -> None:
        """Nothing to do: CUDA IPC asks for no permission."""

    def attach(self, board: Board) -> None:
        self._boards[board] = map_board(board)

    def detach(self, board: Board) -> None:
        if self._boards.pop(board, None) is not None:
            driver.synchronize_context()  # a ticket or an ended wait may still be enqueued
            driver.unpin(board.address)

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        driver.write_value(stream or 0, self._boards[board] + board.ticket_offset_bytes, ticket)

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        word = self._boards[board] + board.offset_bytes(slot)
        driver.wait_value(stream or 0, word, count & 0xFFFF_FFFF)


class CudaServerDevice:
    """The server's side of one GPU. `index` is among those that the server can see."""

    def __init__(self, index: int, pinned: PinnedSegments) -> None:
        self._index = index
        self._pinned = pinned
        self._context = 0
        self._opened: dict[bytes, tuple[int, int]] = {}  # handle → mapping, how many use it

    @property
    def can_batch(self) -> bool:
        """Whether batch copies work: the driver has them and all of the arena is pinned."""
        return not self._pinned.incomplete and driver.has_batch_copy()

    def make_current(self) -> None:
        """Make this GPU's context current on the calling thread."""
        if self._context and getattr(_thread, "context", 0) == self._context:
            return
        if not self._context:
            self._context = driver.retain_primary_context(self._index)
            if not driver.has_batch_copy():
                log.warning("the CUDA driver is older than 12.8: copies go one by one, slowly")
        driver.set_context(self._context)
        _thread.context = self._context

    def near_cpus(self) -> set[int] | None:
        listed = Path(f"/sys/bus/pci/devices/{driver.pci_bus_id(self._index)}/local_cpulist")
        try:
            ranges = [part.split("-") for part in listed.read_text().strip().split(",") if part]
        except OSError:
            return None
        cpus = {cpu for r in ranges for cpu in range(int(r[0]), int(r[-1]) + 1)}
        return cpus & os.sched_getaffinity(0) or None

    def pin(self, address: int, nbytes: int) -> None:
        if self._pinned.has(address):
            return  # and no context on a GPU that nobody may ever use
        try:
            self.make_current()
            self._pinned.add(address, nbytes)
        except DeviceError as error:
            self._pinned.note_failure(address, error)

    def split(self, copies: CopyList) -> CopyList:
        """Cut pieces where a copy may not go on: at the edges of pinned segments."""
        return self._pinned.split(copies)

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        self.make_current()
        return CudaMemory(self, board, regions)

    def stream(self, direction: Direction) -> CopyStream:
        return CudaCopyStream(self, direction)

    def open_handle(self, handle: bytes) -> int:
        """Map an allocation, or use the mapping that is there. On one thread only."""
        pointer, users = self._opened.get(handle, (0, 0))
        if not users:
            pointer = driver.open_ipc(handle)
        self._opened[handle] = (pointer, users + 1)
        return pointer

    def close_handle(self, handle: bytes) -> None:
        pointer, users = self._opened.pop(handle)
        if users > 1:
            self._opened[handle] = (pointer, users - 1)
        else:
            driver.close_ipc(pointer)


def server_devices() -> dict[str, CudaServerDevice]:
    """One device per visible GPU by its name; none where there is no driver."""
    try:
        uuids = driver.device_uuids()
    except DeviceError:
        return {}
    pinned = PinnedSegments()
    return {device_name(uuid): CudaServerDevice(i, pinned) for i, uuid in enumerate(uuids)}
