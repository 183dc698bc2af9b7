"""A peer that floods: `python -m tests.support.flood SOCKET KIND`.

It sends requests of one kind as fast as the server takes them, until its standard input is closed:
"flooding" on its standard output says that the first `REQUESTS` are sent, or as many as are taken
before they are answered. At its end it says how many replies of which kind it got.

It is no good engine: it does not wait for replies before it sends more, and it is cheap, so that
what is measured beside it is the server.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lamina import protocol
from lamina.board import Board
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages

REQUESTS = 10_000
CHUNKS = 4
"""Of each request."""
BLOCKS_PER_CHUNK = 4
BLOCKS = CHUNKS * BLOCKS_PER_CHUNK
SLOTS = 1000
GEOMETRY = Geometry(64, (Group(16),), tuple(Layer(f"l{i}", 0, 1, 32 << 10) for i in range(16)))
"""A chunk is 2 MiB in 64 pages."""


class Flood:
    def __init__(self, path: Path) -> None:
        page_bytes = GEOMETRY.layers[0].page_bytes
        self.memory = np.ones((len(GEOMETRY.layers), BLOCKS, page_bytes), np.uint8)
        self.board = Board.create(SLOTS)
        self.board.ticket = 1
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.fspath(path))
        socket.send_fds(self.socket, [protocol.preface()], [self.board.fd])
        self.frames = protocol.FrameBuffer()
        self.numbers = itertools.count(1)
        self.replies: Counter[str] = Counter()
        self.blocks = (protocol.pack_block_ids(np.arange(BLOCKS, dtype=np.int32)),)
        self.keys = tuple(os.urandom(32) for _ in range(CHUNKS))
        planes = tuple(
            (PlanePages(0, layer * BLOCKS * page_bytes, page_bytes),)
            for layer in range(len(GEOMETRY.layers))
        )
        region = HostWorkerDevice().export(self.memory.ctypes.data, self.memory.nbytes)
        for message in (
            protocol.Hello(0, f"flood {os.getpid()}", "flood"),
            protocol.Register(0, "host", GEOMETRY, PageMap((BLOCKS,), planes), (region,)),
            protocol.Store(0, 0, b"", self.keys, self.blocks, 1),
        ):
            self.socket.sendall(protocol.encode(message))
            while not self.frames.feed(self.socket.recv(1 << 16)):
                pass

    def first(self, kind: str) -> Iterator[bytes]:
        """Requests that need nothing of the server first."""
        for number in self.numbers:
            if kind == "lookup":
                yield protocol.encode(protocol.Lookup(number, f"r{number % REQUESTS}", self.keys))
            elif kind == "store":
                keys = tuple(os.urandom(32) for _ in range(CHUNKS))
                yield protocol.encode(protocol.Store(number, number, b"", keys, self.blocks, 1))
            elif kind == "ping":
                yield protocol.encode(protocol.Ping(number))
            elif number <= SLOTS:
                yield protocol.encode(protocol.Lookup(number, f"r{number}", self.keys))
            else:
                return

    def answer(self, kind: str, body: bytes) -> bytes:
        """Count a reply; in a flood of retrieves, keep every slot busy."""
        reply = protocol.decode_reply(body)
        self.replies[type(reply).__name__] += 1
        slot = reply.id % SLOTS
        if kind != "retrieve":
            return b""
        if isinstance(reply, protocol.Found):
            number, layers = reply.id + SLOTS, len(GEOMETRY.layers)
            return protocol.encode(
                protocol.Retrieve(number, number, reply.lease, 0, self.blocks, slot, 0, layers)
            )
        return protocol.encode(protocol.Lookup(reply.id + SLOTS, f"r{slot}", self.keys))

    def run(self, kind: str) -> None:
        self.socket.setblocking(False)
        first, unsent, sent, is_said = self.first(kind), bytearray(), 0, False
        while True:
            if not unsent:
                batch = list(itertools.islice(first, 500))
                sent += len(batch)
                unsent += b"".join(batch)
            is_full = sent >= REQUESTS or self.replies["Found"] >= SLOTS or not unsent
            if is_full and not is_said:
                is_said = True
                print("flooding", flush=True)
            writers = [self.socket] if unsent else []
            readable, writable, _ = select.select([self.socket, sys.stdin], writers, [])
            if sys.stdin in readable:
                break
            if readable:
                for body in self.frames.feed(self.socket.recv(1 << 18)):
                    unsent += self.answer(kind, body)
            if writable:
                del unsent[: self.socket.send(unsent)]
        print(sent, dict(self.replies), flush=True)


if __name__ == "__main__":
    Flood(Path(sys.argv[1])).run(sys.argv[2])
