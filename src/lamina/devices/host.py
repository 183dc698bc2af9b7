"""The host device: engines whose KV is in CPU memory.

The server copies straight between its arena and the worker's memory with `process_vm_readv` and
`process_vm_writev`; the worker shares nothing but its board. Copies are synchronous, so an
announcement is a plain store to the board after them. A stream can be throttled to a link rate,
which is how a laptop shows what a GPU's link would do.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lamina.board import Board, reached
from lamina.copies import CopyList
from lamina.devices.base import CopyStream, Direction, EngineMemory, EngineRings
from lamina.devices.host_rings import HostRings
from lamina.errors import CopyDeniedError, DeviceError, PeerGoneError
from lamina.geometry import Allocation, Geometry, Int64Array, PageMap
from lamina.linux import IoVec, Peer, allow_copies_by, copy_between
from lamina.protocol import Region

NAME = "host"
_HANDLE = struct.Struct("<Q")
_SPINS_BEFORE_SLEEP = 200
_SLEEP_S = 50e-6


class HostWorkerDevice:
    """The engine's side: addresses are its own, waits are polls with back-off."""

    name = NAME

    def export(self, allocation: Allocation) -> Region:
        return Region(_HANDLE.pack(allocation.address), allocation.nbytes)

    def prefers_rings(self, geometry: Geometry) -> bool:
        return False  # the kernel copies small pieces as fast as we would

    def rings(
        self, geometry: Geometry, page_map: PageMap, allocations: Sequence[Allocation]
    ) -> EngineRings:
        return HostRings(self.export, geometry, page_map, allocations)

    def event(self, stream: Any = None) -> Any:
        return None  # computation on the CPU is done when the call is made

    def admit(self, server: Peer) -> None:
        allow_copies_by(server.pid)

    def attach(self, board: Board) -> None:
        """Nothing to do: the board is this process's own memory."""

    def detach(self, board: Board) -> None:
        """Nothing to undo."""

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        board.ticket = ticket  # computation on the CPU is done when the call is made

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        for spins in range(1 << 62):
            if reached(board.landed(slot), count):
                return
            if spins > _SPINS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)


class HostMemory:
    """Regions of another process (or of this one)."""

    def __init__(self, peer: Peer, board: Board, regions: Sequence[Region]) -> None:
        self.peer = peer
        self.board = board
        try:
            self.addresses = tuple(_HANDLE.unpack(region.handle)[0] for region in regions)
        except struct.error as error:
            raise DeviceError(
                "a region's handle is no host address", "Export regions with HostWorkerDevice"
            ) from error
        if any(a + r.nbytes >= 2**63 for a, r in zip(self.addresses, regions, strict=True)):
            raise DeviceError("a region ends beyond any address", "Export regions as they are")
        probe = np.empty(1, np.uint8)
        for address, region in zip(self.addresses, regions, strict=True):
            for byte in (address, address + region.nbytes - 1):
                self.copy(_iovec([probe.ctypes.data], [1]), _iovec([byte], [1]), into_engine=False)

    def copy(self, host: IoVec, engine: IoVec, *, into_engine: bool) -> None:
        """Raises `PeerGoneError` before touching a process that merely inherited the pid."""
        if self.peer.is_dead():
            raise PeerGoneError(f"worker {self.peer.pid} has died", "It re-registers on restart")
        try:
            copy_between(self.peer.pid, host, engine, into_remote=into_engine)
        except OSError as error:
            raise _explain(error, self.peer.pid) from error

    def close(self) -> None:
        """Nothing is mapped; the peer belongs to the session."""


class HostCopyStream:
    """Synchronous copies in one direction, at most `link_gbps` GB/s when that is given."""

    only_enqueues = False

    def __init__(self, direction: Direction, link_gbps: float | None) -> None:
        self._into_engine = direction is Direction.RETRIEVE
        self._seconds_per_byte = 1e-9 / link_gbps if link_gbps else 0.0
        self._link_free_at = 0.0

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        assert isinstance(memory, HostMemory)
        started = time.perf_counter()
        memory.copy(
            _iovec(copies.host, copies.size),
            _iovec(copies.engine, copies.size),
            into_engine=self._into_engine,
        )
        if self._seconds_per_byte:
            begin = max(self._link_free_at, started)
            self._link_free_at = begin + copies.nbytes * self._seconds_per_byte
            time.sleep(max(0.0, self._link_free_at - time.perf_counter()))

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        assert isinstance(memory, HostMemory)
        memory.board.announce(slot, count)

    def mark(self) -> int:
        return 0

    def is_done(self, mark: int) -> bool:
        return True

    def drain(self) -> None:
        """Nothing to do: every copy is over when it returns."""


class HostServerDevice:
    """The server's side; `link_gbps` throttles each direction."""

    def __init__(self, link_gbps: float | None = None) -> None:
        self._link_gbps = link_gbps

    def near_cpus(self) -> set[int] | None:
        return None

    def pin(self, address: int, nbytes: int) -> None:
        """Nothing to do: the kernel copies from any memory."""

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        return HostMemory(peer, board, regions)

    def stream(self, direction: Direction) -> CopyStream:
        return HostCopyStream(direction, self._link_gbps)


def _iovec(addresses: Int64Array | list[int], sizes: Int64Array | list[int]) -> IoVec:
    pieces = np.empty((len(addresses), 2), np.uint64)
    pieces[:, 0], pieces[:, 1] = addresses, sizes
    return pieces


def _explain(error: OSError, pid: int) -> DeviceError:
    if error.errno == errno.EPERM:
        return CopyDeniedError(
            f"the kernel forbids copies to and from worker {pid}",
            "Run server and engine as the same user in one PID namespace with "
            "/proc/sys/kernel/yama/ptrace_scope at most 1, or give the server CAP_SYS_PTRACE",
        )
    if error.errno == errno.ESRCH:
        return PeerGoneError(f"worker {pid} has died", "It re-registers on restart")
    return DeviceError(
        f"copying to or from worker {pid} failed: {error.strerror}",
        "The worker must keep its registered KV memory mapped",
    )
