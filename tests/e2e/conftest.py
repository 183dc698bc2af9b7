"""Fixtures: strangers at a server that also serves a bystander."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.errors import ErrorCode
from tests.e2e.strangers import (
    Bystander,
    Pages,
    Stranger,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path, arena_bytes=1 << 20)
    yield thread
    thread.stop()


@pytest.fixture
def bystander(server: ServerThread, caplog: pytest.LogCaptureFixture) -> Iterator[Bystander]:
    """Served before and after the test; the server must not have had a fault of its own."""
    bystander = Bystander(server)
    yield bystander
    bystander.check()
    eventually(lambda: server.gauges()["pins"] == server.gauges()["leases"] == 0)
    bystander.worker.close()
    assert server.on_loop(lambda: server.server.counters.refused[ErrorCode.INTERNAL.value]) == 0
    faults = [r for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert not faults, faults


@pytest.fixture
def connect(socket_path: Path, bystander: Bystander) -> Iterator[Callable[[], Stranger]]:
    """Makes strangers' connections, closed at the end; the server must forget them."""
    strangers: list[Stranger] = []

    def make() -> Stranger:
        strangers.append(Stranger(socket_path))
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.close()
    eventually(lambda: bystander.server.gauges()["sessions"] == 1)


@pytest.fixture
def stranger(connect: Callable[[], Stranger]) -> Stranger:
    """Connected, no more."""
    return connect()


@pytest.fixture
def guest(stranger: Stranger) -> Stranger:
    """Greeted, and has said hello."""
    stranger.greet()
    assert isinstance(stranger.ask(protocol.Hello(1, "guest", "guest")), protocol.Welcome)
    return stranger


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def worker_guest(guest: Stranger, pages: Pages) -> Stranger:
    """A guest that has registered its KV memory."""
    assert isinstance(guest.ask(pages.register(2)), protocol.Registered)
    return guest
