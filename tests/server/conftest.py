"""What tests of the server's parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina.board import Board
from tests.support.lane import Log, Make


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(1)
    yield board
    board.close()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make(log: Log, board: Board) -> Make:
    return Make(log, board)
