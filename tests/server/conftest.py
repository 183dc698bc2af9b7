"""What tests of the server's parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina.board import Board
from lamina_lab.known.content import random_keys
from tests.support.lane import Log, Make
from tests.support.ranks import CHUNKS, Engine
from tests.support.ranks import Make as MakeWorker
from tests.support.server import ServerThread


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


@pytest.fixture
def keys() -> list[bytes]:
    """Of as many chunks as a worker of `tests.support.ranks` stores."""
    return random_keys(CHUNKS)


@pytest.fixture
def engine(server: ServerThread, make_worker: MakeWorker) -> Engine:
    """Of two shards, connected."""
    return Engine(make_worker, "one")
