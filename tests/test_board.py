"""The board: bytes before their count, stores void before their bytes change, numbers that wrap,
and boards that must not be trusted."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina.board
from lamina.board import (
    LINE_BYTES,
    MAGIC,
    MAX_SLOTS,
    VERSION,
    Board,
    TransferStatus,
    reached,
)
from lamina.errors import BoardError
from lamina.linux import copy_between, wait_readable

ROUNDS = 100_000
PAYLOAD_WORDS = 256
FIRST_COUNT = 2**32 - ROUNDS // 2
"""Half of the rounds come before the count wraps."""
ENOUGH = 2_000
"""Copies of a void store, and of one that is not."""
FIRST_SLOT_LINE = 4

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS = SIZE_SEALS | fcntl.F_SEAL_SEAL


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(4)
    yield board
    board.close()


def test_the_reader_never_sees_a_count_before_its_bytes_also_where_it_wraps(board: Board) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        board.announce(0, FIRST_COUNT)
        reader = multiprocessing.get_context("spawn").Process(target=_read_counts, args=(theirs,))
        reader.start()
        try:
            socket.send_fds(ours, [b"b"], [board.fd])
            assert reader.pid is not None
            _write_rounds(board, reader.pid, struct.unpack("<Q", ours.recv(8))[0])
            counts, early, backwards = struct.unpack("<QQQ", ours.recv(24))
        finally:
            reader.kill()
            reader.join()
            reader.close()
    assert early == 0, f"{early} of {counts} counts were seen before their bytes"
    assert backwards == 0
    assert counts > 100, "the two processes hardly ran side by side"


def _write_rounds(board: Board, pid: int, address: int) -> None:
    """Write the round's number all over the reader's payload, then announce it."""
    payload = np.empty(PAYLOAD_WORDS, np.uint32)
    local = _as_pieces(payload)
    remote = np.array([[address, payload.nbytes]], np.uint64)
    for count in range(FIRST_COUNT + 1, FIRST_COUNT + ROUNDS + 1):
        payload.fill(count & 0xFFFF_FFFF)
        copy_between(pid, local, remote, into_remote=True)
        board.announce(0, count)


def _as_pieces(payload: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    return np.array([[payload.ctypes.data, payload.nbytes]], np.uint64)


def _read_counts(sock: socket.socket) -> None:
    """The reader: after each new count, no word of the payload may be older than it."""
    with sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        board = Board.attach(fds[0])
        payload = np.full(PAYLOAD_WORDS, FIRST_COUNT, np.uint32)
        sock.send(struct.pack("<Q", payload.ctypes.data))
        counts = early = backwards = 0
        last = FIRST_COUNT
        while not reached(last, FIRST_COUNT + ROUNDS):
            count = board.landed(0)
            if count != last:
                ages = (payload - np.uint32(count)).view(np.int32)
                early += int(ages.min()) < 0
                backwards += not reached(count, last)
                counts += 1
                last = count
        sock.send(struct.pack("<QQQ", counts, early, backwards))
        board.close()


def test_a_copy_of_pages_that_have_changed_is_seen_to_be_void_also_where_tickets_wrap(
    board: Board,
) -> None:
    """An engine gives up store after store and changes its pages; a server that copies them must
    find the store void whenever it has copied anything else."""
    ours, theirs = socket.socketpair()
    ticket = 2**32 - 1000
    page = np.full(PAYLOAD_WORDS, ticket, np.uint32)
    board.void_stores(2**31 - 2)  # no more than half way round at once
    board.void_stores(ticket - 1)
    board.ticket = ticket
    with ours, theirs:
        ours.settimeout(60)
        server = multiprocessing.get_context("spawn").Process(
            target=_copy_pages, args=(theirs, os.getpid(), page.ctypes.data)
        )
        server.start()
        try:
            socket.send_fds(ours, [b"b"], [board.fd])
            while server.is_alive() and not wait_readable(ours.fileno(), 0.0):
                for _ in range(100):
                    board.void_stores(ticket)
                    ticket += 1
                    page.fill(ticket & 0xFFFF_FFFF)
                    board.ticket = ticket
            published, wrong = struct.unpack("<QQ", ours.recv(16))
        finally:
            server.kill()
            server.join()
            server.close()
    assert wrong == 0, f"{wrong} of {published} copies that were not void held other bytes"


def _copy_pages(sock: socket.socket, engine: int, address: int) -> None:
    """The server: copies the page of the latest ticket, then asks whether it is void.

    Until it has seen enough of both, and of both sides of the wrap.
    """
    with sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        board = Board.attach(fds[0])
        copied = np.empty(PAYLOAD_WORDS, np.uint32)
        remote = np.array([[address, copied.nbytes]], np.uint64)
        published = wrong = void = ticket = 0
        while min(published, void) < ENOUGH or not reached(ticket, 0):
            ticket = board.ticket
            copy_between(engine, _as_pieces(copied), remote, into_remote=False)
            if board.is_void(ticket):
                void += 1
            else:
                published += 1
                wrong += bool((copied != np.uint32(ticket)).any())
        sock.send(struct.pack("<QQ", published, wrong))
        board.close()


def test_two_mappings_of_one_board_see_each_others_writes(board: Board) -> None:
    other = Board.attach(os.dup(board.fd))
    assert other.slots == board.slots
    other.heartbeat_ns = 2**63 + 5
    board.ticket = 2**32 + 7
    board.void_stores(2**32 + 4)
    other.announce(3, 2**32 + 9)
    other.fail(1, TransferStatus.COPY_FAILED, 11)
    assert board.heartbeat_ns == 2**63 + 5
    assert other.ticket == 7, "a ticket is 32 bits"
    assert other.void_before == 5
    assert board.landed(3) == 9, "a count is 32 bits"
    assert (board.landed(1), board.status(1)) == (11, TransferStatus.COPY_FAILED)
    assert [board.landed(slot) for slot in (0, 2)] == [0, 0]
    assert [board.status(slot) for slot in (0, 2, 3)] == [TransferStatus.OK] * 3
    other.close()
    assert board.landed(3) == 9, "closing one mapping ended the other"


def test_a_fresh_board_is_all_zero(board: Board) -> None:
    assert (board.heartbeat_ns, board.ticket, board.void_before) == (0, 0, 0)
    assert not board.is_void(0), "no store is void at first, whatever its ticket"
    assert not board.is_void(1)
    for slot in range(board.slots):
        assert (board.landed(slot), board.status(slot)) == (0, TransferStatus.OK)


def test_no_two_writers_share_a_line(board: Board) -> None:
    offsets = [board.offset_bytes(slot) for slot in range(board.slots)]
    assert offsets == [(FIRST_SLOT_LINE + slot) * LINE_BYTES for slot in range(board.slots)]
    board.heartbeat_ns, board.ticket = 0x1111_1111_1111_1111, 0x2222_2222
    board.fail(0, TransferStatus.STOPPED, 0x3333_3333)
    board.void_stores(0x4444_4443)
    lines = os.pread(board.fd, board.nbytes, 0)
    assert lines[64:128] == struct.pack("<Q", 0x1111_1111_1111_1111) + bytes(56)
    assert lines[128:192] == struct.pack("<I", 0x2222_2222) + bytes(60)
    assert lines[192:256] == struct.pack("<I", 0x4444_4444) + bytes(60)
    assert lines[256:320] == struct.pack("<II", 0x3333_3333, TransferStatus.STOPPED) + bytes(56)
    assert not any(lines[320:])


def test_a_failure_writes_its_status_before_the_count_that_ends_the_waits(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, TransferStatus]] = []
    announce = board.announce

    def observed(slot: int, count: int) -> None:
        seen.append((board.landed(slot), board.status(slot)))
        announce(slot, count)

    monkeypatch.setattr(board, "announce", observed)
    board.fail(2, TransferStatus.CANCELLED, 5)
    assert seen == [(0, TransferStatus.CANCELLED)]
    assert board.landed(2) == 5


def test_reset_clears_the_status_and_leaves_the_count(board: Board) -> None:
    board.fail(2, TransferStatus.STOPPED, 5)
    board.reset(2)
    assert (board.landed(2), board.status(2)) == (5, TransferStatus.OK)


@pytest.mark.parametrize("slot", [-1, 4, 2**32])
@pytest.mark.parametrize(
    "use",
    [
        Board.landed,
        Board.status,
        Board.reset,
        Board.offset_bytes,
        lambda board, slot: board.announce(slot, 1),
        lambda board, slot: board.fail(slot, TransferStatus.STOPPED, 1),
    ],
)
def test_a_slot_that_is_not_on_the_board_is_refused(
    board: Board, use: Callable[[Board, int], object], slot: int
) -> None:
    before = os.pread(board.fd, board.nbytes, 0)
    with pytest.raises(BoardError, match=f"slot {slot} of 4. Use a slot of this board"):
        use(board, slot)
    assert os.pread(board.fd, board.nbytes, 0) == before


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_reached_compares_cyclically(target: int, ahead: int) -> None:
    count = (target + ahead) & 0xFFFF_FFFF
    assert reached(count, target)
    assert reached(count, target + 2**32), "a target may be given past 2**32"
    if ahead:
        assert not reached(target, count)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_store_is_void_up_to_the_last_ticket_that_is(last: int, before: int, after: int) -> None:
    board = Board.create(0)
    for ticket in (*range(0, last, 2**30), last):  # never half way round at once
        board.void_stores(ticket)
    assert board.void_before == (last + 1) & 0xFFFF_FFFF
    assert board.is_void(last)
    assert board.is_void((last - before) & 0xFFFF_FFFF)
    assert not board.is_void((last + after) & 0xFFFF_FFFF)
    board.void_stores(last - before)
    assert board.is_void(last), "what is void stays void"
    board.close()


@pytest.mark.parametrize("target", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_count_half_the_range_ahead_counts_as_behind(target: int) -> None:
    """As `cuStreamWaitValue32` has it: the difference as an int32 is at least 0."""
    assert reached((target + 2**31 - 1) % 2**32, target)
    assert not reached((target + 2**31) % 2**32, target)


def test_the_fence_of_weakly_ordered_machines_lets_threads_pass(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lamina.board, "_TOTAL_STORE_ORDER", False)
    board.announce(0, 1)
    board.ticket = 2
    board.void_stores(2)
    assert (board.landed(0), board.ticket, board.is_void(2)) == (1, 2, True)


@pytest.mark.parametrize("slots", [-1, MAX_SLOTS + 1])
def test_a_board_of_impossible_size_is_not_made(slots: int) -> None:
    with pytest.raises(BoardError, match=f"a board of {slots} slots. Use 0 to {MAX_SLOTS}"):
        Board.create(slots)


@pytest.mark.parametrize("slots", [0, 1, MAX_SLOTS])
def test_a_board_of_any_allowed_size_can_be_attached(slots: int) -> None:
    board = Board.create(slots)
    other = Board.attach(os.dup(board.fd))
    assert other.slots == slots
    assert other.nbytes == os.fstat(board.fd).st_size
    board.close()
    other.close()


def test_a_boards_size_is_sealed_for_good(board: Board) -> None:
    for nbytes in (0, 2 * board.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(board.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(board.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@contextmanager
def memfd(content: bytes, size: int | None = None, seals: int = SEALS) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        os.ftruncate(fd, len(content) if size is None else size)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def header(magic: int = MAGIC, version: int = VERSION, slots: int = 4) -> bytes:
    return struct.pack("<QII", magic, version, slots)


FOUR_SLOTS = (FIRST_SLOT_LINE + 4) * LINE_BYTES


def refuses(fd: int, reason: str) -> None:
    """`attach` raises, and leaves the descriptor to its caller."""
    with pytest.raises(BoardError, match=reason):
        Board.attach(fd)
    os.fstat(fd)


@pytest.mark.parametrize("seals", [0, SIZE_SEALS, SEALS & ~fcntl.F_SEAL_SHRINK])
def test_a_board_whose_size_could_change_is_refused(seals: int) -> None:
    with memfd(header(), FOUR_SLOTS, seals) as fd:
        refuses(fd, "size is not sealed. Make it with Board.create")


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_board_without_a_whole_header_is_refused(size: int) -> None:
    with memfd(header(), size) as fd:
        refuses(fd, f"has only {size} bytes. Make it with Board.create")


@pytest.mark.parametrize(
    "content", [header(magic=MAGIC + 1), header(version=VERSION + 1), header(version=0), bytes(16)]
)
def test_a_board_of_another_kind_or_version_is_refused(content: bytes) -> None:
    with memfd(content, FOUR_SLOTS) as fd:
        refuses(fd, "another kind or version .* Run the same Lamina version in the engine and in")


@pytest.mark.parametrize(
    ("slots", "size"),
    [
        (4, 16),
        (4, FOUR_SLOTS - 1),
        (4, FOUR_SLOTS + 1),
        (5, FOUR_SLOTS),
        (3, FOUR_SLOTS),
        (2**32 - 1, FOUR_SLOTS),
        (MAX_SLOTS + 1, (FIRST_SLOT_LINE + MAX_SLOTS + 1) * LINE_BYTES),
    ],
)
def test_a_board_whose_slots_do_not_fill_its_size_is_refused(slots: int, size: int) -> None:
    with memfd(header(slots=slots), size) as fd:
        refuses(fd, f"claims {slots} slots in {size} bytes. Make it with Board.create")


def test_a_descriptor_that_is_no_memfd_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(header().ljust(FOUR_SLOTS, b"\0"))
        file.flush()
        refuses(file.fileno(), "is not a memfd|size is not sealed")
    read_end, write_end = os.pipe()
    refuses(read_end, "is not a memfd. Make it with Board.create")
    os.close(read_end)
    os.close(write_end)


def test_a_board_that_could_not_be_written_is_refused() -> None:
    with memfd(header(), FOUR_SLOTS, SEALS | fcntl.F_SEAL_WRITE) as fd:
        refuses(fd, "Make it with Board.create")
