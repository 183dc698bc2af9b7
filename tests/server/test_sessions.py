"""What ends a session, and what a session's end is: nothing of it touches memory any more."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from tests.e2e.strangers import Bystander, Pages, Stranger, lease_of, retrieve
from tests.support.server import ServerThread
from tests.support.wait import eventually

CONNECTS_AND_STAYS = """
import socket, sys
socket.socket(fileno=int(sys.argv[1])).connect(sys.argv[2])
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def greet(server: ServerThread, socket_path: Path) -> Iterator[Callable[[], Stranger]]:
    """Makes connections of one engine."""
    strangers: list[Stranger] = []

    def make() -> Stranger:
        strangers.append(Stranger(socket_path))
        strangers[-1].greet()
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.close()


def session_of(stranger: Stranger) -> int:
    """Says hello."""
    welcome = stranger.ask(protocol.Hello(1, "engine", "stranger"))
    assert isinstance(welcome, protocol.Welcome)
    return welcome.session


def test_a_session_has_ended_when_its_copies_have(
    server: ServerThread, greet: Callable[[], Stranger]
) -> None:
    """The engine has its pages back with that answer."""
    bystander, former, latter = Bystander(server), greet(), greet()
    session, pages = session_of(former), Pages()
    assert isinstance(former.ask(pages.register(2)), protocol.Registered)
    server.device.retrieves.close()
    former.send(retrieve(lease_of(former, bystander)))
    server.device.retrieves.wait_until_held()
    session_of(latter)
    latter.send(protocol.EndSession(7, session))
    for number in range(8, 11):
        assert isinstance(latter.ask(protocol.Ping(number)), protocol.Pong), "its copy is held"
    assert former.is_closed()
    server.device.retrieves.open()
    done = latter.receive()
    assert isinstance(done, protocol.Done)
    assert done.id == 7
    bystander.worker.close()


def test_an_engine_that_has_died_is_gone_though_another_process_has_its_socket(
    server: ServerThread, greet: Callable[[], Stranger]
) -> None:
    """One that it forked, say: the socket alone would stay open for as long as that lives."""
    stranger = greet()
    stranger.socket.close()
    stranger.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.socket.settimeout(20)
    descriptor = stranger.socket.fileno()
    arguments = [sys.executable, "-c", CONNECTS_AND_STAYS, str(descriptor)]
    with subprocess.Popen(
        [*arguments, str(server.settings.socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"connected\n"
        stranger.greet()
        session_of(stranger)
        assert server.gauges()["sessions"] == 1
        engine.kill()
    eventually(lambda: server.gauges()["sessions"] == 0)
    assert stranger.is_closed()
