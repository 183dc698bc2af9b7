"""Connecting again and again, against a server that the test plays on a real socket."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator

import pytest

from lamina import protocol
from lamina.board import Board
from lamina.client.connection import Connection
from lamina.errors import ErrorCode, ServerUnavailableError
from tests.e2e.strangers import open_fds
from tests.support.played import RECONNECT_EVERY_S, Greeted, World

DESCRIPTORS = 4
"""Of a connection: the board and its mapping, the socket, the server's pidfd."""


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open so many files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
    for fd in lowest:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_welcome_that_waits_to_be_read_makes_no_heartbeat_younger(world: World) -> None:
    """An idle engine reads late; a server that stops must not be trusted longer for it."""
    server = world.accept()
    server.welcome()
    world.client.poll()
    before_ns = time.monotonic_ns()
    age_s = world.heartbeat_age_s()
    assert age_s >= (before_ns - server.board.heartbeat_ns) / 1e9
    assert age_s <= (time.monotonic_ns() - server.board.heartbeat_ns) / 1e9


@pytest.mark.parametrize("ratio", [0.5, 2])
def test_heartbeats_of_another_clock_are_read_against_it(world: World, ratio: float) -> None:
    server = world.accept()
    sent_ns = time.monotonic_ns()
    server.welcome(int(sent_ns * ratio))
    world.client.poll()
    assert 0 <= world.heartbeat_age_s() <= (time.monotonic_ns() - sent_ns) / 1e9


@pytest.mark.parametrize("free", range(DESCRIPTORS))
def test_without_descriptors_the_engine_goes_on_and_connects_once_it_has_some(
    world: World, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_fds()
    with free_descriptors(free):
        world.client.try_connect()
        for _ in range(3):
            world.now_s += RECONNECT_EVERY_S
            world.client.poll()
    assert open_fds() == files
    assert len(caplog.records) == 1
    world.serve()
    assert world.client.is_usable


def test_a_board_that_cannot_be_attached_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_fds()
    world.device.is_failing = True
    for _ in range(3):
        world.serve().close()
        assert not world.client.is_usable
    assert open_fds() == files
    (record,) = caplog.records
    assert "the board cannot be pinned" in record.getMessage()
    world.device.is_failing = False
    world.serve()
    assert world.client.is_usable
    assert len(world.device.attached) == 1


def test_a_preface_that_cannot_be_sent_leaves_no_descriptor(world: World) -> None:
    board = Board.create(0)
    files = open_fds()
    board.fd, fd = -1, board.fd  # the kernel takes no such descriptor
    with pytest.raises(ServerUnavailableError):
        Connection(world.path, board)
    board.fd = fd
    assert open_fds() == files
    board.close()


def refuse_hello(world: World) -> None:
    server = world.accept()
    server.refuse(server.expect(protocol.Hello), ErrorCode.BUSY)


def refuse_register(world: World) -> None:
    server = world.accept()
    server.welcome()
    world.client.poll()
    server.refuse(server.expect(protocol.Register), ErrorCode.COPY_DENIED)


@pytest.mark.parametrize("refuse", [refuse_hello, refuse_register])
def test_a_server_that_refuses_us_costs_the_device_nothing(
    world: World, refuse: Callable[[World], None]
) -> None:
    """Attaching pins memory and detaching waits for the GPU: not twice a second for nothing."""
    for _ in range(3):
        refuse(world)
        world.client.poll()
    assert world.device.calls == 0
    world.serve()
    assert len(world.device.attached) == 1
    world.client.close()
    assert not world.device.attached


def lose_with_a_store_in_flight(world: World) -> Greeted:
    """A second connection, which has been asked about the first."""
    first = world.serve()
    world.store()
    first.close()
    world.client.poll()
    second = world.serve()
    assert world.client.transfers_in_flight == 1
    return second


def test_a_server_that_failed_to_end_a_session_is_asked_again_after_a_pause(world: World) -> None:
    server = lose_with_a_store_in_flight(world)
    for _ in range(3):
        server.refuse(server.expect(protocol.EndSession), ErrorCode.INTERNAL)
        for _ in range(3):
            world.client.poll()
        assert server.has_been_sent_nothing()
        world.now_s += RECONNECT_EVERY_S
        world.client.poll()
    server.reply(protocol.Done(server.expect(protocol.EndSession)))
    world.client.poll()
    assert world.client.transfers_in_flight == 0


def test_a_server_that_never_had_the_session_is_asked_once(world: World) -> None:
    server = lose_with_a_store_in_flight(world)
    server.refuse(server.expect(protocol.EndSession), ErrorCode.BAD_REQUEST)
    for _ in range(3):
        world.now_s += RECONNECT_EVERY_S
        world.client.poll()
    assert server.has_been_sent_nothing()
    assert world.client.transfers_in_flight == 1
