"""A lane with nothing to do: who submits enqueues the first batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lamina.board import Board
from lamina.devices.base import CopyStream
from lamina.errors import DeviceError
from lamina.server.lane import Lane
from tests.support.lane import PATIENCE_S, Log, Make, ScriptedStream, ScriptedTransfer, stop
from tests.support.wait import eventually


class Watched(ScriptedTransfer):
    """Notes which thread enqueued each batch, and yields before each, as real transfers do."""

    def __init__(
        self, log: Log, board: Board, name: str, steps: int = 6, ticket: int | None = None
    ) -> None:
        super().__init__(log, board, name, steps, ticket)
        self.threads: list[str] = []

    def run(self, stream: CopyStream) -> Iterator[None]:
        for step in range(self._steps):
            yield
            self._log(f"{self._name}.{step}")
            self.threads.append(threading.current_thread().name)


@pytest.fixture
def stream() -> ScriptedStream:
    return ScriptedStream(only_enqueues=True)


@pytest.fixture
def lane(stream: ScriptedStream, make: Make) -> Iterator[Lane]:
    lane = Lane("test-lane", stream)
    yield lane
    make.let_all_go()
    stop(lane)


def test_the_first_batches_are_enqueued_before_submit_returns(
    lane: Lane, log: Log, board: Board
) -> None:
    transfer = Watched(log, board, "t")
    lane.submit(transfer)
    assert log.entries[:2] == ["t.0", "t.1"]
    transfer.wait()
    me = threading.current_thread().name
    assert transfer.threads == [me, me] + ["test-lane"] * 4
    assert log.entries == [f"t.{n}" for n in range(6)] + ["t.end"]


def test_a_transfer_behind_another_waits_for_its_turn(
    lane: Lane, make: Make, log: Log, board: Board
) -> None:
    running, behind = make("a", steps=9, hold_before=6), Watched(log, board, "b")
    lane.submit(running)
    assert running.is_held.wait(PATIENCE_S)
    lane.submit(behind)
    assert not behind.threads
    running.go_on.set()
    behind.wait()
    assert set(behind.threads) == {"test-lane"}
    assert log.entries.index("a.8") < log.entries.index("b.0")


def test_a_transfer_whose_copies_are_still_under_way_is_behind_too(log: Log, board: Board) -> None:
    stream = ScriptedStream(holds_back=True, only_enqueues=True)
    lane = Lane("test-lane", stream)
    first, second = Watched(log, board, "a"), Watched(log, board, "b")
    lane.submit(first)
    eventually(lambda: len(first.threads) == 6)
    lane.submit(second)
    stream.complete(2)
    second.wait()
    assert set(second.threads) == {"test-lane"}
    stop(lane)


def test_only_the_lane_looks_at_a_ring_that_it_is_filling(
    lane: Lane, make: Make, log: Log, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that look for room at once count a record as placed that is not: the next one
    would overwrite it."""
    running, behind = make("a", steps=9, hold_before=6), Watched(log, board, "b")
    asking: list[str] = []

    def is_ready() -> bool:
        asking.append(threading.current_thread().name)
        return True

    monkeypatch.setattr(behind, "is_ready", is_ready)
    lane.submit(running)
    assert running.is_held.wait(PATIENCE_S)
    lane.submit(behind)
    running.go_on.set()
    behind.wait()
    assert set(asking) == {"test-lane"}


def test_what_must_wait_does_not_begin_at_once(lane: Lane, log: Log, board: Board) -> None:
    ticketed = Watched(log, board, "t", ticket=5)
    lane.submit(ticketed)
    assert not ticketed.threads
    board.ticket = 5
    ticketed.wait()
    stores = Lane("test-stores", ScriptedStream(only_enqueues=True), yields_to=lane)
    store = Watched(log, board, "s")
    stores.submit(store)
    store.wait()
    assert set(store.threads) == {"test-stores"}, "a store waits for retrieves: not on the caller"
    stop(stores)


def test_a_stream_that_copies_itself_never_holds_up_who_submits(
    make: Make, log: Log, board: Board
) -> None:
    lane = Lane("test-lane", ScriptedStream(only_enqueues=False))
    transfer = Watched(log, board, "t")
    lane.submit(transfer)
    transfer.wait()
    assert set(transfer.threads) == {"test-lane"}
    stop(lane)


@pytest.mark.parametrize(
    "fault", [DeviceError("the link broke", "Mend it"), ZeroDivisionError("our fault")]
)
def test_a_fault_in_the_first_batches_ends_the_transfer_and_not_who_submits(
    lane: Lane, make: Make, fault: Exception
) -> None:
    broken, following = make("t", steps=3, break_before=0, fault=fault), make("next")
    lane.submit(broken)
    broken.wait()
    assert isinstance(broken.error, DeviceError)
    lane.submit(following)
    following.wait()
    assert following.error is None


def test_a_cancelled_transfer_copies_nothing(lane: Lane, log: Log, board: Board) -> None:
    transfer = Watched(log, board, "t")
    transfer.cancel()
    lane.submit(transfer)
    transfer.wait()
    assert log.entries == ["t.end"]
