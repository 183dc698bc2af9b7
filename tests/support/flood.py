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

from lamina import protocol
from lamina.board import Board
from lamina.frames import FrameBuffer
from lamina_lab.known.content import equal_layers, ids, random_keys
from lamina_lab.known.memory import HostKvSpace

REQUESTS = 10_000
CHUNKS = 4
"""Of each request."""
SLOTS = 1000
GEOMETRY = equal_layers(16, page_bytes=32 << 10)
"""A chunk is 2 MiB in 64 pages."""
BLOCKS_PER_CHUNK = GEOMETRY.blocks_per_chunk(0)
BLOCKS = CHUNKS * BLOCKS_PER_CHUNK


class Flood:
    def __init__(self, path: Path) -> None:
        self.space = HostKvSpace(GEOMETRY, BLOCKS, layers_per_region=len(GEOMETRY.layers))
        self.board = Board.create(SLOTS)
        self.board.ticket = 1
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.fspath(path))
        socket.send_fds(self.socket, [protocol.preface()], [self.board.fd])
        self.frames = FrameBuffer()
        self.numbers = itertools.count(1)
        self.replies: Counter[str] = Counter()
        self.blocks = (protocol.pack_block_ids(ids(range(BLOCKS))),)
        self.keys = tuple(random_keys(CHUNKS))
        for message in (
            protocol.Hello(0, f"flood {os.getpid()}", "flood"),
            protocol.Register(0, "host", GEOMETRY, self.space.page_map, self.space.export()),
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
                keys = tuple(random_keys(CHUNKS))
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
