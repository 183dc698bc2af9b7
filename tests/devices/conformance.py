"""What every device promises (`lamina.devices.base`), as one suite that runs on each of them.

A device's test module subclasses `DeviceConformance` and has a fixture `kit`: how to make the
device's server side here, and its `WorkerSide` in another process. The worker's memory always
lives in a process of its own, spawned by `WorkerProcess`, which allocates, exports, fills and
reads pages on command; nothing in this file knows where that memory is.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina.board import Board, reached
from lamina.copies import CopyList, batches
from lamina.devices.base import CopyStream, Direction, EngineMemory, ServerDevice, WorkerDevice
from lamina.errors import DeviceError, PeerGoneError
from lamina.geometry import Allocation
from lamina.linux import Peer, peer_of
from lamina.protocol import Region
from tests.support.wait import eventually
from tests.test_copies import GUARD_BYTES, Layout, layouts

Bytes = npt.NDArray[np.uint8]
Numbers = Sequence[int] | npt.NDArray[np.integer]

PATIENCE_S = 20.0
SLOTS = 16
POOL_BYTES = 256 << 10
"""Memory that the worker allocates at its start; tests export parts of it."""
ARENA_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 10
"""The arena is pinned in segments of this size; pieces may lie across their edges."""


class WorkerSide(Protocol):
    """What the suite needs in the worker's process. Made there, without arguments."""

    @property
    def device(self) -> WorkerDevice: ...

    @property
    def stream(self) -> Any:
        """The compute stream, as the device takes it."""

    def use_here(self) -> None:
        """Called first by every thread that uses this side."""

    def allocate(self, nbytes: int) -> int:
        """The address of fresh memory as an engine would have it for its KV."""

    def free(self, address: int) -> None: ...

    def write(self, address: int, data: bytes) -> None:
        """Write memory on the compute stream."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Read memory on the compute stream, and wait for it."""


class Kit(Protocol):
    """One device under test."""

    @property
    def worker_side(self) -> Callable[[], WorkerSide]:
        """A class or function that another process can import."""

    @property
    def notices_death(self) -> bool:
        """Whether a copy to a dead worker raises; it is harmless on a device whose mappings
        outlive the worker."""

    def server_device(self) -> ServerDevice: ...


class _Worker:
    """The worker's process: does what it is told over a pipe."""

    def __init__(self, side: WorkerSide, board: Board) -> None:
        side.use_here()
        self._side = side
        self._board = board
        self._waiting: threading.Thread | None = None
        self._seen = b""
        side.device.attach(board)

    def allocate(self, nbytes: int) -> int:
        return self._side.allocate(nbytes)

    def free(self, address: int) -> None:
        self._side.free(address)

    def export(self, address: int, nbytes: int) -> Region:
        return self._side.device.export(Allocation(address, nbytes))

    def write(self, address: int, data: bytes) -> None:
        self._side.write(address, data)
        self._side.read(address, 1)

    def read(self, address: int, nbytes: int) -> bytes:
        return self._side.read(address, nbytes)

    def write_ticket(self, ticket: int) -> None:
        self._side.device.write_ticket(self._board, ticket, self._side.stream)

    def force(self, slot: int, count: int) -> None:
        """What a watchdog does; makes no call of the device."""
        self._board.announce(slot, count)

    def begin_wait(self, slot: int, count: int, address: int, nbytes: int) -> None:
        """On a thread: wait for a count, then read memory."""

        def wait() -> None:
            self._side.use_here()
            self._side.device.wait_landed(self._board, slot, count, self._side.stream)
            self._seen = self._side.read(address, nbytes)

        self._waiting = threading.Thread(target=wait)
        self._waiting.start()

    def is_waiting(self) -> bool:
        return self._waiting is not None and self._waiting.is_alive()

    def end_wait(self) -> bytes:
        """What was read after the wait."""
        assert self._waiting is not None
        self._waiting.join(PATIENCE_S)
        assert not self._waiting.is_alive(), "the wait has not ended"
        return self._seen

    def follow(self, slot: int, base: int, rounds: int, address: int, nbytes: int) -> int:
        """Wait for one count after another; how often memory was older than the count."""
        early = 0
        for count in range(base + 1, base + rounds + 1):
            self._side.device.wait_landed(self._board, slot, count, self._side.stream)
            early += _is_older(self._side.read(address, nbytes), count)
        return early

    def write_with_tickets(self, address: int, nbytes: int, first: int, rounds: int) -> None:
        """Write numbers all over memory, each followed by its ticket, as fast as it goes."""
        for number in range(first, first + rounds):
            self._side.write(address, _all_over(number, nbytes))
            self._side.device.write_ticket(self._board, number, self._side.stream)

    def detach_behind_tickets(self, address: int, nbytes: int, tickets: int) -> bool:
        """Enqueue work and tickets for a board of its own, detach it; whether all were written."""
        board = Board.create(1)
        self._side.device.attach(board)
        for number in range(1, tickets + 1):
            self._side.write(address, _all_over(number, nbytes))
            self._side.device.write_ticket(board, number, self._side.stream)
        self._side.device.detach(board)
        is_written = board.ticket == tickets
        board.close()
        return is_written

    def write_in_turns(self, slot: int, address: int, nbytes: int, rounds: int) -> None:
        """Write a number and its ticket; write over it as soon as the count says it is out."""
        for number in range(1, rounds + 1):
            self._side.write(address, _all_over(number, nbytes))
            self._side.device.write_ticket(self._board, number, self._side.stream)
            self._side.device.wait_landed(self._board, slot, number, self._side.stream)


def _all_over(number: int, nbytes: int) -> bytes:
    return np.full(nbytes // 4, number & 0xFFFF_FFFF, np.uint32).tobytes()


def _is_older(data: bytes, number: int) -> bool:
    """Whether any word of `data` is below `number`, cyclically."""
    words = np.frombuffer(data, np.uint32)
    return bool(((words - np.uint32(number & 0xFFFF_FFFF)).view(np.int32) < 0).any())


def _serve_commands(path: str, make_side: Callable[[], WorkerSide]) -> None:
    """The main function of the worker's process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        server = peer_of(sock)
        board = Board.create(SLOTS)
        side = make_side()
        worker = _Worker(side, board)
        side.device.admit(server)
        socket.send_fds(sock, [b"b"], [board.fd])
        pipe = Connection(sock.detach())
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send((getattr(worker, name)(*arguments), ""))
            except Exception as error:
                pipe.send((None, repr(error)))


class WorkerProcess:
    """The test's end of a worker: its peer and board, and commands to it."""

    def __init__(self, make_side: Callable[[], WorkerSide]) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="lamina-") as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
        ):
            path = os.path.join(directory, "s")
            listening.bind(path)
            listening.listen(1)
            listening.settimeout(PATIENCE_S)
            self.process = multiprocessing.get_context("spawn").Process(
                target=_serve_commands, args=(path, make_side), daemon=True
            )
            self.process.start()
            sock, _ = listening.accept()
        with sock:
            sock.settimeout(PATIENCE_S)
            self.peer: Peer = peer_of(sock)
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            sock.settimeout(None)
            self.board = Board.attach(fds[0])
            self._pipe = Connection(sock.detach())
        self.pool: int = self.call("allocate", POOL_BYTES)

    def start(self, name: str, *arguments: Any) -> None:
        """Give a command; `finish` takes its result."""
        self._pipe.send((name, arguments))

    def finish(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the worker does not answer"
        result, error = self._pipe.recv()
        assert not error, f"the worker failed: {error}"
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.finish()

    def export(self, offset: int = 0, nbytes: int = POOL_BYTES) -> Region:
        """Export a part of the pool."""
        region: Region = self.call("export", self.pool + offset, nbytes)
        return region

    def write(self, offset: int, data: Bytes) -> None:
        """Write to the pool."""
        self.call("write", self.pool + offset, data.tobytes())

    def read(self, offset: int = 0, nbytes: int = POOL_BYTES) -> Bytes:
        """Read the pool."""
        return np.frombuffer(self.call("read", self.pool + offset, nbytes), np.uint8)

    def kill(self) -> None:
        """End the process as the kernel does when it runs out of memory."""
        self.process.kill()
        self.process.join(PATIENCE_S)

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()
        self.board.close()
        self.peer.close()


class Arena:
    """Host memory as the server has it, pinned in segments."""

    def __init__(self, device: ServerDevice) -> None:
        self.bytes: Bytes = np.frombuffer(mmap.mmap(-1, ARENA_BYTES), np.uint8)
        self.base = self.bytes.ctypes.data
        for start in range(0, ARENA_BYTES, SEGMENT_BYTES):
            device.pin(self.base + start, SEGMENT_BYTES)


class Bench:
    """A device with a worker, an arena and streams: what each test works at."""

    def __init__(self, device: ServerDevice, worker: WorkerProcess, arena: Arena) -> None:
        self.device = device
        self.worker = worker
        self.arena = arena
        self._numbers = np.random.default_rng(0)

    def open(self, regions: Sequence[Region] | None = None) -> EngineMemory:
        """Open regions of the worker; the whole pool as one by default."""
        regions = [self.worker.export()] if regions is None else regions
        return self.device.open(self.worker.peer, self.worker.board, regions)

    def stream(self, direction: Direction) -> CopyStream:
        return self.device.stream(direction)

    def reset(self) -> None:
        """Random bytes on both sides, counts and ticket back to zero."""
        self.arena.bytes[:] = self._numbers.integers(0, 256, ARENA_BYTES, np.uint8)
        self.worker.write(0, self._numbers.integers(0, 256, POOL_BYTES, np.uint8))
        for slot in range(SLOTS):
            self.worker.board.announce(slot, 0)
        self.worker.board.ticket = 0

    def pieces(
        self, memory: EngineMemory, pool: Numbers, arena: Numbers, size: Numbers
    ) -> CopyList:
        """Copies between offsets of the pool and offsets of the arena."""
        return CopyList(
            np.array(pool, np.int64) + memory.addresses[0],
            np.array(arena, np.int64) + self.arena.base,
            np.array(size, np.int64),
        )

    def piece(self, memory: EngineMemory, pool: int, arena: int, size: int) -> CopyList:
        return self.pieces(memory, [pool], [arena], [size])


def wait_done(stream: CopyStream) -> None:
    mark = stream.mark()
    eventually(lambda: stream.is_done(mark))


BOTH = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)


class DeviceConformance:
    """Subclass it as `Test…` in a module that has a fixture `kit` of its scope or wider."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_bench(cls, kit: Kit) -> Iterator[Bench]:
        worker = WorkerProcess(kit.worker_side)
        device = kit.server_device()
        yield Bench(device, worker, Arena(device))
        worker.close()

    @pytest.fixture
    def bench(self, shared_bench: Bench) -> Bench:
        shared_bench.reset()
        return shared_bench

    @pytest.fixture
    def memory(self, bench: Bench) -> Iterator[EngineMemory]:
        """The pool, opened as one region."""
        memory = bench.open()
        yield memory
        memory.close()

    @pytest.fixture
    def other_worker(self, kit: Kit) -> Iterator[WorkerProcess]:
        """One that may be killed."""
        worker = WorkerProcess(kit.worker_side)
        yield worker
        worker.close()

    # Bytes

    @settings(
        derandomize=True,
        deadline=None,
        max_examples=40,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(layouts(), st.sampled_from(Direction), st.data())
    def test_any_geometry_is_copied_byte_for_byte_and_nothing_else_is_touched(
        self, shared_bench: Bench, layout: Layout, direction: Direction, data: st.DataObject
    ) -> None:
        bench = shared_bench
        bench.reset()
        sizes = [nbytes + GUARD_BYTES for nbytes in layout.region_bytes]
        starts = np.cumsum([GUARD_BYTES, *sizes]).tolist()[:-1]
        width = data.draw(st.integers(1, len(layout.geometry.layers)), "width")
        host = data.draw(st.integers(0, 2 * SEGMENT_BYTES), "host offset")
        memory = bench.open(
            [bench.worker.export(*part) for part in zip(starts, layout.region_bytes, strict=True)]
        )
        engine_bytes, host_bytes = bench.worker.read().copy(), bench.arena.bytes.copy()
        for page in layout.pages():
            offset = starts[page.region] + page.engine_offset
            in_engine = slice(offset, offset + page.nbytes)
            offset = layout.chunk_addresses(host)[page.chunk] + page.chunk_offset
            in_host = slice(offset, offset + page.nbytes)
            if direction is Direction.RETRIEVE:
                engine_bytes[in_engine] = host_bytes[in_host]
            else:
                host_bytes[in_host] = engine_bytes[in_engine]

        stream = bench.stream(direction)
        plan = layout.plan(list(memory.addresses), bench.arena.base + host)
        for part in layout.geometry.slices(width):
            for batch in batches(plan.copies(part.first_layer, part.end_layer)):
                stream.copy(memory, batch)
            stream.announce(memory, 3, part.number + 1)
        wait_done(stream)
        assert np.array_equal(bench.worker.read(), engine_bytes)
        assert np.array_equal(bench.arena.bytes, host_bytes)
        assert bench.worker.board.landed(3) == len(layout.geometry.slices(width))
        memory.close()

    @BOTH
    @pytest.mark.parametrize("pieces", [1, 1023, 1024, 1025, 5000])
    def test_many_small_pieces_of_odd_sizes_are_copied_in_one_call(
        self, bench: Bench, memory: EngineMemory, direction: Direction, pieces: int
    ) -> None:
        numbers = np.random.default_rng(pieces)
        size = numbers.integers(1, 30, pieces)
        pool, arena = (
            np.cumsum(size + numbers.integers(0, 9, pieces))[numbers.permutation(pieces)]
            for _ in range(2)
        )
        size = np.minimum(size, _room(pool, POOL_BYTES))
        size = np.minimum(size, _room(arena, ARENA_BYTES))
        engine_bytes, host_bytes = bench.worker.read().copy(), bench.arena.bytes.copy()
        for p, a, n in zip(pool.tolist(), arena.tolist(), size.tolist(), strict=True):
            if direction is Direction.RETRIEVE:
                engine_bytes[p : p + n] = host_bytes[a : a + n]
            else:
                host_bytes[a : a + n] = engine_bytes[p : p + n]
        stream = bench.stream(direction)
        stream.copy(memory, bench.pieces(memory, pool, arena, size))
        wait_done(stream)
        assert np.array_equal(bench.worker.read(), engine_bytes)
        assert np.array_equal(bench.arena.bytes, host_bytes)

    @BOTH
    def test_a_piece_may_lie_across_segments_of_the_arena(
        self, bench: Bench, memory: EngineMemory, direction: Direction
    ) -> None:
        start, size = SEGMENT_BYTES - 11, 2 * SEGMENT_BYTES + 23
        engine_bytes, host_bytes = bench.worker.read().copy(), bench.arena.bytes.copy()
        if direction is Direction.RETRIEVE:
            engine_bytes[7 : 7 + size] = host_bytes[start : start + size]
        else:
            host_bytes[start : start + size] = engine_bytes[7 : 7 + size]
        stream = bench.stream(direction)
        stream.copy(memory, bench.piece(memory, 7, start, size))
        wait_done(stream)
        assert np.array_equal(bench.worker.read(), engine_bytes)
        assert np.array_equal(bench.arena.bytes, host_bytes)

    # Order

    @pytest.mark.parametrize("base", [0, 2**32 - 100], ids=["from zero", "past the wrap"])
    def test_a_count_is_never_seen_before_the_bytes_it_announces(
        self, bench: Bench, memory: EngineMemory, base: int
    ) -> None:
        rounds, nbytes, pieces = 2000, 512, 4
        for index in range(rounds):
            data = np.frombuffer(_all_over(base + index + 1, nbytes), np.uint8)
            bench.arena.bytes[index * nbytes :][:nbytes] = data
        bench.worker.board.announce(5, base)
        bench.worker.write(0, np.frombuffer(_all_over(base, nbytes), np.uint8))
        bench.worker.start("follow", 5, base, rounds, bench.worker.pool, nbytes)
        stream = bench.stream(Direction.RETRIEVE)
        part = nbytes // pieces
        for index in range(rounds):
            offsets = np.arange(pieces)[::-1] * part
            stream.copy(
                memory, bench.pieces(memory, offsets, index * nbytes + offsets, [part] * pieces)
            )
            stream.announce(memory, 5, base + index + 1)
        assert bench.worker.finish() == 0, "counts were seen before their bytes"
        wait_done(stream)
        assert bench.worker.board.landed(5) == (base + rounds) & 0xFFFF_FFFF

    def test_a_store_is_out_before_its_count_and_never_before_its_ticket(
        self, bench: Bench, memory: EngineMemory
    ) -> None:
        rounds, nbytes = 100, 1024
        bench.worker.start("write_in_turns", 2, bench.worker.pool, nbytes, rounds)
        stream = bench.stream(Direction.STORE)
        for number in range(1, rounds + 1):
            eventually(lambda number=number: reached(bench.worker.board.ticket, number))  # type: ignore[misc]
            stream.copy(memory, bench.piece(memory, 0, number * nbytes, nbytes))
            stream.announce(memory, 2, number)
        bench.worker.finish()
        wait_done(stream)
        words = bench.arena.bytes[nbytes : (rounds + 1) * nbytes].view(np.uint32)
        expected = np.repeat(np.arange(1, rounds + 1), nbytes // 4)
        assert np.array_equal(words, expected)

    @BOTH
    def test_copies_of_one_stream_take_effect_in_the_order_of_the_calls(
        self, bench: Bench, memory: EngineMemory, direction: Direction
    ) -> None:
        rounds, nbytes = 64, 512
        source = bench.arena.bytes if direction is Direction.RETRIEVE else bench.worker.read()
        last = source[rounds * nbytes :][:nbytes].copy()
        stream = bench.stream(direction)
        for index in range(rounds + 1):
            here, there = index * nbytes, 0
            pool, arena = (there, here) if direction is Direction.RETRIEVE else (here, there)
            stream.copy(memory, bench.piece(memory, pool, arena, nbytes))
            stream.announce(memory, 1, index + 1)
        wait_done(stream)
        target = bench.worker.read() if direction is Direction.RETRIEVE else bench.arena.bytes
        assert np.array_equal(target[:nbytes], last)
        assert bench.worker.board.landed(1) == rounds + 1

    def test_a_ticket_is_never_seen_before_the_bytes_written_ahead_of_it(
        self, bench: Bench, memory: EngineMemory
    ) -> None:
        rounds, nbytes, first = 500, 64 << 10, 2**32 - 250
        bench.worker.write(0, np.frombuffer(_all_over(first - 1, nbytes), np.uint8))
        bench.worker.call("write_ticket", first - 1)
        eventually(lambda: bench.worker.board.ticket == first - 1)
        bench.worker.start("write_with_tickets", bench.worker.pool, nbytes, first, rounds)
        stream = bench.stream(Direction.STORE)
        last = (first + rounds - 1) & 0xFFFF_FFFF
        early, seen = 0, -1
        while seen != last:
            seen = bench.worker.board.ticket
            stream.copy(memory, bench.piece(memory, 0, 0, nbytes))
            wait_done(stream)
            early += _is_older(bench.arena.bytes[:nbytes].tobytes(), seen)
        bench.worker.finish()
        assert early == 0

    # Marks

    @BOTH
    def test_nothing_before_a_mark_writes_once_the_mark_is_done(
        self, bench: Bench, memory: EngineMemory, direction: Direction
    ) -> None:
        nbytes = 4096
        poison = np.full(nbytes, 0xA5, np.uint8)
        stream = bench.stream(direction)
        for round_number in range(20):
            engine, host = bench.worker.read(0, nbytes), bench.arena.bytes[:nbytes].copy()
            stream.copy(memory, bench.piece(memory, 0, 0, nbytes))
            mark = stream.mark()
            stream.copy(memory, bench.piece(memory, nbytes, nbytes, nbytes))
            eventually(lambda mark=mark: stream.is_done(mark))  # type: ignore[misc]
            if direction is Direction.RETRIEVE:
                assert np.array_equal(bench.worker.read(0, nbytes), host), round_number
                bench.worker.write(0, poison)
            else:
                assert np.array_equal(bench.arena.bytes[:nbytes], engine), round_number
                bench.arena.bytes[:nbytes] = poison
            wait_done(stream)
            assert stream.is_done(mark), "a mark that was done is not any more"
            left = bench.worker.read(0, nbytes), bench.arena.bytes[:nbytes]
            assert np.array_equal(left[direction is Direction.STORE], poison)

    @BOTH
    def test_a_mark_on_an_idle_stream_is_done(self, bench: Bench, direction: Direction) -> None:
        stream = bench.stream(direction)
        for _ in range(3):
            wait_done(stream)

    def test_a_done_mark_means_that_earlier_marks_and_counts_are_done(
        self, bench: Bench, memory: EngineMemory
    ) -> None:
        stream = bench.stream(Direction.RETRIEVE)
        marks = []
        for number in range(1, 9):
            stream.copy(memory, bench.piece(memory, 0, 0, 4096))
            stream.announce(memory, 0, number)
            marks.append(stream.mark())
        eventually(lambda: stream.is_done(marks[-1]))
        assert all(stream.is_done(mark) for mark in marks)
        assert bench.worker.board.landed(0) == 8

    def test_streams_of_both_directions_work_side_by_side(
        self, bench: Bench, memory: EngineMemory
    ) -> None:
        retrieves, stores = bench.stream(Direction.RETRIEVE), bench.stream(Direction.STORE)
        half = POOL_BYTES // 2
        engine, host = bench.worker.read().copy(), bench.arena.bytes[:POOL_BYTES].copy()
        for start in range(0, half, 4096):
            retrieves.copy(memory, bench.piece(memory, start, start, 4096))
            stores.copy(memory, bench.piece(memory, half + start, half + start, 4096))
        wait_done(retrieves)
        wait_done(stores)
        expected = np.concatenate([host[:half], engine[half:]])
        assert np.array_equal(bench.worker.read(), expected)
        assert np.array_equal(bench.arena.bytes[:POOL_BYTES], expected)

    # Tickets and waits

    def test_a_board_is_detached_once_no_work_uses_it(self, bench: Bench) -> None:
        """An engine that lost its server unmaps the board while its stream may be behind."""
        address = bench.worker.call("allocate", 1 << 20)
        assert bench.worker.call("detach_behind_tickets", address, 1 << 20, 50)
        bench.worker.call("free", address)

    def test_a_ticket_that_the_worker_writes_is_read_on_the_board(self, bench: Bench) -> None:
        for ticket in (1, 2, 2**32 - 1, 0):
            bench.worker.call("write_ticket", ticket)
            eventually(lambda ticket=ticket: bench.worker.board.ticket == ticket)  # type: ignore[misc]
        assert all(bench.worker.board.landed(slot) == 0 for slot in range(SLOTS))

    @pytest.mark.parametrize("base", [0, 2**32 - 2], ids=["from zero", "past the wrap"])
    def test_a_wait_ends_with_its_count_and_not_before(
        self, bench: Bench, memory: EngineMemory, base: int
    ) -> None:
        bench.worker.board.announce(4, base)
        stream = bench.stream(Direction.RETRIEVE)
        expected = bench.arena.bytes[:1024].copy()
        bench.worker.call("begin_wait", 4, base + 3, bench.worker.pool, 1024)
        for number in (1, 2):
            stream.announce(memory, 4, base + number)
            wait_done(stream)
            assert bench.worker.call("is_waiting")
        stream.copy(memory, bench.piece(memory, 0, 0, 1024))
        stream.announce(memory, 4, base + 3)
        assert bench.worker.call("end_wait") == expected.tobytes()

    @pytest.mark.parametrize("ahead", [0, 5])
    def test_a_wait_for_a_count_that_is_reached_or_passed_ends_at_once(
        self, bench: Bench, ahead: int
    ) -> None:
        bench.worker.board.announce(4, 2**32 - 2 + ahead)
        bench.worker.call("begin_wait", 4, 2**32 - 2, bench.worker.pool, 1)
        bench.worker.call("end_wait")

    def test_a_wait_is_for_its_own_slot(self, bench: Bench, memory: EngineMemory) -> None:
        stream = bench.stream(Direction.RETRIEVE)
        bench.worker.call("begin_wait", 4, 1, bench.worker.pool, 1)
        for slot in (3, 5):
            stream.announce(memory, slot, 100)
        wait_done(stream)
        assert bench.worker.call("is_waiting")
        stream.announce(memory, 4, 1)
        bench.worker.call("end_wait")

    def test_another_thread_of_the_worker_can_end_a_wait_by_forcing_the_count(
        self, bench: Bench
    ) -> None:
        bench.worker.call("begin_wait", 6, 9, bench.worker.pool, 1)
        assert bench.worker.call("is_waiting")
        bench.worker.call("force", 6, 8)
        assert bench.worker.call("is_waiting")
        bench.worker.call("force", 6, 9)
        bench.worker.call("end_wait")

    # Opening and closing

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda region: Region(b"", region.nbytes),
            lambda region: Region(region.handle[:-1], region.nbytes),
            lambda region: Region(region.handle + b"\0", region.nbytes),
            lambda region: Region(bytes(len(region.handle)), region.nbytes),
            lambda region: Region(b"\xff" * len(region.handle), region.nbytes),
            lambda region: Region(region.handle, 1 << 46),
            lambda region: Region(region.handle, (1 << 64) - 1),
        ],
        ids=["empty", "short", "long", "zeros", "ones", "too large", "larger than memory"],
    )
    def test_a_bad_region_is_refused_and_does_no_harm(
        self, bench: Bench, spoil: Callable[[Region], Region]
    ) -> None:
        before = bench.worker.read()
        good = bench.worker.export()
        with pytest.raises(DeviceError) as caught:
            bench.open([good, spoil(good)])
        assert caught.value.cause
        assert caught.value.remedy
        assert np.array_equal(bench.worker.read(), before)
        memory = bench.open([good])
        stream = bench.stream(Direction.RETRIEVE)
        stream.copy(memory, bench.piece(memory, 0, 0, 64))
        wait_done(stream)
        assert np.array_equal(bench.worker.read(0, 64), bench.arena.bytes[:64])
        memory.close()

    def test_memory_that_the_worker_has_freed_cannot_be_opened(self, bench: Bench) -> None:
        address = bench.worker.call("allocate", 2 << 20)
        region = bench.worker.call("export", address, 2 << 20)
        bench.worker.call("free", address)
        with pytest.raises(DeviceError):
            bench.open([region])

    def test_memory_can_be_closed_and_opened_again_while_the_worker_goes_on(
        self, bench: Bench
    ) -> None:
        for number in range(3):
            memory = bench.open()
            stream = bench.stream(Direction.RETRIEVE)
            stream.copy(memory, bench.piece(memory, 0, number * 64, 64))
            wait_done(stream)
            memory.close()
            expected = bench.arena.bytes[number * 64 :][:64]
            assert np.array_equal(bench.worker.read(0, 64), expected)
            bench.worker.write(0, np.zeros(64, np.uint8))
            assert not bench.worker.read(0, 64).any()

    def test_every_region_has_its_own_address(self, bench: Bench) -> None:
        parts = [(0, 4096), (70_001, 999), (4096, 8192)]
        memory = bench.open([bench.worker.export(*part) for part in parts])
        stream = bench.stream(Direction.RETRIEVE)
        expected = bench.worker.read().copy()
        assert len(memory.addresses) == len(parts)
        for index, (address, (offset, nbytes)) in enumerate(
            zip(memory.addresses, parts, strict=True)
        ):
            ends = [[address, address + nbytes - 1], [bench.arena.base + 8 * index] * 2, [1, 1]]
            stream.copy(memory, CopyList(*(np.array(column, np.int64) for column in ends)))
            expected[[offset, offset + nbytes - 1]] = bench.arena.bytes[8 * index]
        wait_done(stream)
        assert np.array_equal(bench.worker.read(), expected)
        memory.close()

    # Death

    @BOTH
    def test_a_copy_of_a_dead_worker_says_so_and_the_stream_goes_on_with_others(
        self,
        kit: Kit,
        bench: Bench,
        memory: EngineMemory,
        other_worker: WorkerProcess,
        direction: Direction,
    ) -> None:
        board, peer = other_worker.board, other_worker.peer
        dead = bench.device.open(peer, board, [other_worker.export()])
        stream = bench.stream(direction)
        piece = CopyList(
            *(np.array([n], np.int64) for n in (dead.addresses[0], bench.arena.base, 64))
        )
        stream.copy(dead, piece)
        wait_done(stream)
        other_worker.kill()
        assert peer.is_dead()
        expected = pytest.raises(PeerGoneError) if kit.notices_death else contextlib.nullcontext()
        with expected:
            stream.copy(dead, piece)
            wait_done(stream)
        dead.close()
        bench.reset()
        stream.copy(memory, bench.piece(memory, 0, 0, 64))
        wait_done(stream)
        assert np.array_equal(bench.worker.read(0, 64), bench.arena.bytes[:64])

    def test_memory_of_a_dead_worker_cannot_be_opened(
        self, bench: Bench, other_worker: WorkerProcess
    ) -> None:
        region = other_worker.export()
        other_worker.kill()
        with pytest.raises(DeviceError):
            bench.device.open(other_worker.peer, other_worker.board, [region])


def _room(offsets: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """Bytes from each offset to the next higher one, so that no two pieces overlap."""
    order = np.argsort(offsets)
    room = np.empty_like(offsets)
    room[order] = np.diff(np.append(offsets[order], limit))
    return room
