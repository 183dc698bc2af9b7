"""Bytes through rings: those of the direct path, for geometries of every kind, and no others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina import records
from lamina.board import TransferStatus
from lamina.geometry import BlockIds, Geometry
from lamina_lab.known.content import ids, random_keys
from tests.rings.geometries import geometries
from tests.rings.random_memory import DataPath, MemoryWorker, RandomMemory, random_blocks
from tests.support.server import ServerThread

CHUNKS = 6
MEMORY_CHUNKS = 20
PATHS: tuple[DataPath, ...] = ("direct", "ring")
SETTINGS = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def small_chunk_server(socket_path: Path) -> Iterator[ServerThread]:
    server = ServerThread(socket_path, chunk_tokens=8)
    yield server
    server.stop()


class Rings:
    """Sizes of rings, and how far slices are joined, for as long as it is entered. The server is in
    this process, and has them too."""

    def __init__(self, retrieve_bytes: int, store_bytes: int, joined_part: int) -> None:
        self._values = {
            "RETRIEVE_RING_BYTES": retrieve_bytes,
            "STORE_RING_BYTES": store_bytes,
            "JOINED_PART": joined_part,
        }

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        for name, value in self._values.items():
            self._patch.setattr(records, name, value)
        records.shapes.cache_clear()

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        records.shapes.cache_clear()


sizes = st.builds(
    Rings,
    st.sampled_from([256, 4096, 32 << 10, 1 << 20]),
    st.sampled_from([256, 4096, 32 << 10, 1 << 20]),
    st.sampled_from([1, 2, 6, 1 << 20]),
)


def wanted_part(geometry: Geometry, rng: random.Random) -> tuple[int, int]:
    """Where a retrieve of `CHUNKS` chunks begins, and its tokens: perhaps in the middle of its
    first and last chunk."""
    step = geometry.step_tokens
    steps = CHUNKS * geometry.chunk_tokens // step
    first, end = sorted(rng.sample(range(steps + 1), 2))
    return first * step, (end - first) * step


def part_of(
    block_ids: list[BlockIds], geometry: Geometry, start: int, tokens: int
) -> list[BlockIds]:
    """The blocks among those of whole chunks that hold these tokens."""
    return [
        each[start // group.block_tokens : (start + tokens) // group.block_tokens]
        for each, group in zip(block_ids, geometry.groups, strict=True)
    ]


@given(geometries(), sizes, st.integers(0, 2**20))
@SETTINGS
def test_pages_are_those_of_the_direct_path(
    small_chunk_server: ServerThread, geometry: Geometry, rings: Rings, seed: int
) -> None:
    """Stored by either and retrieved by both; every other byte stays what it was."""
    rng, path = random.Random(seed), small_chunk_server.settings.socket
    with rings:
        workers = [
            MemoryWorker(path, RandomMemory(geometry, MEMORY_CHUNKS, seed), data_path)
            for data_path in PATHS
        ]
        for storing in workers:
            keys = random_keys(CHUNKS)
            source = random_blocks(storing.memory, CHUNKS * geometry.chunk_tokens, rng)
            storing.store(keys, source)
            parts = [wanted_part(geometry, rng) for _ in range(3)]
            contents = [storing.memory.pages(part_of(source, geometry, *part)) for part in parts]
            for turn, (start, tokens) in enumerate(parts):
                target = random_blocks(storing.memory, tokens, rng)
                width = rng.randint(1, len(geometry.layers))
                for worker in workers:
                    worker.memory.poison(target)
                    before = worker.memory.without(target)
                    retrieve = worker.begin(f"turn {turn}", keys, start, target, width)
                    worker.wait([retrieve])
                    assert retrieve.outcome is TransferStatus.OK
                    assert worker.memory.pages(target) == contents[turn]
                    assert worker.memory.without(target) == before
        for worker in workers:
            worker.client.close()


@given(geometries(), sizes, st.integers(0, 2**20))
@SETTINGS
def test_retrieves_that_are_cancelled_harm_no_other(
    small_chunk_server: ServerThread, geometry: Geometry, rings: Rings, seed: int
) -> None:
    """Those beside them are right, and nothing is written but blocks that were named."""
    rng, path = random.Random(seed), small_chunk_server.settings.socket
    tokens = geometry.chunk_tokens * CHUNKS
    with rings:
        worker = MemoryWorker(path, RandomMemory(geometry, MEMORY_CHUNKS, seed), "ring")
        everything = random_blocks(worker.memory, MEMORY_CHUNKS * geometry.chunk_tokens, rng)
        source = part_of(everything, geometry, 0, tokens)
        keys = random_keys(CHUNKS)
        worker.store(keys, source)
        content = worker.memory.pages(source)
        begun = []
        named = [ids([]) for _ in geometry.groups]
        for number in range(2):
            target = part_of(everything, geometry, (number + 1) * tokens, tokens)
            named = [ids([*some, *more]) for some, more in zip(named, target, strict=True)]
            begun.append((target, rng.randint(1, len(geometry.layers))))
        before = worker.memory.without(named)
        for turn in range(4):
            worker.memory.poison(named)
            retrieves = [
                worker.begin(f"{turn} {number}", keys, 0, target, width)
                for number, (target, width) in enumerate(begun)
            ]
            for retrieve in retrieves:
                if rng.random() < 0.4:
                    worker.client.cancel(retrieve)
            worker.wait(retrieves)
            for retrieve, (target, _) in zip(retrieves, begun, strict=True):
                assert retrieve.outcome in (TransferStatus.OK, TransferStatus.CANCELLED)
                if not retrieve.outcome:
                    assert worker.memory.pages(target) == content
            assert worker.memory.without(named) == before
        worker.client.close()
