"""The queue of a lane: workers take turns, and nobody waits for a ticket that is not his."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina.board import Board
from lamina.devices.base import EngineMemory
from lamina.server import fair_queue
from lamina.server.fair_queue import FairQueue
from tests.support.lane import BareTransfer, NoMemory


class Named(BareTransfer):
    def __init__(self, memory: EngineMemory, name: str, board: Board, ticket: int | None) -> None:
        super().__init__(memory, board, ticket)
        self.name = name


class CountedBoard(Board):
    """Counts how often a word of it is read."""

    reads = 0

    @property
    def ticket(self) -> int:
        self.reads += 1
        return super().ticket

    @ticket.setter
    def ticket(self, value: int) -> None:
        Board.ticket.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def void_before(self) -> int:
        self.reads += 1
        return super().void_before


class Line:
    """A queue and two workers, `a` and `b`; transfers are named after them."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        board = CountedBoard.create(0)
        assert isinstance(board, CountedBoard)
        self.board = board
        self.memories: dict[str, EngineMemory] = {}
        self.transfers: dict[str, Named] = {}

    def add(self, *names: str, ticket: int | None = None) -> None:
        for name in names:
            memory = self.memories.setdefault(name[0], NoMemory())
            transfer = self.transfers[name] = Named(memory, name, self.board, ticket)
            self.queue.append(transfer)

    def take(self) -> str | None:
        transfer = self.queue.take_ready()
        assert transfer is None or isinstance(transfer, Named)
        return transfer.name if transfer is not None else None

    def cancel(self, *names: str) -> None:
        for name in names:
            self.transfers[name].cancel()

    def drain(self) -> list[str]:
        return list(iter(self.take, None))


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    assert len(line.queue) == 0
    line.board.close()


def test_one_workers_go_in_order_of_arrival(line: Line) -> None:
    line.add("a1", "a2", "a3")
    assert len(line.queue) == 3
    assert line.drain() == ["a1", "a2", "a3"]


def test_a_flood_of_one_makes_another_wait_for_one_transfer_at_most(line: Line) -> None:
    line.add(*(f"a{i}" for i in range(10_000)))
    assert line.take() == "a0"
    line.add("b0", "b1")
    assert [line.take() for _ in range(5)] == ["b0", "a1", "b1", "a2", "a3"]
    line.add("b2")
    assert line.take() == "b2", "served longest ago"
    assert len(line.drain()) == 9_996


def test_who_comes_back_at_once_does_not_overtake_who_waits(line: Line) -> None:
    line.add("a0", "b0", "b1")
    order = []
    for turn in range(1, 4):
        order.append(line.take())
        line.add(f"a{turn}")
        order.append(line.take())
        line.add(f"b{turn + 1}")
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    line.drain()


def test_a_ticket_that_is_not_there_holds_nobody_up(line: Line) -> None:
    line.add("a0", ticket=1)
    line.add("a1", "b0")
    assert line.drain() == ["a1", "b0"]
    assert len(line.queue) == 1
    line.board.ticket = 1
    assert line.take() == "a0"


def test_workers_that_left_are_forgotten_and_those_that_wait_are_not(line: Line) -> None:
    line.add("z0", ticket=1)
    for number in range(2 * fair_queue._MAX_REMEMBERED):
        line.add(chr(1000 + number))
        line.take()
    assert len(line.queue._last_turn) == fair_queue._MAX_REMEMBERED
    assert len(line.queue._waiting) == 1
    line.board.ticket = 1
    assert line.take() == "z0"


STORES = 1024


@pytest.fixture
def hung(line: Line) -> Line:
    """Many stores of a worker that writes no ticket, `a1` with ticket 1 and so on."""
    for number in range(1, STORES + 1):
        line.add(f"a{number}", ticket=number)
    return line


def reads_of_a_poll(line: Line) -> int:
    before = line.board.reads
    assert line.take() is None
    return line.board.reads - before


def test_a_poll_reads_as_much_however_many_stores_wait(hung: Line) -> None:
    assert reads_of_a_poll(hung) <= 2
    hung.add("b1", ticket=1)
    assert reads_of_a_poll(hung) <= 4, "two words a worker"
    hung.board.ticket = STORES
    assert hung.drain() == ["a1", "b1", *(f"a{number}" for number in range(2, STORES + 1))]


def test_tickets_that_are_written_make_their_stores_ready_and_no_later_one(hung: Line) -> None:
    hung.board.ticket = 3
    assert hung.drain() == ["a1", "a2", "a3"]
    assert reads_of_a_poll(hung) <= 2
    hung.board.ticket = STORES
    assert len(hung.drain()) == STORES - 3


def test_who_is_cancelled_ends_at_once_wherever_it_stands(hung: Line) -> None:
    names = [f"a{number}" for number in (1, STORES // 2, STORES)]
    hung.cancel(*names)
    before = hung.board.reads
    assert [hung.take() for _ in names] == names
    assert hung.board.reads - before <= 2 * len(names)
    assert len(hung.queue) == STORES - 3
    hung.cancel(*hung.transfers)  # those that were taken as well
    assert len(hung.drain()) == STORES - 3


def test_who_was_cancelled_before_it_came_waits_for_nobody(hung: Line) -> None:
    transfer = Named(hung.memories["a"], "cancelled", hung.board, STORES + 1)
    transfer.cancel()
    hung.queue.append(transfer)
    assert hung.drain() == ["cancelled"]
    hung.board.ticket = STORES
    hung.drain()


def test_stores_that_the_engine_voids_are_ready_at_once(hung: Line) -> None:
    hung.board.void_stores(5)
    assert hung.drain() == [f"a{number}" for number in range(1, 6)]
    hung.board.void_stores(STORES)
    assert len(hung.drain()) == STORES - 5


def test_who_was_cancelled_does_not_change_the_order_of_the_others(line: Line) -> None:
    line.add("a1", ticket=1)
    line.add("a2")
    line.add("a3", ticket=3)
    line.add("a4", ticket=4)
    line.board.ticket = 3
    line.cancel("a4")
    assert line.drain() == ["a4", "a1", "a2", "a3"]


def test_tickets_in_any_order_wait_for_none_that_is_later(line: Line) -> None:
    """Across the wrap too."""
    for ticket in (2, 2**32 - 2, 1, 2**32 - 1):
        line.add(f"a{ticket}", ticket=ticket)
    line.board.ticket = 2**32 - 1
    assert line.drain() == [f"a{2**32 - 2}", f"a{2**32 - 1}"]
    line.board.ticket = 1
    assert line.drain() == ["a1"]
    line.board.ticket = 2
    assert line.drain() == ["a2"]
