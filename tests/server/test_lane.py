"""The lane: who goes when, what ends how, on a stream that the test completes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator

import pytest

import lamina.server.lane
from lamina.board import Board, TransferStatus
from lamina.devices.base import CopyStream, Direction, ServerDevice
from lamina.devices.host import HostServerDevice
from lamina.errors import DeviceError
from lamina.server.lane import Lane, Lanes
from tests.support.lane import PATIENCE_S, Log, Make, ScriptedStream, ScriptedTransfer, stop
from tests.support.wait import eventually


@pytest.fixture
def stream() -> ScriptedStream:
    return ScriptedStream()


@pytest.fixture
def lane(stream: ScriptedStream, make: Make) -> Iterator[Lane]:
    lane = Lane("test-lane", stream)
    yield lane
    make.let_all_go()
    stop(lane)


def test_transfers_run_in_order_of_arrival(lane: Lane, make: Make, log: Log) -> None:
    first = make("first", hold_before=0)
    others = [make(str(number)) for number in range(5)]
    lane.submit(first)
    assert first.is_held.wait(PATIENCE_S)
    for other in others:
        lane.submit(other)
    first.go_on.set()
    others[-1].wait()
    expected = [f"{name}.{what}" for name in ("first", *"01234") for what in ("0", "end")]
    assert log.entries == expected


def test_a_transfer_whose_ticket_is_not_there_holds_nobody_up(
    lane: Lane, make: Make, board: Board, log: Log
) -> None:
    early, other = make("early", ticket=5), make("other")
    lane.submit(early)
    lane.submit(other)
    other.wait()
    assert not early.over.is_set()
    board.ticket = 4
    another = make("another")
    lane.submit(another)
    another.wait()
    assert not early.over.is_set(), "it went before its ticket"
    board.ticket = 5
    early.wait()
    assert log.entries[-2:] == ["early.0", "early.end"]


def test_a_transfer_gets_its_place_back_once_its_ticket_is_there(
    lane: Lane, make: Make, board: Board, log: Log
) -> None:
    running = make("running", hold_before=0)
    early, later = make("early", ticket=1), make("later")
    for transfer in (running, early, later):
        lane.submit(transfer)
    assert running.is_held.wait(PATIENCE_S)
    board.ticket = 1
    running.go_on.set()
    later.wait()
    assert log.entries.index("early.0") < log.entries.index("later.0")


@pytest.mark.parametrize(("written", "wanted"), [(3, 3), (9, 3), (2, 2**32 - 5)])
def test_a_ticket_is_reached_by_any_later_one_also_past_the_wrap(
    lane: Lane, make: Make, board: Board, written: int, wanted: int
) -> None:
    board.ticket = written
    transfer = make("t", ticket=wanted)
    lane.submit(transfer)
    transfer.wait()


def test_steps_of_two_transfers_never_interleave(lane: Lane, make: Make, log: Log) -> None:
    transfers = [[make(f"{who}{n}", steps=4) for n in range(20)] for who in "abc"]

    def submit(mine: list[ScriptedTransfer]) -> None:
        for transfer in mine:
            lane.submit(transfer)

    submitters = [threading.Thread(target=submit, args=(mine,)) for mine in transfers]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    for transfer in itertools.chain(*transfers):
        transfer.wait()
    names = [name for name, _ in itertools.groupby(e.split(".")[0] for e in log.entries)]
    assert len(names) == len(set(names)) == 60
    assert log.entries == [f"{n}.{what}" for n in names for what in ("0", "1", "2", "3", "end")]


def test_a_transfer_cancelled_between_batches_runs_no_further_and_ends_once(
    lane: Lane, make: Make, log: Log
) -> None:
    transfer, following = make("t", steps=4, hold_before=2), make("next")
    lane.submit(transfer)
    lane.submit(following)
    assert transfer.is_held.wait(PATIENCE_S)
    transfer.cancel(TransferStatus.STOPPED)
    transfer.go_on.set()
    following.wait()
    assert log.entries == ["t.0", "t.1", "t.end", "next.0", "next.end"]
    assert transfer.cancelled_as is TransferStatus.STOPPED
    assert transfer.error is None


def test_a_transfer_cancelled_before_its_ticket_ends_without_a_copy(
    lane: Lane, make: Make, log: Log
) -> None:
    transfer = make("t", ticket=7)
    lane.submit(transfer)
    transfer.cancel()
    transfer.wait()
    assert log.entries == ["t.end"]


def test_the_lane_itself_stops_a_cancelled_transfer_that_does_not_look(
    lane: Lane, board: Board, log: Log
) -> None:
    class Endless(ScriptedTransfer):
        def run(self, stream: CopyStream) -> Iterator[None]:
            while True:
                self.cancel()
                yield

    transfer = Endless(log, board, "t")
    lane.submit(transfer)
    transfer.wait()


def test_an_error_of_the_device_ends_its_transfer_with_it_and_the_lane_goes_on(
    lane: Lane, make: Make, log: Log
) -> None:
    fault = DeviceError("the link broke", "Mend it")
    broken = make("t", steps=3, break_before=1, fault=fault)
    following = make("next")
    lane.submit(broken)
    lane.submit(following)
    following.wait()
    assert broken.error is fault
    assert following.error is None
    assert log.entries == ["t.0", "t.end", "next.0", "next.end"]


def test_a_fault_of_our_own_ends_its_transfer_with_an_error_and_is_logged(
    lane: Lane, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "lamina.server.lane"):
        broken = make("t", break_before=0, fault=ZeroDivisionError("our fault"))
        following = make("next")
        lane.submit(broken)
        lane.submit(following)
        following.wait()
    assert isinstance(broken.error, DeviceError)
    assert "the server failed to run the transfer. See its log" in str(broken.error)
    assert "our fault" in caplog.text


def test_a_transfer_ends_when_its_copies_have_taken_effect_and_the_next_starts_before(
    make: Make, log: Log
) -> None:
    stream = ScriptedStream(holds_back=True)
    lane = Lane("test-lane", stream)
    transfers = [make(name) for name in "abc"]
    for transfer in transfers:
        lane.submit(transfer)
    eventually(lambda: "c.0" in log.entries)
    assert log.entries == ["a.0", "b.0", "c.0"], "one ended before its copies were done"
    stream.complete(1)
    transfers[0].wait()
    assert not transfers[1].over.is_set()
    stream.complete(3)
    transfers[2].wait()
    assert log.entries[3:] == ["a.end", "b.end", "c.end"]
    stop(lane)


def test_a_cancelled_transfer_does_not_end_while_its_last_copy_may_still_write(
    make: Make, log: Log
) -> None:
    stream = ScriptedStream(holds_back=True)
    lane = Lane("test-lane", stream)
    transfer, following = make("t", steps=9, hold_before=1), make("next")
    lane.submit(transfer)
    lane.submit(following)
    assert transfer.is_held.wait(PATIENCE_S)
    transfer.cancel()
    transfer.go_on.set()
    eventually(lambda: "next.0" in log.entries)
    assert log.entries == ["t.0", "next.0"]
    stream.complete(2)
    following.wait()
    assert log.entries[2:] == ["t.end", "next.end"]
    stop(lane)


@pytest.mark.parametrize("faulty", ["mark", "is_done"])
def test_a_stream_that_fails_with_copies_in_flight_does_not_end_the_lane(
    lane: Lane, stream: ScriptedStream, make: Make, faulty: str
) -> None:
    """A GPU reports that a copy has failed at any later call."""
    fault = DeviceError("the copy failed on the device", "Look at the driver's log")
    stream.fault, stream.faulty = fault, faulty
    broken = make("t", steps=0)
    lane.submit(broken)
    broken.wait()
    assert broken.error is fault
    following = make("next")
    lane.submit(following)
    following.wait()
    assert following.error is None


@pytest.mark.parametrize("faulty", ["mark", "is_done"])
def test_a_transfer_on_a_stream_that_fails_ends_only_once_nothing_moves_any_more(
    lane: Lane, stream: ScriptedStream, make: Make, faulty: str
) -> None:
    """That a mark or a question failed says nothing about the copies before it."""
    stream.fault, stream.faulty = DeviceError("out of memory", "Free some"), faulty
    stream.drained.clear()
    transfer = make("t")
    lane.submit(transfer)
    eventually(lambda: stream.fault is None)
    assert not transfer.over.is_set()
    stream.drained.set()
    transfer.wait()
    assert isinstance(transfer.error, DeviceError)


def test_queued_counts_every_transfer_that_has_not_ended(lane: Lane, make: Make) -> None:
    running, waiting, ticketed = make("a", hold_before=0), make("b"), make("c", ticket=1)
    assert lane.queued == 0
    for transfer in (running, waiting, ticketed):
        lane.submit(transfer)
    assert running.is_held.wait(PATIENCE_S)
    counted = lane.queued
    ticketed.cancel()
    running.go_on.set()
    ticketed.wait()
    eventually(lambda: lane.queued == 0)
    assert counted == 3


def test_stop_runs_everything_that_is_queued_to_its_end(make: Make, log: Log) -> None:
    lane = Lane("test-lane", ScriptedStream())
    running, following = make("a", steps=2, hold_before=1), make("b", steps=2)
    lane.submit(running)
    lane.submit(following)
    assert running.is_held.wait(PATIENCE_S)
    stopper = threading.Thread(target=lane.stop)
    stopper.start()
    running.go_on.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert log.entries == ["a.0", "a.1", "a.end", "b.0", "b.1", "b.end"]


def test_stop_waits_for_copies_in_flight_and_for_tickets(
    make: Make, board: Board, log: Log
) -> None:
    stream = ScriptedStream(holds_back=True)
    lane = Lane("test-lane", stream)
    for transfer in (make("a"), make("b", ticket=1)):
        lane.submit(transfer)
    eventually(lambda: "a.0" in log.entries)
    stopper = threading.Thread(target=lane.stop)
    stopper.start()
    eventually(lambda: lane._stopping)
    assert stopper.is_alive()
    stream.complete(2)
    eventually(lambda: "a.end" in log.entries)
    assert stopper.is_alive(), "a ticket may still come"
    board.ticket = 1
    stopper.join(PATIENCE_S)
    assert log.entries == ["a.0", "a.end", "b.0", "b.end"]


@pytest.fixture
def stores(lane: Lane, make: Make) -> Iterator[Lane]:
    """The lane that yields to `lane`."""
    stores = Lane("test-stores", ScriptedStream(), yields_to=lane)
    yield stores
    make.let_all_go()
    stop(stores)


def test_a_store_lets_a_retrieve_end_before_its_next_batch(
    lane: Lane, stores: Lane, make: Make, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lamina.server.lane, "_MAX_YIELD_S", PATIENCE_S)
    retrieve, store = make("retrieve", steps=2, hold_before=1), make("store", steps=3)
    lane.submit(retrieve)
    assert retrieve.is_held.wait(PATIENCE_S)
    stores.submit(store)
    eventually(lambda: "store.0" in log.entries)
    assert "store.1" not in log.entries
    retrieve.go_on.set()
    store.wait()
    assert log.entries.index("retrieve.end") < log.entries.index("store.1")


def test_a_retrieve_that_comes_between_a_stores_batches_goes_first(
    lane: Lane, stores: Lane, make: Make, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lamina.server.lane, "_MAX_YIELD_S", PATIENCE_S)
    store, retrieve = (
        make("store", steps=3, hold_before=1),
        make("retrieve", steps=2, hold_before=1),
    )
    stores.submit(store)
    assert store.is_held.wait(PATIENCE_S)
    lane.submit(retrieve)
    assert retrieve.is_held.wait(PATIENCE_S)
    store.go_on.set()
    eventually(lambda: "store.1" in log.entries)
    retrieve.go_on.set()
    store.wait()
    assert log.entries.index("retrieve.end") < log.entries.index("store.2")


def test_a_store_does_not_wait_for_retrieves_for_ever(lane: Lane, stores: Lane, make: Make) -> None:
    retrieve, store = make("retrieve", hold_before=0), make("store", steps=3)
    lane.submit(retrieve)
    assert retrieve.is_held.wait(PATIENCE_S)
    stores.submit(store)
    store.wait()
    assert not retrieve.over.is_set()


def test_a_retrieve_that_waits_for_its_ticket_holds_no_store_up(
    lane: Lane, stores: Lane, make: Make, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link has nothing else to do meanwhile."""
    monkeypatch.setattr(lamina.server.lane, "_MAX_YIELD_S", PATIENCE_S)
    retrieve, store = make("retrieve", ticket=1), make("store", steps=3)
    lane.submit(retrieve)
    stores.submit(store)
    store.wait()
    assert not retrieve.over.is_set()
    board.ticket = 1
    retrieve.wait()


def test_a_retrieve_never_waits_for_a_store(lane: Lane, stores: Lane, make: Make) -> None:
    store, retrieve = make("store", hold_before=0), make("retrieve", steps=3)
    stores.submit(store)
    assert store.is_held.wait(PATIENCE_S)
    lane.submit(retrieve)
    retrieve.wait()
    assert not store.over.is_set()


class ScriptedDevice(HostServerDevice):
    """Notes for which directions streams were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.directions: list[Direction] = []

    def stream(self, direction: Direction) -> CopyStream:
        self.directions.append(direction)
        return ScriptedStream()


def test_a_device_has_one_lane_per_direction_shared_by_all_who_ask() -> None:
    one, two = ScriptedDevice(), ScriptedDevice()
    devices: dict[str, ServerDevice] = {"one": one, "two": two}
    lanes = Lanes(devices)
    assert lanes.of("one") is lanes.of("one")
    assert one.directions == [Direction.RETRIEVE, Direction.STORE]
    assert two.directions == [], "lanes are made when they are needed"
    assert lanes.of("two").retrieves is not lanes.of("one").retrieves
    assert lanes.queued == 0
    lanes.stop()


def test_the_lanes_of_a_device_let_retrieves_go_before_stores(
    make: Make, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lamina.server.lane, "_MAX_YIELD_S", PATIENCE_S)
    lanes = Lanes({"host": ScriptedDevice()})
    retrieve, store = make("retrieve", hold_before=0), make("store", steps=2)
    lanes.of("host").retrieves.submit(retrieve)
    assert retrieve.is_held.wait(PATIENCE_S)
    lanes.of("host").stores.submit(store)
    eventually(lambda: "store.0" in log.entries)
    retrieve.go_on.set()
    store.wait()
    assert log.entries.index("retrieve.end") < log.entries.index("store.1")
    lanes.stop()
