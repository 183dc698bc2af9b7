"""Peers that send whatever they like, and a bystander that must not notice.

The bystander is another engine with chunks in the cache, which is served after each test as before.
A server that had to say "internal" or that logged an error has a fault of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lamina import protocol
from lamina.board import Board
from lamina.errors import ErrorCode
from lamina.frames import FrameBuffer
from lamina.geometry import Geometry
from lamina_lab.known.content import equal_layers, ids
from lamina_lab.known.memory import HostKvSpace
from tests.support.server import ServerThread
from tests.support.wait import PATIENCE_S
from tests.support.worker import PageWorker

SLOTS = 8
BLOCKS = 16
GEOMETRY = equal_layers(layers=4)


class Stranger:
    """A connection without a client: any bytes, any descriptors, any message."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(os.fspath(path))
        self.board = Board.create(SLOTS)
        self._frames = FrameBuffer()
        self._received: list[protocol.Reply] = []

    def greet(self, preface: bytes | None = None, fds: Sequence[int] | None = None) -> None:
        data = protocol.preface() if preface is None else preface
        socket.send_fds(self.socket, [data], [self.board.fd] if fds is None else list(fds))

    def send(self, *messages: protocol.Message) -> None:
        self.send_bytes(b"".join(protocol.encode(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Send it all, or as much as the server took before it closed the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def receive(self) -> protocol.Reply | None:
        """The next reply; None when the server has closed the connection."""
        while not self._received:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += map(protocol.decode_reply, self._frames.feed(data))
        return self._received.pop(0)

    def ask(self, message: protocol.Message) -> protocol.Reply:
        self.send(message)
        reply = self.receive()
        assert reply is not None, "the server closed the connection instead of answering"
        assert reply.id == message.id
        return reply

    def is_closed(self) -> bool:
        """Whether the server closes the connection, after whatever else it says."""
        while self.receive() is not None:
            pass
        return True

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.socket.close()
            self.board.close()


class Bystander:
    """An engine that has done nothing wrong, with two chunks in the cache."""

    def __init__(self, server: ServerThread) -> None:
        self.server = server
        self.worker = PageWorker(server.settings.socket, GEOMETRY, BLOCKS)
        self.keys = self.worker.store_new(2)

    def check(self) -> None:
        """It is served, its chunks are there, and nobody left anything pinned."""
        self.worker.check_hit("bystander", self.keys, range(8, 16))


class Pages(HostKvSpace):
    """KV memory that a stranger registers: one region, all zeros."""

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        super().__init__(geometry, BLOCKS, layers_per_region=len(geometry.layers))
        self.regions = self.export()
        self.pages[:] = 0

    def register(self, number: int) -> protocol.Register:
        return protocol.Register(number, "host", self.geometry, self.page_map, self.regions)


def assert_refused(reply: object, code: ErrorCode, *words: str) -> None:
    """One typed error whose two sentences name the cause and what to do."""
    assert isinstance(reply, protocol.ErrorReply)
    assert reply.code is code, reply
    for word in words:
        assert word in f"{reply.cause}. {reply.remedy}", reply
    assert reply.cause
    assert reply.remedy


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def retrieve(
    lease: int, blocks: Sequence[int] = range(8), id: int = 20, **fields: Any
) -> protocol.Retrieve:
    """A retrieve of the bystander's two chunks that would work but for `fields`. Its number is far
    from its id, unless given."""
    packed = (protocol.pack_block_ids(ids(blocks)),)
    message = protocol.Retrieve(id, id + 1000, lease, 0, packed, slot=3, base=0, layers_per_slice=1)
    return msgspec.structs.replace(message, **fields)


def lease_of(guest: Stranger, bystander: Bystander) -> int:
    found = guest.ask(protocol.Lookup(10, "r", tuple(bystander.keys)))
    assert isinstance(found, protocol.Found)
    assert found.chunks == 2
    return found.lease
