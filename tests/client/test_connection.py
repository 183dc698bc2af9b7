"""One connection to a server that does not read what it is sent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.board import Board
from lamina.client import connection as connections
from lamina.client.connection import Connection
from lamina.frames import FrameBuffer
from tests.support.wait import PATIENCE_S

MAX_UNSENT_BYTES = 1 << 20
KEYS = tuple(number.to_bytes(32, "big") for number in range(2000))
"""Of one request: 64 KiB and more."""
REQUEST_BYTES = len(protocol.encode(protocol.Lookup(2**31, "r", KEYS)))
MANY = 200
"""Requests that no socket's buffer holds together with `MAX_UNSENT_BYTES`."""


class Scene:
    """A connection, and what its callbacks got."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(0o700)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(os.fspath(path))
        self._listening.listen(1)
        self._board = Board.create(1)
        self.connection = Connection(path, self._board)
        self.server, _ = self._listening.accept()
        self.server.setblocking(False)
        assert self.server.recv(protocol.PREFACE_BYTES) == protocol.preface()
        self.replies: list[protocol.Reply | None] = []

    def ask(self) -> None:
        self.connection.call(lambda number: protocol.Lookup(number, "r", KEYS), self.replies.append)

    @property
    def unsent_bytes(self) -> int:
        return len(self.connection._unsent)

    def close(self) -> None:
        self.connection.close()
        self.connection.server.close()
        self.server.close()
        self._listening.close()
        self._board.close()


@pytest.fixture
def scene(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", MAX_UNSENT_BYTES)
    scene = Scene(socket_path)
    yield scene
    scene.close()


def test_a_server_that_leaves_too_much_unread_is_given_up(scene: Scene) -> None:
    """It may be stopped for good: what it has not taken must not grow with the engine's uptime."""
    asked = 0
    while not scene.connection.is_lost and asked < MANY:
        assert scene.unsent_bytes <= MAX_UNSENT_BYTES
        assert not scene.replies
        scene.ask()
        asked += 1
    assert scene.connection.is_lost
    assert scene.unsent_bytes <= MAX_UNSENT_BYTES + REQUEST_BYTES
    assert scene.replies == [None] * asked


def test_a_server_that_reads_late_gets_all_that_was_left_unread(scene: Scene) -> None:
    asked = 0
    while scene.unsent_bytes < MAX_UNSENT_BYTES // 2 and not scene.connection.is_lost:
        scene.ask()
        asked += 1
    frames, bodies = FrameBuffer(), 0
    while bodies < asked and (data := scene.server.recv(1 << 18)):
        bodies += len(frames.feed(data))
        scene.connection.pump()
    assert bodies == asked
    assert not scene.unsent_bytes
    assert not scene.connection.is_lost


def test_what_is_unsent_goes_out_while_an_answer_is_waited_for(scene: Scene) -> None:
    """And not only at the next poll, which is not called while somebody waits."""
    while not scene.unsent_bytes:
        scene.ask()
    with contextlib.suppress(BlockingIOError):
        while scene.server.recv(1 << 18):
            pass
    scene.connection.wait(PATIENCE_S)
    assert not scene.unsent_bytes
