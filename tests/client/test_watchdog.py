"""The watchdog on virtual time: every wait ends, and only those that must be ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lamina.board import Board, TransferStatus
from lamina.client import Retrieve
from lamina.client.watchdog import Watchdog
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Slice
from tests.support.wait import eventually

SLICES = 4
DEADLINE_S = 10.0
PATIENCE_S = 20.0


class World:
    """Retrieves in flight, a clock and a server that can die. Time passes when the test says."""

    def __init__(self) -> None:
        self.board = Board.create(4)
        self.now_s = 0.0
        self.is_dead = False
        self.in_flight: list[Retrieve] = []
        self.watchdog = Watchdog(lambda: self.in_flight, lambda: self.now_s)

    def begin(self, slot: int = 0, base: int = 0, deadline_s: float = DEADLINE_S) -> Retrieve:
        self.board.reset(slot)
        slices = tuple(Slice(i, i, i + 1) for i in range(SLICES))
        retrieve = Retrieve(
            1, "r", self.board, slot, base, slices, deadline_s, lambda: self.is_dead
        )
        self.in_flight.append(retrieve)
        return retrieve


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.in_flight.clear()
    world.watchdog.stop()
    world.board.close()


def test_a_retrieve_is_forced_at_its_deadline_and_not_before(world: World) -> None:
    retrieve = world.begin(base=7)
    other = world.begin(slot=1, deadline_s=DEADLINE_S + 1)
    world.now_s = DEADLINE_S - 0.001
    assert world.watchdog.tick()
    assert retrieve.outcome is None
    assert world.board.landed(0) == 0
    world.now_s = DEADLINE_S
    assert world.watchdog.tick()
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert world.board.landed(0) == 7 + SLICES
    assert other.outcome is None
    assert world.board.status(0) is TransferStatus.OK, "the status on the board is the server's"


def test_a_retrieve_given_up_is_not_over(world: World) -> None:
    retrieve = world.begin()
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    assert not retrieve.is_over, "the server may still write to the pages"
    assert not retrieve.is_acknowledged
    retrieve.acknowledge()
    assert retrieve.is_over


@pytest.mark.parametrize("late_count", [1, 2, 3])
def test_a_late_lower_count_of_the_server_is_forced_again(world: World, late_count: int) -> None:
    retrieve = world.begin()
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    world.board.announce(0, late_count)
    world.watchdog.tick()
    assert world.board.landed(0) == SLICES
    assert retrieve.outcome is TransferStatus.TIMED_OUT


def test_a_server_that_finishes_late_does_not_undo_the_failure(world: World) -> None:
    retrieve = world.begin()
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    for count in range(1, SLICES + 1):
        world.board.announce(0, count)
        world.watchdog.tick()
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert retrieve.refusal is None


def test_nothing_is_written_after_the_acknowledgement_though_the_list_is_stale(
    world: World,
) -> None:
    """The watchdog may hold a retrieve whose slot has been given to the next one meanwhile."""
    old = world.begin()
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    old.acknowledge()
    new = world.begin(base=SLICES, deadline_s=10 * DEADLINE_S)
    world.board.announce(0, SLICES + 1)
    assert old in world.in_flight
    world.now_s = 2 * DEADLINE_S
    world.watchdog.tick()
    assert world.board.landed(0) == SLICES + 1
    assert new.landed_slices == 1
    assert new.outcome is None
    assert old.outcome is TransferStatus.TIMED_OUT


def test_an_acknowledgement_waits_for_a_force_that_is_writing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the slot could be given away between the force's look and its write."""
    retrieve = world.begin()
    announce = world.board.announce
    is_at_the_lock = threading.Event()
    seen: list[bool] = []
    inner = retrieve._lock

    class WatchedLock:
        def __enter__(self) -> None:
            if threading.current_thread() is acknowledging:
                is_at_the_lock.set()
            inner.acquire()

        def __exit__(self, *_: object) -> None:
            inner.release()

    acknowledging = threading.Thread(target=retrieve.acknowledge)

    def announce_slowly(slot: int, count: int) -> None:
        announce(slot, count)  # the outcome is known from here on
        acknowledging.start()
        eventually(lambda: is_at_the_lock.is_set() or not acknowledging.is_alive())
        seen.append(retrieve.is_acknowledged)

    monkeypatch.setattr(retrieve, "_lock", WatchedLock())
    monkeypatch.setattr(world.board, "announce", announce_slowly)
    retrieve.force(TransferStatus.TIMED_OUT)
    acknowledging.join(PATIENCE_S)
    assert seen == [False]
    assert retrieve.is_acknowledged


def test_a_dead_server_ends_every_retrieve_before_its_deadline(world: World) -> None:
    retrieves = [world.begin(slot) for slot in range(3)]
    world.is_dead = True
    assert world.watchdog.tick()
    assert [r.outcome for r in retrieves] == [TransferStatus.SERVER_DIED] * 3
    assert [world.board.landed(slot) for slot in range(4)] == [SLICES, SLICES, SLICES, 0]


def test_death_beats_the_time_out(world: World) -> None:
    retrieve = world.begin()
    world.is_dead = True
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    assert retrieve.outcome is TransferStatus.SERVER_DIED


def test_the_first_reason_stays(world: World) -> None:
    retrieve = world.begin()
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    world.is_dead = True
    world.watchdog.tick()
    assert retrieve.outcome is TransferStatus.TIMED_OUT


@pytest.mark.parametrize("was_read_before", [False, True])
def test_a_retrieve_that_has_landed_is_never_made_a_failure(
    world: World, was_read_before: bool
) -> None:
    retrieve = world.begin()
    world.board.announce(0, SLICES)
    if was_read_before:
        assert retrieve.outcome is TransferStatus.OK
    world.is_dead = True
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    retrieve.force(TransferStatus.TIMED_OUT)
    assert retrieve.outcome is TransferStatus.OK
    assert retrieve.is_over


def test_a_failure_that_the_server_reported_keeps_its_status(world: World) -> None:
    retrieve = world.begin()
    world.board.fail(0, TransferStatus.CANCELLED, SLICES)
    world.now_s = DEADLINE_S
    world.watchdog.tick()
    assert retrieve.outcome is TransferStatus.CANCELLED


def test_an_outcome_once_read_never_changes(world: World) -> None:
    """The server lands the last slice between the watchdog's look and its write."""
    retrieve = world.begin()
    has_ended = retrieve._has_ended

    def lands_right_after_the_look() -> bool:
        ended = has_ended()
        world.board.announce(0, SLICES)
        return ended

    retrieve._has_ended = lands_right_after_the_look  # type: ignore[method-assign]
    retrieve.force(TransferStatus.TIMED_OUT)
    first = retrieve.outcome
    world.watchdog.tick()
    assert first is TransferStatus.TIMED_OUT
    assert retrieve.outcome is first


def test_a_tick_says_whether_anything_is_in_flight(world: World) -> None:
    assert not world.watchdog.tick()
    world.begin()
    assert world.watchdog.tick()
    world.in_flight.clear()
    assert not world.watchdog.tick()


def test_the_thread_wakes_for_a_retrieve_and_forces_it(world: World) -> None:
    world.now_s = DEADLINE_S
    retrieve = world.begin()
    world.watchdog.watch()
    eventually(lambda: retrieve.outcome is TransferStatus.TIMED_OUT)


def test_the_thread_sleeps_while_nothing_is_in_flight(world: World) -> None:
    world.watchdog.watch()
    eventually(lambda: not world.watchdog._wake.is_set())


def test_the_thread_wakes_again_after_it_has_gone_idle(world: World) -> None:
    world.now_s = DEADLINE_S
    for slot in range(3):
        retrieve = world.begin(slot)
        world.watchdog.watch()
        eventually(lambda retrieve=retrieve: retrieve.outcome is not None)  # type: ignore[misc]
        world.in_flight.clear()


def test_the_thread_ends_a_wait_of_the_host_device(world: World) -> None:
    retrieve = world.begin()
    device = HostWorkerDevice()
    waiting = threading.Thread(
        target=device.wait_landed, args=(world.board, retrieve.slot, retrieve.final_count)
    )
    waiting.start()
    world.watchdog.watch()
    assert waiting.is_alive()
    world.now_s = DEADLINE_S
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


@pytest.mark.parametrize("busy", [False, True])
def test_stop_ends_the_thread_also_while_something_is_in_flight(world: World, busy: bool) -> None:
    if busy:
        world.begin()
        world.watchdog.watch()
    stopping = threading.Thread(target=world.watchdog.stop)
    stopping.start()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
