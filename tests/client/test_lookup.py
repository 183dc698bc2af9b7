"""Lookups and the server that was asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.client import MISS
from tests.support.played import World
from tests.support.server import ServerThread, connected_client
from tests.support.wait import eventually

KEYS = [bytes(32)]
LOOKUP_TIMEOUT_S = 0.1
"""What `ClientSettings` has if nothing else is asked for."""


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path)
    yield thread
    thread.stop()


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    world = World(socket_path, has_memory=False)
    yield world
    world.close()


def test_a_lookup_is_lost_with_the_server_that_was_asked(
    server: ServerThread, socket_path: Path
) -> None:
    client = connected_client(socket_path, reconnect_every_ms=1)
    lookup = client.lookup("r", KEYS)
    assert lookup.wait(20) == MISS
    assert not lookup.is_lost
    server.stop()

    def is_lost() -> bool:
        client.poll()
        return lookup.is_lost

    def is_back() -> bool:
        client.poll()
        return client.is_usable

    eventually(is_lost)
    nobody_asked = client.lookup("r", KEYS)
    assert nobody_asked.is_lost
    again = ServerThread(socket_path)
    try:
        eventually(is_back)
        assert lookup.is_lost
        assert not client.lookup("r", KEYS).is_lost
    finally:
        client.close()
        again.stop()


def test_the_lease_of_an_answer_that_came_too_late_is_given_back(world: World) -> None:
    server = world.serve()
    lookup = world.client.lookup("r", KEYS)
    world.now_s += LOOKUP_TIMEOUT_S
    assert lookup.result == MISS, "time is up"
    server.reply(protocol.Found(server.expect(protocol.Lookup), lease=9, chunks=1))
    world.client.poll()
    assert lookup.result == MISS
    assert not server.has_been_sent_nothing(), "nobody else knows of the lease"
    assert server.next(protocol.EndLease).lease == 9


def test_chunks_that_are_not_pinned_are_a_miss(world: World) -> None:
    """A server that has found something and leased nothing: an engine could not retrieve it."""
    server = world.serve()
    lookup = world.client.lookup("r", KEYS)
    server.reply(protocol.Found(server.expect(protocol.Lookup), lease=0, chunks=1))
    world.client.poll()
    assert lookup.result == MISS
