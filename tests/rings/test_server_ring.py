"""A server's ring and the lane that fills it: nothing over what is not placed, and nobody waits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina import protocol
from lamina.board import PLACED, Board, TransferStatus
from lamina.client import Retrieve
from lamina.devices.base import EngineMemory
from lamina.errors import RequestRefusedError
from lamina.protocol import RingPlace
from lamina.records import Shape, fingerprint, shapes
from lamina.server import lane
from lamina.server.fair_queue import FairQueue
from lamina.server.routes import RecordRows, RetrieveRoute, Ring
from lamina.server.transfer import Slot, Transfer
from lamina_lab.known.content import random_keys
from tests.rings.ring_worker import (
    CHUNKS,
    COMMANDS_A_RECORD,
    GEOMETRY,
    RECORDS,
    RETRIEVE_RING_BYTES,
    RingWorker,
)
from tests.support.server import ServerThread
from tests.support.valve import Valve
from tests.support.wait import eventually

Make = Callable[..., RingWorker]
RING_BYTES = 4096
IN_A_RING = 4
"""Records of `GEOMETRY` and `CHUNKS` that fit into a ring."""


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(8)
    yield board
    board.close()


class NoMemory:
    """Of an engine that is not there."""

    addresses = ()

    def close(self) -> None: ...


@given(st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_record_has_room_once_what_lies_there_is_placed(rng: random.Random) -> None:
    """Also after transfers that the server has refused, which took numbers and positions."""
    board = Board.create(8)
    ring = Ring(0, RING_BYTES, board)
    number, position, placed = 1, 0, 0
    unplaced: list[tuple[int, int, int]] = []  # number, where it begins in the ring and ends
    for _ in range(40):
        number, position = number + rng.choice([0, 0, 3]), position + rng.choice([0, 0, 700])
        cut = [Shape(0, 1, 0, 1, rng.randint(1, RING_BYTES // 4)) for _ in range(rng.randint(1, 6))]
        span = ring.join(cut, RingPlace(1, number, position, fingerprint(cut)))
        number, position = span.last_number + 1, span.end_position
        for index, shape in enumerate(cut):
            begin = span.positions[index] % RING_BYTES
            end = begin + shape.nbytes
            while not ring.has_room(span, index):
                assert unplaced, "a ring with nothing in it has no room"
                placed = unplaced.pop(0)[0]
                board.announce(PLACED, placed)
            assert not [each for each in unplaced if begin < each[2] and each[1] < end]
            ring.note_filled(span, index)
            unplaced.append((span.number(index), begin, end))
        if rng.random() < 0.3:  # given up: the engine has passed more than was filled
            unplaced.clear()
            board.announce(PLACED, span.last_number)
    board.close()


@pytest.mark.parametrize(
    ("number", "position"), [(8, 1 << 20), (9, 0), (2**31 + 20, 1 << 20), (-1, 0), (2**32, 0)]
)
def test_a_transfer_that_reaches_back_is_refused(board: Board, number: int, position: int) -> None:
    ring = Ring(0, RING_BYTES, board)
    cut = [Shape(0, 1, 0, 1, 100)] * 2
    same = fingerprint(cut)
    span = ring.join(cut, RingPlace(1, 7, 1024, same))
    assert (span.last_number, span.end_position) == (8, 1380)
    with pytest.raises(RequestRefusedError, match="the next is 9 at 1380"):
        ring.join(cut, RingPlace(1, number, position, same))
    ring.join(cut, RingPlace(1, 9, 1380, same))


def test_a_transfer_that_its_engine_cuts_otherwise_is_refused(board: Board) -> None:
    """Also into as many records: the two sides would place other bytes than were filled."""
    ring = Ring(0, RING_BYTES, board)
    cut = [Shape(0, 3, 0, 1, 300), Shape(3, 4, 0, 1, 100)]
    theirs = fingerprint([Shape(0, 2, 0, 1, 200), Shape(2, 4, 0, 1, 200)])
    with pytest.raises(RequestRefusedError, match="cuts a transfer otherwise"):
        ring.join(cut, RingPlace(1, 1, 0, theirs))
    assert ring.join(cut, RingPlace(1, 1, 0, fingerprint(cut))).first_number == 1


class PlacedMeanwhile(RetrieveRoute):
    """Its engine places all that it is asked to wait for, right after the question."""

    board: Board

    def is_ready(self, part: int) -> bool:
        is_ready = super().is_ready(part)
        self.board.announce(PLACED, 100)
        return is_ready


def test_no_retrieve_of_a_ring_overtakes_another(board: Board) -> None:
    """It would be filled first, and the records of the other over it: nothing would tell."""
    ring = Ring(0, RING_BYTES, board)
    cut = [Shape(0, 1, 0, 1, 1024)] * 4
    full, first, second = (
        ring.join(cut, RingPlace(1, 4 * index + 1, 4096 * index, fingerprint(cut)))
        for index in range(3)
    )
    for index in range(4):
        ring.note_filled(full, index)
    rows = RecordRows(GEOMETRY, [0])
    routes = PlacedMeanwhile(ring, first, rows, 3, 0), RetrieveRoute(ring, second, rows, 4, 0)
    routes[0].board = board
    memory: EngineMemory = NoMemory()
    queue = FairQueue()
    transfers = [
        Transfer(n, memory, board, None, route, 0.0, lambda call: call(), Slot(3 + n, 0))
        for n, route in enumerate(routes)
    ]
    for transfer in transfers:
        queue.append(transfer)
    assert queue.take_ready() is None
    assert queue.take_ready() is transfers[0]


def test_a_cancelled_retrieve_need_not_wait_for_those_before_it(board: Board) -> None:
    """It copies nothing."""
    ring = Ring(0, RING_BYTES, board)
    cut = [Shape(0, 1, 0, 1, 1024)] * 4
    spans = [
        ring.join(cut, RingPlace(1, 4 * index + 1, 4096 * index, fingerprint(cut)))
        for index in range(3)
    ]
    for index in range(4):
        ring.note_filled(spans[0], index)
    memory: EngineMemory = NoMemory()
    queue = FairQueue()
    for number, span in enumerate(spans[1:]):
        route = RetrieveRoute(ring, span, RecordRows(GEOMETRY, [0]), 3 + number, 0)
        slot = Slot(3 + number, 0)
        last = Transfer(number, memory, board, None, route, 0.0, lambda call: call(), slot)
        queue.append(last)
    assert queue.take_ready() is None
    last.cancel()
    assert queue.take_ready() is last


def wait_for(valve: Valve, passed: int) -> None:
    eventually(lambda: valve.passed >= passed)


def wait_for_slices(retrieve: Retrieve, slices: int) -> None:
    eventually(lambda: retrieve.landed_slices >= slices)


def test_a_ring_is_filled_as_it_is_placed(server: ServerThread, worker: RingWorker) -> None:
    """And every byte is right, however slowly that goes."""
    keys = worker.store_new(CHUNKS)
    valve, stream = server.device.retrieves, worker.rings.place_stream
    stream.hold()
    retrieve = worker.begin(1, keys)
    for placed in range(RECORDS):
        filled = min(placed + IN_A_RING, RECORDS)
        wait_for(valve, filled)
        server.after_reading(lambda: None)
        assert valve.passed == filled
        stream.step(COMMANDS_A_RECORD)
        wait_for_slices(retrieve, placed + 1)
    worker.wait(lambda: retrieve.is_acknowledged)
    worker.expect_chunks(keys, worker.blocks_of(1))


def test_an_engine_that_places_nothing_keeps_no_other_waiting(
    server: ServerThread, make_ring_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane stays with a full ring once, for so long and no longer."""
    slow, fast = make_ring_worker(), make_ring_worker()
    keys = slow.store_new(CHUNKS)
    clock = Clock()
    monkeypatch.setattr(lane, "time", clock)
    slow.rings.place_stream.hold()
    retrieves = [slow.begin(number, keys) for number in (1, 2)]
    eventually(lambda: server.device.retrieves.passed == IN_A_RING)
    for number in range(1, 11):  # one chunk at a time has room at once
        fast.check_hit(f"fast {number}", keys[:1], fast.blocks_of(number)[:4])
    assert clock.slept_s <= lane._MAX_ROOM_S + lane._FIRST_POLL_S
    parts = len(shapes(fast.geometry, fast.geometry.slices(1), 1, RETRIEVE_RING_BYTES))
    assert server.device.retrieves.passed == IN_A_RING + 10 * parts
    slow.rings.place_stream.go_on()
    slow.wait(lambda: all(retrieve.is_acknowledged for retrieve in retrieves))
    for number in (1, 2):
        slow.expect_chunks(keys, slow.blocks_of(number))


class Clock:
    """What the lane sleeps for while it stays with a transfer; virtual."""

    slept_s = 0.0

    def monotonic(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def test_a_retrieve_that_is_put_aside_can_be_cancelled(
    server: ServerThread, worker: RingWorker
) -> None:
    keys = worker.store_new(CHUNKS)
    worker.rings.place_stream.hold()
    retrieve = worker.begin(1, keys)
    eventually(lambda: server.device.retrieves.passed == IN_A_RING)
    lanes = server.server.lanes.of("host")
    eventually(lambda: lanes.retrieves._aside)
    worker.client.cancel(retrieve)
    worker.wait(lambda: retrieve.answered)
    eventually(lambda: server.gauges()["queued_transfers"] == 0)
    assert server.gauges()["pins"] == 0
    assert not retrieve.is_passed
    worker.rings.place_stream.go_on()
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.CANCELLED
    worker.check(2, keys)


@pytest.mark.parametrize("place", [(0, 10**9), (10**6, 0)], ids=["number", "position"])
def test_a_retrieve_that_reaches_back_leaves_nothing(
    server: ServerThread, worker: RingWorker, place: tuple[int, int]
) -> None:
    keys = worker.store_new(CHUNKS)
    worker.check(1, keys)
    lease = worker.find("back", keys)
    with pytest.raises(RequestRefusedError, match="joins its ring as record") as refused:
        worker.client.ask(
            lambda n: protocol.Retrieve(
                n, 99, lease, 0, (), 900, 0, 1, ring=RingPlace(CHUNKS * 64, *place, 1)
            )
        )
    assert "\n" not in str(refused.value)
    gauges = server.gauges()
    assert (gauges["pins"], gauges["leases"], gauges["queued_transfers"]) == (0, 0, 0)
    worker.check(2, keys)


@pytest.mark.parametrize("place", [(0, 10**9), (10**6, 0)], ids=["number", "position"])
def test_a_store_that_reaches_back_leaves_nothing(
    server: ServerThread, worker: RingWorker, place: tuple[int, int]
) -> None:
    worker.store_new(CHUNKS)
    with pytest.raises(RequestRefusedError, match="joins its ring as record"):
        worker.client.ask(
            lambda n: protocol.Store(
                n, 99, b"", tuple(random_keys(CHUNKS)), (), 1, RingPlace(CHUNKS * 64, *place, 1)
            )
        )
    assert server.gauges()["arena_reserved_bytes"] == 0
    assert server.gauges()["queued_transfers"] == 0
    worker.check(2, worker.store_new(CHUNKS))
