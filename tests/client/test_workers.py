"""What an engine's process learns of its engine's workers, from a server that the test plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.errors import ErrorCode
from tests.support.played import RECONNECT_EVERY_S, Greeted, World

ONE, TWO, THREE = b"one", b"two", b"three"


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    """A scheduler's: it has no KV memory and registers nothing."""
    world = World(socket_path, has_memory=False)
    yield world
    world.close()


@pytest.fixture
def server(world: World) -> Greeted:
    return world.serve()


def tell(world: World, server: Greeted, *descriptions: bytes) -> None:
    """Answer the next question."""
    server.reply(protocol.WorkersKnown(server.expect(protocol.Workers), descriptions))
    world.client.poll()


def test_workers_are_none_until_enough_have_registered(world: World, server: Greeted) -> None:
    assert world.client.workers(2) is None
    tell(world, server, ONE)
    assert world.client.workers(2) is None
    world.now_s += RECONNECT_EVERY_S
    assert world.client.workers(2) is None
    tell(world, server, TWO, ONE)
    assert world.client.workers(2) == (TWO, ONE)


def test_more_than_were_waited_for_are_all_told(world: World, server: Greeted) -> None:
    assert world.client.workers(1) is None
    tell(world, server, ONE, TWO)
    assert world.client.workers(1) == (ONE, TWO)


def test_a_connection_that_lingers_stands_for_no_other_worker(
    world: World, server: Greeted
) -> None:
    """One that a rank has lost says the same as the one that follows it."""
    assert world.client.workers(2) is None
    tell(world, server, ONE, ONE)
    assert world.client.workers(2) is None
    world.now_s += RECONNECT_EVERY_S
    assert world.client.workers(2) is None
    tell(world, server, ONE, ONE, TWO)
    assert world.client.workers(2) == (ONE, TWO)


def test_what_was_told_once_is_kept_without_the_server(world: World, server: Greeted) -> None:
    world.client.workers(1)
    tell(world, server, ONE)
    server.close()
    world.client.poll()
    assert not world.client.is_usable
    assert world.client.workers(1) == (ONE,)
    second = world.serve()
    assert world.client.workers(1) == (ONE,)
    assert second.has_been_sent_nothing(), "it was asked for what is known"


def test_one_question_is_in_flight_at_a_time(world: World, server: Greeted) -> None:
    world.client.workers(1)
    for _ in range(3):
        world.now_s += RECONNECT_EVERY_S
        assert world.client.workers(1) is None
    tell(world, server)
    assert server.has_been_sent_nothing()


def test_too_few_are_asked_for_again_after_a_pause(world: World, server: Greeted) -> None:
    world.client.workers(2)
    tell(world, server, ONE)
    world.now_s += RECONNECT_EVERY_S - 0.1
    assert world.client.workers(2) is None
    assert server.has_been_sent_nothing()
    world.now_s += 0.1
    assert world.client.workers(2) is None
    tell(world, server, ONE, TWO)
    assert world.client.workers(2) == (ONE, TWO)


def test_a_server_that_refuses_is_asked_again_after_a_pause(world: World, server: Greeted) -> None:
    world.client.workers(1)
    server.refuse(server.expect(protocol.Workers), ErrorCode.INTERNAL)
    world.client.poll()
    assert world.client.workers(1) is None
    assert server.has_been_sent_nothing()
    world.now_s += RECONNECT_EVERY_S
    world.client.workers(1)
    tell(world, server, ONE)
    assert world.client.workers(1) == (ONE,)


def test_a_silent_server_is_asked_nothing(world: World, server: Greeted) -> None:
    server.board.heartbeat_ns = 0  # since the machine started
    assert world.client.workers(1) is None
    assert server.has_been_sent_nothing()
    server.board.heartbeat_ns = time.monotonic_ns()
    assert world.client.workers(1) is None
    tell(world, server, ONE)
    assert world.client.workers(1) == (ONE,)


def test_a_question_that_is_lost_with_its_connection_is_asked_of_the_next_server(
    world: World, server: Greeted
) -> None:
    world.client.workers(1)
    server.expect(protocol.Workers)
    server.close()
    world.client.poll()
    assert world.client.workers(1) is None
    second = world.serve()
    assert world.client.workers(1) is None
    tell(world, second, ONE)
    assert world.client.workers(1) == (ONE,)


def test_a_server_that_knows_fewer_takes_nothing_back(world: World, server: Greeted) -> None:
    """Workers come back to a server that was replaced one by one."""
    world.client.workers(2)
    tell(world, server, ONE, TWO)
    server.close()
    world.client.poll()
    second = world.serve()
    assert world.client.workers(3) is None
    tell(world, second, ONE)
    assert world.client.workers(2) == (ONE, TWO)
    world.now_s += RECONNECT_EVERY_S
    assert world.client.workers(3) is None
    tell(world, second, ONE, THREE, TWO)
    assert world.client.workers(3) == (ONE, THREE, TWO)
