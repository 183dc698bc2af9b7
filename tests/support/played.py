"""A client with KV memory and, at the other end of a real socket, the test as its server.

In virtual time: the client's clock stands still unless the test moves it.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TypeVar

from lamina import protocol
from lamina.board import Board
from lamina.client import Client, Store
from lamina.devices.host import HostWorkerDevice
from lamina.errors import DeviceError, ErrorCode
from lamina.frames import FrameBuffer
from lamina.linux import wait_readable
from lamina.settings import ClientSettings
from lamina_lab.known.content import ids
from tests.e2e.strangers import Pages
from tests.support.worker import BLOCKS_PER_CHUNK

_Message = TypeVar("_Message", bound=protocol.Message)

RECONNECT_EVERY_S = 0.5
STORE_TIMEOUT_S = 4.0
KEY = bytes(32)


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
        self._frames = FrameBuffer()
        _, fds, _, _ = socket.recv_fds(sock, protocol.PREFACE_BYTES, 1)
        self.board = Board.attach(fds[0])

    def expect(self, kind: type[protocol.Message]) -> int:
        """The id of the next request, which is one of `kind`."""
        return self.next(kind).id

    def next(self, kind: type[_Message]) -> _Message:
        """The next request, which is one of `kind`."""
        header = self._socket.recv(protocol.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        body = self._socket.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
        (frame,) = self._frames.feed(header + body)
        request = protocol.decode_request(frame)
        assert isinstance(request, kind)
        return request

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
    """A client, with KV memory unless it is a scheduler's, and the server that it finds."""

    def __init__(self, path: Path, has_memory: bool = True) -> None:
        path.parent.mkdir(0o700)
        self.path = path
        self.now_s = 0.0
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(os.fspath(path))
        self._listening.listen(8)
        self._listening.settimeout(20)
        self.device = BoardsDevice()
        settings = ClientSettings(
            socket=path,
            store_timeout_ms=int(STORE_TIMEOUT_S * 1000),
            reconnect_every_ms=int(RECONNECT_EVERY_S * 1000),
            suspect_after_ms=60_000,
            connect_timeout_ms=1,
        )
        self.client = Client(settings, self.device, "test", clock=lambda: self.now_s)
        self._has_memory = has_memory
        if has_memory:
            pages = Pages()
            self.client.register(pages.geometry, pages.page_map, pages.allocations)
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
        if self._has_memory:
            server.reply(protocol.Registered(server.expect(protocol.Register)))
            self.client.poll()
        return server

    def store(self) -> Store:
        """Begin to store one chunk."""
        blocks = [ids(range(BLOCKS_PER_CHUNK))]
        store = self.client.store(b"", [KEY], blocks, self.client.write_ticket())
        assert store is not None
        return store

    def heartbeat_age_s(self) -> float:
        assert self.client._link is not None
        return self.client._link.connection.heartbeat_age_s()

    def close(self) -> None:
        self.client.close()
        for greeted in self._greeted:
            greeted.close()
        self._listening.close()
