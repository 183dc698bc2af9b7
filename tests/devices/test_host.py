"""The host device: the conformance suite, and what is its own (iovecs, death, the throttle)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lamina.devices.host
import lamina.linux
from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices.base import Direction, EngineMemory
from lamina.devices.host import HostMemory, HostServerDevice, HostWorkerDevice
from lamina.errors import CopyDeniedError, DeviceError, PeerGoneError
from lamina.linux import IOV_MAX, Peer
from tests.devices.conformance import DeviceConformance, Kit, WorkerProcess, WorkerSide


class HostSide:
    """A worker whose KV is plain anonymous memory."""

    stream = None

    def __init__(self) -> None:
        self.device = HostWorkerDevice()
        self._maps: dict[int, mmap.mmap] = {}

    def use_here(self) -> None:
        """Any thread can use memory."""

    def allocate(self, nbytes: int) -> int:
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    def free(self, address: int) -> None:
        self._maps.pop(address).close()

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


class HostKit:
    worker_side: Callable[[], WorkerSide] = HostSide
    notices_death = True

    def server_device(self) -> HostServerDevice:
        return HostServerDevice()


@pytest.fixture(scope="module")
def kit() -> Kit:
    return HostKit()


class TestHostDevice(DeviceConformance):
    """All of the suite."""


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess(HostSide)
    yield worker
    worker.close()


@pytest.fixture
def memory(worker: WorkerProcess) -> EngineMemory:
    return HostServerDevice().open(worker.peer, worker.board, [worker.export()])


def copies(memory: EngineMemory, host: int, sizes: list[int], gap: int = 0) -> CopyList:
    """Pieces one after another on the host, `gap` bytes apart in the engine."""
    size = np.array(sizes, np.int64)
    starts = np.cumsum(size) - size
    return CopyList(memory.addresses[0] + starts + gap * np.arange(len(size)), host + starts, size)


class StingyLibc:
    """The kernel's copies, but at most `limit` bytes a call: it may always do less than asked."""

    def __init__(self, limit: int) -> None:
        self._real = lamina.linux._libc
        self._limit = limit
        self.calls: list[int] = []
        """Pieces of each call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # all other calls are the kernel's own

    def process_vm_readv(self, *arguments: int) -> int:
        return self._copy(self._real.process_vm_readv, *arguments)

    def process_vm_writev(self, *arguments: int) -> int:
        return self._copy(self._real.process_vm_writev, *arguments)

    def _copy(
        self,
        real: Callable[..., int],
        pid: int,
        local: int,
        local_count: int,
        remote: int,
        remote_count: int,
        flags: int,
    ) -> int:
        self.calls.append(local_count)
        cut = [self._cut(local, local_count), self._cut(remote, remote_count)]
        (a, n), (b, m) = ((pieces.ctypes.data, len(pieces)) for pieces in cut)
        return real(pid, a, n, b, m, flags)

    def _cut(self, address: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """The first `limit` bytes of these pieces."""
        words = (ctypes.c_uint64 * (2 * count)).from_address(address)
        pieces = np.array(words, np.uint64).reshape(count, 2)
        ends = np.cumsum(pieces[:, 1]).astype(np.int64)
        left = np.clip(self._limit - (ends - pieces[:, 1].astype(np.int64)), 0, None)
        pieces[:, 1] = np.minimum(pieces[:, 1], left.astype(np.uint64))
        return pieces[pieces[:, 1] > 0]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("limit", [1, 7, 64, 100, 1000])
def test_a_copy_that_the_kernel_does_in_part_is_resumed_where_it_stopped(
    worker: WorkerProcess,
    memory: EngineMemory,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
    limit: int,
) -> None:
    numbers = np.random.default_rng(limit)
    sizes = numbers.integers(1, 40, 30).tolist()
    total = sum(sizes)
    host = numbers.integers(0, 256, total, np.uint8)
    worker.write(0, numbers.integers(0, 256, 4096, np.uint8))
    pieces = copies(memory, host.ctypes.data, sizes, gap=3)
    expected_engine, expected_host = worker.read(0, 4096).copy(), host.copy()
    for start, at, size in zip(
        pieces.engine - memory.addresses[0], pieces.host - host.ctypes.data, sizes, strict=True
    ):
        if direction is Direction.RETRIEVE:
            expected_engine[start : start + size] = host[at : at + size]
        else:
            expected_host[at : at + size] = expected_engine[start : start + size]
    libc = StingyLibc(limit)
    with monkeypatch.context() as patch:
        patch.setattr(lamina.linux, "_libc", libc)
        HostServerDevice().stream(direction).copy(memory, pieces)
    assert len(libc.calls) == -(-total // limit)
    assert np.array_equal(worker.read(0, 4096), expected_engine)
    assert np.array_equal(host, expected_host)


def test_no_call_names_more_pieces_than_the_kernel_takes(
    worker: WorkerProcess, memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = StingyLibc(1 << 30)
    host = np.zeros(3000, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(lamina.linux, "_libc", libc)
        HostServerDevice().stream(Direction.RETRIEVE).copy(
            memory, copies(memory, host.ctypes.data, [1] * 3000, gap=1)
        )
    assert libc.calls == [IOV_MAX, IOV_MAX, 3000 - 2 * IOV_MAX]


def test_memory_that_the_worker_unmaps_after_it_was_opened_gives_a_device_error(
    worker: WorkerProcess,
) -> None:
    address = worker.call("allocate", 1 << 20)
    region = worker.call("export", address, 1 << 20)
    memory = HostServerDevice().open(worker.peer, worker.board, [region])
    worker.call("free", address)
    host = np.zeros(64, np.uint8)
    with pytest.raises(DeviceError, match=r"failed: Bad address\. .* must keep .* mapped"):
        HostServerDevice().stream(Direction.RETRIEVE).copy(
            memory, copies(memory, host.ctypes.data, [64])
        )


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.EPERM, CopyDeniedError, "kernel forbids copies .*ptrace_scope .* CAP_SYS_PTRACE"),
        (errno.ESRCH, PeerGoneError, r"has died\. It re-registers"),
        (errno.EFAULT, DeviceError, r"failed: Bad address\. The worker must keep"),
    ],
)
def test_what_the_kernel_refuses_is_explained(
    worker: WorkerProcess,
    memory: EngineMemory,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[DeviceError],
    words: str,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lamina.devices.host, "copy_between", refuse)
    host = np.zeros(64, np.uint8)
    with pytest.raises(DeviceError, match=words) as caught:
        HostServerDevice().stream(Direction.STORE).copy(
            memory, copies(memory, host.ctypes.data, [64])
        )
    assert type(caught.value) is kind


def test_a_process_that_inherited_a_dead_workers_pid_is_not_touched(worker: WorkerProcess) -> None:
    dead = multiprocessing.get_context("spawn").Process(target=os.getpid)
    dead.start()
    assert dead.pid is not None
    pidfd = os.pidfd_open(dead.pid)
    dead.join()
    dead.close()
    heir = Peer(worker.peer.pid, worker.peer.uid, pidfd)
    before = worker.read()
    with pytest.raises(PeerGoneError):
        HostServerDevice().open(heir, worker.board, [worker.export()])
    memory = HostServerDevice().open(worker.peer, worker.board, [worker.export()])
    assert isinstance(memory, HostMemory)
    memory.peer = heir
    host = np.zeros(64, np.uint8)
    with pytest.raises(PeerGoneError, match="has died"):
        HostServerDevice().stream(Direction.RETRIEVE).copy(
            memory, copies(memory, host.ctypes.data, [64])
        )
    assert np.array_equal(worker.read(), before)
    heir.close()


class VirtualTime:
    """Time that passes only in sleeps and as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 50.0
        self.slept_s: list[float] = []
        fake = SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(lamina.devices.host, "time", fake)

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_a_throttled_stream_takes_the_time_of_its_link(
    memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = VirtualTime(monkeypatch)
    host = np.zeros(100_000, np.uint8)
    stream = HostServerDevice(link_gbps=0.001).stream(Direction.RETRIEVE)  # 1 MB/s
    for _ in range(3):
        stream.copy(memory, copies(memory, host.ctypes.data, [60_000, 40_000]))
    assert time.slept_s == pytest.approx([0.1, 0.1, 0.1])


def test_a_throttled_link_saves_up_nothing_while_it_is_idle(
    memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = VirtualTime(monkeypatch)
    host = np.zeros(100_000, np.uint8)
    stream = HostServerDevice(link_gbps=0.001).stream(Direction.STORE)
    stream.copy(memory, copies(memory, host.ctypes.data, [100_000]))
    time.now_s += 60
    stream.copy(memory, copies(memory, host.ctypes.data, [50_000]))
    assert time.slept_s == pytest.approx([0.1, 0.05])


def test_each_direction_has_a_link_of_its_own(
    memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = VirtualTime(monkeypatch)
    host = np.zeros(100_000, np.uint8)
    device = HostServerDevice(link_gbps=0.001)
    streams = [device.stream(direction) for direction in Direction]
    began_s = time.now_s
    streams[0].copy(memory, copies(memory, host.ctypes.data, [100_000]))
    time.now_s = began_s
    streams[1].copy(memory, copies(memory, host.ctypes.data, [100_000]))
    assert time.slept_s == pytest.approx([0.1, 0.1])


def test_a_stream_without_a_limit_does_not_sleep(
    memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = VirtualTime(monkeypatch)
    host = np.zeros(64, np.uint8)
    HostServerDevice().stream(Direction.RETRIEVE).copy(
        memory, copies(memory, host.ctypes.data, [64])
    )
    assert time.slept_s == []


def test_a_wait_backs_off_from_spinning_to_short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create(1)
    slept_s: list[float] = []

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        if len(slept_s) == 5:
            board.announce(0, 1)

    monkeypatch.setattr(lamina.devices.host, "time", SimpleNamespace(sleep=sleep))
    HostWorkerDevice().wait_landed(board, 0, 1)
    assert len(slept_s) == 5
    assert max(slept_s) < 0.001, "a layer would wait much longer than its bytes take"
    board.close()
