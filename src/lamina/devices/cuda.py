"""The CUDA device: engines whose KV is in GPU memory.

The server maps the engine's allocations by CUDA IPC and moves bytes with copy engines only: it
launches no kernel, so it takes no time from the engine's. Counts are written by the GPU's front
end after the copies of a slice; the engine's stream waits on the same word in host memory. One
copy stream per direction and GPU; its host side runs ahead of the link by a bounded amount.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.base import CopyStream, Direction, EngineMemory
from lamina.errors import DeviceError
from lamina.geometry import Int64Array
from lamina.linux import Peer
from lamina.protocol import Region

log = logging.getLogger(__name__)
_thread = threading.local()  # which context is current on a thread, of all GPUs' devices

_OFFSET = struct.Struct("<Q")
_AHEAD_BATCHES = 4
"""Batches enqueued before the oldest must be done: enough that the link never waits for the
host, few enough that a cancelled transfer stops in two or three milliseconds."""


def device_name(uuid: str) -> str:
    """How a GPU is called on the wire: the same in both processes, whatever they may see."""
    return f"cuda:{uuid}"


def _map_board(board: Board) -> int:
    """Pin a board; return where the GPU sees it."""
    driver.pin(board.address, board.mapped_bytes)
    return driver.device_pointer(board.address)


class CudaWorkerDevice:
    """The engine's side, on the GPU whose context is current when it is made."""

    def __init__(self) -> None:
        self.name = device_name(driver.current_device_uuid())
        self._boards: dict[Board, int] = {}

    def export(self, address: int, nbytes: int) -> Region:
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
        return Region(handle + _OFFSET.pack(address - base), nbytes)

    def admit(self, server: Peer) -> None:
        """Nothing to do: CUDA IPC asks for no permission."""

    def attach(self, board: Board) -> None:
        self._boards[board] = _map_board(board)

    def detach(self, board: Board) -> None:
        if self._boards.pop(board, None) is not None:
            driver.unpin(board.address)

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        driver.write_value(stream or 0, self._boards[board] + board.ticket_offset_bytes, ticket)

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        word = self._boards[board] + board.offset_bytes(slot)
        driver.wait_value(stream or 0, word, count & 0xFFFF_FFFF)


class CudaMemory:
    """An engine's allocations and board, mapped into the server."""

    def __init__(self, device: CudaServerDevice, board: Board, regions: Sequence[Region]) -> None:
        self._device = device
        self._board = board
        self._handles: list[bytes] = []
        self.addresses: tuple[int, ...] = ()
        try:
            addresses = []
            for region in regions:
                handle = region.handle[: driver.IPC_HANDLE_BYTES]
                offset = region.handle[driver.IPC_HANDLE_BYTES :]
                if len(offset) != _OFFSET.size:
                    raise DeviceError(
                        "a region's handle is no CUDA handle", "Export with CudaWorkerDevice"
                    )
                base = device.open_handle(handle)
                self._handles.append(handle)
                begin = _OFFSET.unpack(offset)[0]
                if begin + region.nbytes > driver.address_range(base)[1]:
                    raise DeviceError(
                        f"a region of {region.nbytes} bytes is larger than its allocation",
                        "Export regions as they are",
                    )
                addresses.append(base + begin)
            self.addresses = tuple(addresses)
            self.board_pointer = _map_board(board)
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


class CudaCopyStream:
    """One stream of one direction; used by one thread at a time."""

    only_enqueues = True

    def __init__(self, device: CudaServerDevice, direction: Direction) -> None:
        self._device = device
        self._to_device = direction is Direction.LOAD
        device.make_current()
        self._stream = driver.create_stream()
        self._idle_events: list[int] = []
        self._batches: deque[int] = deque()
        self._marks: deque[tuple[int, int]] = deque()
        self._mark = 0
        self._done = 0

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        self._device.make_current()
        while len(self._batches) >= _AHEAD_BATCHES:
            driver.wait_recorded(self._batches[0])
            self._idle_events.append(self._batches.popleft())
        engine, host, size = self._device.split(copies)
        target, source = (engine, host) if self._to_device else (host, engine)
        if self._device.can_batch:
            driver.copy_batch(
                target.ctypes.data,
                source.ctypes.data,
                size.ctypes.data,
                len(size),
                self._stream,
                to_device=self._to_device,
            )
        else:
            for piece in zip(target.tolist(), source.tolist(), size.tolist(), strict=True):
                driver.copy_one(*piece, self._stream, to_device=self._to_device)
        self._batches.append(self._record())

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        assert isinstance(memory, CudaMemory)
        self._device.make_current()
        driver.write_value(self._stream, memory.word(slot), count & 0xFFFF_FFFF)

    def mark(self) -> int:
        self._device.make_current()
        self._mark += 1
        self._marks.append((self._mark, self._record()))
        return self._mark

    def is_done(self, mark: int) -> bool:
        self._device.make_current()
        while self._marks and driver.is_recorded(self._marks[0][1]):
            self._done, event = self._marks.popleft()
            self._idle_events.append(event)
        return self._done >= mark

    def _record(self) -> int:
        event = self._idle_events.pop() if self._idle_events else driver.create_event()
        driver.record(event, self._stream)
        return event


class PinnedSegments:
    """What is pinned of the arena, once for all GPUs. Filled by one thread, read by the lanes."""

    def __init__(self) -> None:
        self._base = 0
        self._segment_bytes = 0  # all segments but the last are of one size
        self._pinned: set[int] = set()
        self.incomplete = False
        """Whether something could not be pinned."""

    def spanned_by(self, copies: CopyList) -> npt.NDArray[np.bool_] | None:
        """Which pieces span two segments; None when none does, which is nearly always."""
        if not self._segment_bytes:
            return None
        begin = (copies.host - self._base) % self._segment_bytes
        across: npt.NDArray[np.bool_] = begin + copies.size > self._segment_bytes
        return across if across.any() else None

    def next_edge(self, host: Int64Array) -> Int64Array:
        """Where the segment of each address ends."""
        segment = (host - self._base) // self._segment_bytes
        edge: Int64Array = self._base + (segment + 1) * self._segment_bytes
        return edge

    def add(self, address: int, nbytes: int) -> None:
        """Pin a segment, unless another GPU's device has; the context must be current."""
        if address in self._pinned:
            return
        if not self._pinned:
            self._base, self._segment_bytes = address, nbytes
        self._pinned.add(address)
        try:
            driver.pin(address, nbytes)
        except DeviceError as error:
            if not self.incomplete:
                log.warning(
                    "host memory cannot be pinned, copies will be slow: %s; raise `ulimit -l`",
                    error.cause,
                )
            self.incomplete = True


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
        self.make_current()
        self._pinned.add(address, nbytes)

    def split(self, copies: CopyList) -> CopyList:
        """Cut pieces at the edges of pinned segments: a copy may not span two registrations."""
        while (across := self._pinned.spanned_by(copies)) is not None:
            copies = _cut(copies, across, self._pinned.next_edge(copies.host))
        return copies

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        self.make_current()
        return CudaMemory(self, board, regions)

    def stream(self, direction: Direction) -> CopyStream:
        return CudaCopyStream(self, direction)

    def open_handle(self, handle: bytes) -> int:
        """Map an allocation, or use the mapping that is there. On the event loop only."""
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


def server_devices() -> dict[str, CudaServerDevice]:
    """One device per visible GPU by its name; none where there is no driver."""
    try:
        uuids = driver.device_uuids()
    except DeviceError:
        return {}
    pinned = PinnedSegments()
    return {device_name(uuid): CudaServerDevice(i, pinned) for i, uuid in enumerate(uuids)}
