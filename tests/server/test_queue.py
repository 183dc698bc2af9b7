"""The queue of a lane: workers take turns, and nobody waits for a ticket that is not his."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina.board import Board
from lamina.devices.base import EngineMemory
from lamina.server import lane
from lamina.server.lane import FairQueue
from tests.support.lane import BareTransfer, NoMemory


class Named(BareTransfer):
    def __init__(self, memory: EngineMemory, name: str, board: Board, ticket: int | None) -> None:
        super().__init__(memory, board, ticket)
        self.name = name


class Line:
    """A queue and two workers, `a` and `b`; transfers are named after them."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.board = Board.create(0)
        self.memories: dict[str, EngineMemory] = {}

    def add(self, *names: str, ticket: int | None = None) -> None:
        for name in names:
            memory = self.memories.setdefault(name[0], NoMemory())
            self.queue.append(Named(memory, name, self.board, ticket))

    def take(self) -> str | None:
        transfer = self.queue.take_ready()
        assert transfer is None or isinstance(transfer, Named)
        return transfer.name if transfer is not None else None

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
    for number in range(2 * lane._MAX_REMEMBERED):
        line.add(chr(1000 + number))
        line.take()
    assert len(line.queue._last_turn) == lane._MAX_REMEMBERED
    assert len(line.queue._waiting) == 1
    line.board.ticket = 1
    assert line.take() == "z0"
