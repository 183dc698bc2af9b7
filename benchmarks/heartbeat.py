"""The oldest heartbeat that an engine sees while the server does much for another one.

    python -m benchmarks.heartbeat [--chunks 600000] [--rounds 3] [--save FILE]

A server process with chunks of which 64 bytes are copied, so that all that counts is its event
loop. The heartbeat is written every 10 ms; what is above that is how late the loop was, and how
long the machine let it wait: "nothing" shows the latter. Closing a region of host memory takes no
time, so for the last scenario a device is made that takes 10 ms for each, as a GPU's driver may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.core import host
from lamina import protocol
from lamina.board import Board
from lamina.client.connection import Connection
from lamina.devices.base import EngineMemory
from lamina.devices.host import NAME, HostMemory, HostServerDevice, HostWorkerDevice
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap, PlanePages
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.server.main import Server
from lamina.settings import ServerSettings
from lamina_lab.bench.processes import (
    private_socket,
    python_process,
    server_process,
    wait_until_filled,
)

CHUNK_TOKENS = 16
PAGE_BYTES = 64
GEOMETRY = Geometry(CHUNK_TOKENS, (Group(CHUNK_TOKENS),), (Layer("0", 0, 1, PAGE_BYTES),))
STORE_CHUNKS = 40_000
LEASES, LEASE_CHUNKS = 1875, 64
REGIONS = 100
CLOSE_S = 0.01
SAMPLE_S = 0.0002
PATIENCE_S = 120.0


class Engine:
    """A connection with pages for one store, in as many regions as are asked for."""

    def __init__(self, socket: Path, regions: int = 1) -> None:
        self.board = Board.create(1)
        self.connection = Connection(socket, self.board)
        self.pages = np.zeros(STORE_CHUNKS * PAGE_BYTES, np.uint8)
        allocation = Allocation(self.pages.ctypes.data, self.pages.nbytes)
        self._device = HostWorkerDevice()
        self._device.admit(self.connection.server)
        self.ask(protocol.Hello, "engine", "benchmark")
        self.ask(
            protocol.Register,
            NAME,
            GEOMETRY,
            PageMap((STORE_CHUNKS,), ((PlanePages(0, 0, PAGE_BYTES),),)),
            tuple(self._device.export(allocation) for _ in range(regions)),
        )

    def ask(self, request: type[protocol.Message], *fields: Any) -> Any:
        """Send a request and wait for its reply."""
        replies: list[protocol.Reply | None] = []
        self.connection.call(lambda number: request(number, *fields), replies.append)
        until_s = time.monotonic() + PATIENCE_S
        while not replies and time.monotonic() < until_s:
            self.connection.wait(0.001)  # short: what is unsent of a long request goes then
            self.connection.pump()
        assert replies, f"no reply to {request.__name__}"
        assert isinstance(replies[0], protocol.REPLY_OF[request]), replies[0]
        return replies[0]

    def store(self, keys: Sequence[bytes]) -> None:
        ids = protocol.pack_block_ids(np.arange(len(keys), dtype=np.int32))
        stored = self.ask(protocol.Store, b"", tuple(keys), (ids,), 0)
        assert stored.stored == len(keys), stored

    def gauge(self, name: str) -> float:
        value: float = self.ask(protocol.GetStats).values[name]
        return value

    def wait_for_none(self, name: str) -> None:
        while self.gauge(name):
            time.sleep(0.001)

    def close(self) -> None:
        self.connection.close()
        self.board.close()


class Watch:
    """The oldest heartbeat on a connection's board, looked at all the time by another thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.oldest_ms = 0.0
        self._is_over = False

    def _look(self) -> None:
        while not self._is_over:
            age_ms = self._connection.heartbeat_age_s() * 1e3
            self.oldest_ms = max(self.oldest_ms, age_ms)
            time.sleep(SAMPLE_S)

    @contextmanager
    def during(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look)
        self.oldest_ms, self._is_over = 0.0, False
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            thread.join()


def random_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


Figures = dict[str, list[tuple[float, float]]]
"""Scenario → oldest heartbeat in ms and how long the scenario took in ms, by round."""


class Record:
    """The figures of one server, seen by `engine`."""

    def __init__(self, engine: Engine, figures: Figures) -> None:
        self._watch = Watch(engine.connection)
        self._figures = figures

    def __call__(self, name: str, call: Callable[[], None]) -> None:
        time.sleep(0.1)  # what went before is over
        with self._watch.during():
            started_s = time.perf_counter()
            call()
            took_ms = (time.perf_counter() - started_s) * 1e3
            time.sleep(0.03)  # a beat after the last turn
        self._figures.setdefault(name, []).append((self._watch.oldest_ms, took_ms))


def measure_requests(socket: Path, engine: Engine, record: Record, chunks: int) -> None:
    """A round of what is long because of its keys or leases. Ends with an empty server."""
    keys = random_keys(STORE_CHUNKS)
    record("nothing", lambda: time.sleep(1.0))
    record(f"store of {STORE_CHUNKS} chunks", lambda: engine.store(keys))
    record(
        f"lookup of {STORE_CHUNKS} keys",
        lambda: engine.ask(protocol.Lookup, "long", tuple(keys)),
    )
    record("end of that lease", lambda: engine.ask(protocol.EndRequest, "long"))
    other = Engine(socket)
    for number in range(LEASES):
        other.ask(protocol.Lookup, str(number), tuple(keys[:LEASE_CHUNKS]))

    def leave() -> None:
        other.close()
        engine.wait_for_none("pins")

    record(f"engine with {LEASES * LEASE_CHUNKS} pins leaves", leave)
    for first in range(STORE_CHUNKS, chunks, STORE_CHUNKS):
        engine.store(random_keys(min(STORE_CHUNKS, chunks - first)))
    record(f"clear of {chunks} chunks", lambda: engine.ask(protocol.Clear))


def measure_regions(socket: Path, record: Record) -> None:
    """A round of memory that takes long to close."""
    other = Engine(socket, REGIONS)

    def leave_and_return() -> None:
        other.close()
        Engine(socket, REGIONS).close()

    record(f"engine with {REGIONS} regions leaves and returns", leave_and_return)


def measure(chunks: int, rounds: int) -> Figures:
    """All scenarios in turn, `rounds` times."""
    figures: Figures = {}
    arena_bytes = (chunks + 2 * STORE_CHUNKS) * GEOMETRY.chunk_bytes
    options = ("--arena", str(arena_bytes), "--chunk-tokens", str(CHUNK_TOKENS))
    with private_socket() as socket, server_process(socket, *options):
        engine = Engine(socket)
        for _ in range(rounds):
            measure_requests(socket, engine, Record(engine, figures), chunks)
        engine.close()
    with (
        private_socket() as socket,
        python_process("-m", "benchmarks.heartbeat", "--serve", str(socket)) as process,
    ):
        wait_until_filled(socket, process)
        engine = Engine(socket)
        for _ in range(rounds):
            measure_regions(socket, Record(engine, figures))
        engine.close()
    return figures


class SlowToClose(HostMemory):
    """Memory that takes as long to close as a GPU's may."""

    def __init__(self, peer: Peer, board: Board, regions: Sequence[Region]) -> None:
        super().__init__(peer, board, regions)
        self._regions = len(regions)

    def close(self) -> None:
        time.sleep(CLOSE_S * self._regions)


class SlowDevice(HostServerDevice):
    """A host device with such memory."""

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        return SlowToClose(peer, board, regions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write JSON")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        settings = ServerSettings(
            socket=given.serve, arena_bytes=1 << 20, chunk_tokens=CHUNK_TOKENS
        )
        asyncio.run(Server(settings, {NAME: SlowDevice()}).run())
        return
    sys.setswitchinterval(1e-4)
    figures = measure(given.chunks, given.rounds)
    print(f"on {host()}; oldest heartbeat, ms, by round (and how long it took, ms)")
    for name, rounds in figures.items():
        print(f"{name:45}", "   ".join(f"{age:7.1f} ({took:7.1f})" for age, took in rounds))
    if given.save:
        given.save.write_text(json.dumps({"host": host(), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
