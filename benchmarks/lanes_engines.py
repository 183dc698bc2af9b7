"""The engines of `benchmarks.lanes`: one a GPU, in one process, each with retrieves in flight.

They speak the protocol and have no pages: no byte is copied. When each count was reached they read
in the fake driver's log (`fake_cuda.c`), and compare it with a link that never had to wait.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lamina import protocol
from lamina.board import RING_SLOTS, Board
from lamina.client.connection import Connection
from lamina.devices.cuda import device_name
from lamina.devices.cuda_memory import OFFSET
from lamina.geometry import Geometry, PageMap, PlanePages
from lamina.protocol import Region, RingPlace
from lamina.records import fingerprint, lay_out, ring_bytes, shapes
from lamina_lab.known.content import equal_layers, random_keys

GPUS, COUNTS, HEADER_WORDS = 8, 1 << 16, 3
"""As `struct log` has it."""
LOG_BYTES = 8 * (HEADER_WORDS + GPUS * COUNTS)
CHUNK_TOKENS, BLOCK_TOKENS, LAYERS = 256, 16, 32
BLOCKS = 65_536
SEED_CHUNKS = 4
WARM_S = 0.5
PATIENCE_S = 20.0
_BASE_BYTES = 1 << 40
_FIRST_SLOT = len(RING_SLOTS)


class Load(msgspec.Struct, frozen=True):
    """What the engines ask for."""

    lanes: int
    page_bytes: int
    chunks: int
    """Of a retrieve."""
    in_flight: int
    layers_per_slice: int
    has_rings: bool
    link_gbps: float
    seconds: float

    @property
    def geometry(self) -> Geometry:
        return equal_layers(
            LAYERS, self.page_bytes, chunk_tokens=CHUNK_TOKENS, block_tokens=BLOCK_TOKENS
        )


class Outcome(msgspec.Struct, frozen=True):
    """What became of it: of each lane GB/s while it was measured, and for all lanes by how much
    slices landed later than on a link that never waits, in ms."""

    gbps: list[float]
    first_late_ms: list[float]
    late_ms: list[float]
    parts: int


class Log(NamedTuple):
    """The fake driver's, shared with the server."""

    header: npt.NDArray[np.uint64]
    """ns in calls, calls, CPU ns of the front ends."""
    landed_ns: npt.NDArray[np.uint64]
    """Shape (GPUs, counts)."""


def open_log(path: Path) -> Log:
    """Made anew where there is none."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, LOG_BYTES)
    words = np.frombuffer(mmap.mmap(fd, LOG_BYTES), np.uint64)
    os.close(fd)
    return Log(words[:HEADER_WORDS], words[HEADER_WORDS:].reshape(GPUS, COUNTS))


class _Flight(NamedTuple):
    """A retrieve on its way."""

    slot: int
    base: int
    sent_ns: int
    part_bytes: npt.NDArray[np.int64]


class Engine:
    """A worker on GPU `number`, connected."""

    def __init__(self, socket: Path, load: Load, number: int, has_rings: bool, log: Log) -> None:
        self._load = load
        self._number = number
        self._geometry = load.geometry
        self._log = log
        self._board = Board.create(_FIRST_SLOT + load.in_flight)
        self.connection = Connection(socket, self._board)
        self._next = self._record = 1
        self._position = 0
        self._ring_bytes = ring_bytes(self._geometry)
        self._last_ns = 0
        self._keys: tuple[bytes, ...] = ()
        self._flying = 0
        self.is_ending = False
        self._ids = np.random.default_rng(number).permutation(BLOCKS).astype(np.int32)
        self.landings: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        """Of each retrieve that has ended when its parts landed, in ns, and their bytes."""
        self.late_ms: list[npt.NDArray[np.float64]] = []
        """And by how much later than on a link that never waits."""
        plane_bytes = BLOCKS * load.page_bytes
        sizes = self._ring_bytes if has_rings else (plane_bytes,) * LAYERS
        regions = tuple(Region(_handle(i), nbytes) for i, nbytes in enumerate(sizes))
        planes = tuple((PlanePages(layer, 0, load.page_bytes),) for layer in range(LAYERS))
        page_map = None if has_rings else PageMap((BLOCKS,), planes)
        device = device_name(bytes([number + 1] * 16).hex())
        self.ask(protocol.Hello, f"engine {number} {has_rings}", "benchmark")
        self.ask(protocol.Register, device, self._geometry, page_map, regions)

    def ask(self, request: type[protocol.Message], *fields: Any) -> Any:
        """Send a request and wait for its reply."""
        replies: list[protocol.Reply | None] = []
        self.connection.call(lambda number: request(number, *fields), replies.append)
        while not replies:
            self.connection.wait(1.0)
        return _expected(replies[0], protocol.REPLY_OF[request])

    def store(self, keys: list[bytes]) -> None:
        """For all engines: they have the same chunks."""
        blocks = SEED_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
        ids = protocol.pack_block_ids(self._ids[:blocks])
        for first in range(0, len(keys), SEED_CHUNKS):
            parent = keys[first - 1] if first else b""
            part = tuple(keys[first : first + SEED_CHUNKS])
            stored = self.ask(protocol.Store, first, parent, part, (ids,), 0)
            assert stored.stored == SEED_CHUNKS, stored

    def begin(self, keys: list[bytes]) -> None:
        self._keys = tuple(keys)
        for slot in range(self._load.in_flight):
            self._look_up(_FIRST_SLOT + slot)

    @property
    def is_idle(self) -> bool:
        return not self._flying

    def _look_up(self, slot: int) -> None:
        if self.is_ending:
            return
        self._flying += 1

        def found(reply: protocol.Reply | None) -> None:
            self._retrieve(slot, _expected(reply, protocol.Found).lease)

        self.connection.call(
            lambda number: protocol.Lookup(number, f"request {slot}", self._keys), found
        )

    def _retrieve(self, slot: int, lease: int) -> None:
        load, geometry = self._load, self._geometry
        slices = geometry.slices(load.layers_per_slice)
        place: RingPlace | None = None
        ids: tuple[bytes, ...] = ()
        if load.has_rings:
            cut = shapes(geometry, slices, load.chunks, self._ring_bytes[0])
            span = lay_out(cut, self._record, self._position, self._ring_bytes[0])
            place = RingPlace(
                load.chunks * CHUNK_TOKENS, self._record, self._position, fingerprint(cut)
            )
            base = self._record - 1  # so that counts are the records' numbers
            self._record, self._position = span.last_number + 1, span.end_position
            sizes = [shape.nbytes for shape in cut]
        else:
            self._ids = np.roll(self._ids, 4099)
            blocks = load.chunks * CHUNK_TOKENS // BLOCK_TOKENS
            ids = (protocol.pack_block_ids(self._ids[:blocks]),)
            sizes = [load.chunks * geometry.chunk_bytes // len(slices)] * len(slices)
            base = self._next
            self._next += len(slices)
        flight = _Flight(slot, base, time.monotonic_ns(), np.array(sizes))

        def ended(reply: protocol.Reply | None) -> None:
            assert _expected(reply, protocol.Retrieved).status == 0
            self._note(flight)
            self._flying -= 1
            self._look_up(slot)

        self.connection.call(
            lambda number: protocol.Retrieve(
                number, base, lease, 0, ids, slot, base, load.layers_per_slice, None, place
            ),
            ended,
        )

    def _note(self, flight: _Flight) -> None:
        counts = flight.base + 1 + np.arange(len(flight.part_bytes))
        landed = self._log.landed_ns[self._number, counts % COUNTS].astype(np.int64)
        began_ns = max(flight.sent_ns, self._last_ns)
        due_ns = began_ns + flight.part_bytes.cumsum() / self._load.link_gbps
        self.landings.append((landed, flight.part_bytes))
        self.late_ms.append((landed - due_ns) / 1e6)
        self._last_ns = int(landed[-1])


def run(socket: Path, load: Load, log: Log) -> Outcome:
    """Load the server's lanes; say "begin" on standard output once it is warm."""
    keys = random_keys(load.chunks)
    Engine(socket, load, 0, False, log).store(keys)
    engines = [Engine(socket, load, number, load.has_rings, log) for number in range(load.lanes)]
    for engine in engines:
        engine.begin(keys)
    _drive(engines, WARM_S)
    for engine in engines:
        engine.late_ms.clear()
        engine.landings.clear()
    begin_ns = time.monotonic_ns()
    print("begin", flush=True)
    _drive(engines, load.seconds)
    end_ns = time.monotonic_ns()
    print("end", flush=True)
    for engine in engines:
        engine.is_ending = True
    _drive(engines, PATIENCE_S)
    gbps = []
    for engine in engines:
        landed, nbytes = (np.concatenate(part) for part in zip(*engine.landings, strict=True))
        within = (begin_ns <= landed) & (landed < end_ns)
        gbps.append(float(nbytes[within].sum() / (end_ns - begin_ns)))
    late = [each for engine in engines for each in engine.late_ms]
    return Outcome(
        gbps, [float(each[0]) for each in late], np.concatenate(late).tolist(), len(late[0])
    )


def _drive(engines: list[Engine], seconds: float) -> None:
    """A thread an engine reads what has arrived, until nothing is on its way or time is up."""
    until_s = time.monotonic() + seconds

    def work(engine: Engine) -> None:
        while not engine.is_idle and (left_s := until_s - time.monotonic()) > 0:
            engine.connection.wait(left_s)

    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(work, engines))


def _handle(number: int) -> bytes:
    """Of an allocation; the fake driver maps it at the address that it begins with."""
    address = (number + 1) * _BASE_BYTES
    return address.to_bytes(8, "little").ljust(64, b"\0") + OFFSET.pack(0)


def _expected(reply: Any, kind: Any) -> Any:
    assert isinstance(reply, kind), reply
    return reply


if __name__ == "__main__":
    outcome = run(
        Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Load), open_log(Path(sys.argv[3]))
    )
    print(json.dumps(msgspec.to_builtins(outcome)))
