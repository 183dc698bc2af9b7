"""Connecting again and again, against a server that the test plays on a real socket."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.board import Board
from lamina.client import Client
from lamina.client.connection import Connection
from lamina.devices.host import HostWorkerDevice
from lamina.errors import DeviceError, ErrorCode, ServerUnavailableError
from lamina.linux import wait_readable
from lamina.settings import ClientSettings
from tests.e2e.strangers import Pages, open_fds
from tests.support.worker import BLOCKS_PER_CHUNK, ids

RECONNECT_EVERY_S = 0.5
KEY = bytes(32)
DESCRIPTORS = 4
"""Of a connection: the board and its mapping, the socket, the server's pidfd."""


class BoardsDevice(HostWorkerDevice):
    """Notes which boards are attached; fails while it is told to."""

    def __init__(self) -> None:
        self.attached: list[Board] = []
        self.calls = 0
        self.is_failing = False

    def attach(self, board: Board) -> None:
        self.calls += 1
        if self.is_failing:
            raise DeviceError("the board cannot be pinned", "Raise the limit")
        self.attached.append(board)

    def detach(self, board: Board) -> None:
        self.calls += 1
        self.attached.remove(board)


class Greeted:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(20)
        self._frames = protocol.FrameBuffer()
        _, fds, _, _ = socket.recv_fds(sock, protocol.PREFACE_BYTES, 1)
        self.board = Board.attach(fds[0])

    def expect(self, kind: type[protocol.Message]) -> int:
        """The number of the next request, which is one of `kind`."""
        header = self._socket.recv(protocol.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        body = self._socket.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
        (frame,) = self._frames.feed(header + body)
        request = protocol.decode_request(frame)
        assert isinstance(request, kind)
        return request.id

    def has_been_sent_nothing(self) -> bool:
        return not wait_readable(self._socket.fileno(), 0.0)

    def reply(self, reply: protocol.Message) -> None:
        self._socket.sendall(protocol.encode(reply))

    def refuse(self, number: int, code: ErrorCode) -> None:
        self.reply(protocol.ErrorReply(number, code, "the test refuses", "Ask again"))

    def welcome(self, server_clock_ns: int | None = None) -> None:
        """Answer Hello, with our clock unless told otherwise; the heart beats at that moment."""
        number = self.expect(protocol.Hello)
        clock_ns = time.monotonic_ns() if server_clock_ns is None else server_clock_ns
        self.board.heartbeat_ns = clock_ns
        self.reply(protocol.Welcome(number, "test", 64, 60.0, clock_ns, 7))

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._socket.close()
            self.board.close()


class World:
    """A client with KV memory and the server that it finds, in virtual time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir()
        self.path = path
        self.now_s = 0.0
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(os.fspath(path))
        self._listening.listen(8)
        self._listening.settimeout(20)
        self.device = BoardsDevice()
        settings = ClientSettings(
            socket=path,
            reconnect_every_ms=int(RECONNECT_EVERY_S * 1000),
            suspect_after_ms=60_000,
            connect_timeout_ms=1,
        )
        self.client = Client(settings, self.device, "test", clock=lambda: self.now_s)
        pages = Pages()
        self.client.register(pages.geometry, pages.page_map, pages.regions)
        self._greeted: list[Greeted] = []

    def accept(self) -> Greeted:
        """Let the client connect."""
        self.now_s += RECONNECT_EVERY_S
        self.client.poll()
        while True:
            sock, _ = self._listening.accept()
            if sock.recv(1, socket.MSG_PEEK):
                break
            sock.close()  # given up before anything was said
        self._greeted.append(Greeted(sock))
        return self._greeted[-1]

    def serve(self) -> Greeted:
        """The same, up to being usable."""
        server = self.accept()
        server.welcome()
        self.client.poll()
        server.reply(protocol.Registered(server.expect(protocol.Register)))
        self.client.poll()
        return server

    def heartbeat_age_s(self) -> float:
        assert self.client._link is not None
        return self.client._link.connection.heartbeat_age_s()

    def close(self) -> None:
        self.client.close()
        for greeted in self._greeted:
            greeted.close()
        self._listening.close()


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    world = World(socket_path)
    yield world
    world.close()


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
    assert world.client.store(b"", [KEY], [ids(range(BLOCKS_PER_CHUNK))], 0) is not None
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
