"""What an engine of 8 ranks costs the server, beside one of 1: memory, and its requests' time.

    python -m benchmarks.ranks [--rounds 400]

Memory is that of an index of a million chunks, each part in a process of its own. Times are of a
server process with a layer of 64-byte pages in the host's memory, so that little is copied: a
step's lookup by its scheduler; then the retrieves, or the stores, of all ranks, sent together,
until the last one is answered. Ranks are connections of one process here, which takes its time too;
*server* is the server's processor time of all three.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.core import host
from lamina import protocol
from lamina.board import Board
from lamina.client.connection import Connection
from lamina.devices.host import NAME, HostWorkerDevice
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap, PlanePages
from lamina.server.arena import Arena
from lamina.server.index import Index
from lamina.shards import ChunkLayout, Shard
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.known.content import equal_layers, random_keys

RANKS = (1, 8)
INDEX_CHUNKS, PROMPT_CHUNKS = 1_000_000, 64
LAYERS, PAGE_BYTES, BLOCKS_PER_CHUNK = 1, 64, 16
GEOMETRY = equal_layers(LAYERS, PAGE_BYTES, chunk_tokens=256)
PAGE_MAP = PageMap(
    (PROMPT_CHUNKS * BLOCKS_PER_CHUNK,),
    tuple(
        (PlanePages(0, layer * PROMPT_CHUNKS * BLOCKS_PER_CHUNK * PAGE_BYTES, PAGE_BYTES),)
        for layer in range(LAYERS)
    ),
)
IDS = protocol.pack_block_ids(np.arange(PROMPT_CHUNKS * BLOCKS_PER_CHUNK, dtype=np.int32))


def index_memory(columns: int) -> float:
    """Bytes a chunk of a million, keys included."""
    page = 4096 // columns
    geometry = Geometry(16, (Group(16),), (Layer("0", 0, 1, page),))
    layout = ChunkLayout([geometry] * columns)
    arena = Arena(INDEX_CHUNKS * layout.chunk_bytes)
    arena.extend(arena.capacity_bytes)  # address space only: nothing is ever copied
    index = Index(arena)
    before_bytes = _resident_bytes()
    for first in range(0, INDEX_CHUNKS, PROMPT_CHUNKS):
        parent = None
        for number in range(first, first + PROMPT_CHUNKS):
            parent = index.reserve(number.to_bytes(32, "big"), parent, layout)
            assert parent is not None
            for column in range(columns):
                if column:
                    index.pin([parent])  # as each rank's store does; the first has reserved it
                assert index.claim(parent, column)
                index.commit(parent, column)
    assert len(index) == INDEX_CHUNKS
    return (_resident_bytes() - before_bytes) / INDEX_CHUNKS


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Step(NamedTuple):
    """In us, what a tenth of the rounds stayed below: the machine's other work disturbs the rest;
    `server_us` is the processor time of all three, a mean."""

    lookup_us: float
    retrieves_us: float
    stores_us: float
    server_us: float


class Rank:
    """A worker, connected; all of its requests are of one prompt."""

    def __init__(self, socket: Path, shard: Shard) -> None:
        self._board = Board.create(1)
        self.connection = Connection(socket, self._board)
        self._numbers = 0
        self._base = 0
        self._pages = np.zeros(PROMPT_CHUNKS * BLOCKS_PER_CHUNK * PAGE_BYTES * LAYERS, np.uint8)
        device = HostWorkerDevice()
        device.admit(self.connection.server)
        region = device.export(Allocation(self._pages.ctypes.data, self._pages.nbytes))
        self.answers: list[Any] = []
        self.ask(protocol.Hello, "engine", "benchmark")
        self.ask(protocol.Register, NAME, GEOMETRY, PAGE_MAP, (region,), b"", shard)

    def send(self, request: type[protocol.Message], *fields: Any) -> None:
        self.answers.clear()
        self.connection.call(lambda number: request(number, *fields), self.answers.append)

    def answer(self) -> Any:
        while not self.answers:
            self.connection.wait(1.0)
        assert not isinstance(self.answers[0], protocol.ErrorReply | None), self.answers
        return self.answers[0]

    def ask(self, request: type[protocol.Message], *fields: Any) -> Any:
        self.send(request, *fields)
        return self.answer()

    def send_retrieve(self, lease: int) -> None:
        self._numbers += 1
        self._base += LAYERS
        self.send(protocol.Retrieve, self._numbers, lease, 0, (IDS,), 0, self._base, LAYERS)

    def send_store(self, keys: Sequence[bytes]) -> None:
        self._numbers += 1
        self.send(protocol.Store, self._numbers, b"", tuple(keys), (IDS,), 0)


def time_steps(ranks: int, rounds: int) -> Step:
    """An engine of so many ranks, alone on a server: each round stores a prompt and hits it."""
    chunk_bytes = ranks * GEOMETRY.chunk_bytes
    arena = str(8 * PROMPT_CHUNKS * chunk_bytes)
    times: list[tuple[float, float, float]] = []
    with private_socket() as socket, server_process(socket, "--arena", arena) as server:
        workers = [Rank(socket, Shard(number, ranks)) for number in range(ranks)]
        first = workers[0]

        def all_of(send: Callable[[Rank, Any], None], what: Any) -> float:
            began_s = time.perf_counter()
            for worker in workers:
                send(worker, what)
            for worker in workers:
                worker.answer()
            return (time.perf_counter() - began_s) * 1e6

        used_s = _processor_s(server.pid)
        for _ in range(rounds):
            keys = random_keys(PROMPT_CHUNKS)
            stores_us = all_of(Rank.send_store, keys)
            began_s = time.perf_counter()
            found = first.ask(protocol.Lookup, "request", tuple(keys))
            lookup_us = (time.perf_counter() - began_s) * 1e6
            assert found.chunks == PROMPT_CHUNKS, found
            retrieves_us = all_of(Rank.send_retrieve, found.lease)
            times.append((lookup_us, retrieves_us, stores_us))
        server_us = (_processor_s(server.pid) - used_s) / rounds * 1e6
        for worker in workers:
            worker.connection.close()
    tenth = [statistics.quantiles(column, n=10)[0] for column in zip(*times, strict=True)]
    lookup_us, retrieves_us, stores_us = tenth
    return Step(lookup_us, retrieves_us, stores_us, server_us)


def _processor_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    print(f"on {host()}")
    for columns in RANKS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            nbytes = alone.submit(index_memory, columns).result()
        print(f"index of {INDEX_CHUNKS} chunks of {columns} columns: {nbytes:.0f} bytes a chunk")
    steps = {ranks: time_steps(ranks, rounds) for ranks in RANKS}
    print(f"us of a prompt of {PROMPT_CHUNKS} chunks, lowest tenth: 1 rank, 8 ranks, ratio")
    one, many = (steps[ranks] for ranks in RANKS)
    for name, alone_us, together_us in zip(Step._fields, one, many, strict=True):
        print(f"{name:15} {alone_us:8.0f} {together_us:8.0f} {together_us / alone_us:6.2f}")


if __name__ == "__main__":
    main()
