"""The event loop is never late: whatever one peer asks for, a turn of the loop does a bounded part.

Counted, not timed: what the index and the leases do between two turns of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina import protocol
from lamina.server.index import Index
from lamina.server.leases import LeaseTable
from lamina.server.turns import CHUNKS_PER_TURN, KEYS_PER_TURN
from lamina.shards import ChunkLayout
from lamina_lab.known.content import equal_layers, random_keys
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

CHUNKS = 20 * CHUNKS_PER_TURN
LONG = 3 * KEYS_PER_TURN
LEASES, LEASE_CHUNKS = 300, 64
GEOMETRY = equal_layers(layers=1, page_bytes=64)
ARENA_BYTES = 2 * LONG * 4096


class Meter:
    """What is done in a turn of the loop, in the unit of `CHUNKS_PER_TURN`; the most is kept."""

    def __init__(self, server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._now = self.most = self.total = 0.0
        per_key = CHUNKS_PER_TURN / KEYS_PER_TURN

        def count(kind: type, name: str, cost: Callable[..., float]) -> None:
            inner = getattr(kind, name)

            def counted(*arguments: Any) -> Any:
                self._now += cost(*arguments)
                self.total += cost(*arguments)
                return inner(*arguments)

            monkeypatch.setattr(kind, name, counted)

        def per_item(_: Index, items: Sequence[object]) -> float:
            return len(items) * per_key

        for name in ("find", "pin", "_unpin"):
            count(Index, name, per_item)
        for name in ("reserve", "commit", "discard", "_examine_candidate"):
            count(Index, name, lambda *_: 1)
        count(LeaseTable, "_drop", lambda _, lease: 1)
        server.on_loop(lambda: setattr(self, "_task", asyncio.ensure_future(self._watch())))

    async def _watch(self) -> None:
        while True:
            self._now = 0.0
            await asyncio.sleep(0)
            self.most = max(self.most, self._now)

    def check(self, at_least: float) -> None:
        """The work was done, in bounded parts: of a request, of what it left to do, of its end."""
        self._server.after_reading(lambda: None)  # the last turn has been looked at
        assert self.total >= at_least
        assert self.most <= 4 * CHUNKS_PER_TURN + 2


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path, arena_bytes=ARENA_BYTES)
    yield thread
    thread.stop()


@pytest.fixture
def worker(server: ServerThread) -> Iterator[PageWorker]:
    worker = PageWorker(
        server.settings.socket, GEOMETRY, LONG * BLOCKS_PER_CHUNK, store_timeout_ms=20_000
    )
    yield worker
    worker.close()


def lookup(worker: PageWorker, request: str, keys: Sequence[bytes]) -> int:
    result = worker.client.lookup(request, keys).wait(20)
    assert result is not None
    return result.chunks


def test_a_clear_takes_turns(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.store_new(CHUNKS)
    meter = Meter(server, monkeypatch)
    cleared = worker.client.ask(protocol.Clear)
    assert isinstance(cleared, protocol.Cleared)
    assert cleared.chunks == CHUNKS
    meter.check(at_least=CHUNKS)
    assert server.gauges()["arena_free_bytes"] == ARENA_BYTES


def test_a_store_takes_turns_to_find_room_and_to_become_findable(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(server, monkeypatch)
    keys = worker.store_new(CHUNKS)
    meter.check(at_least=2 * CHUNKS)
    assert lookup(worker, "r", keys) == CHUNKS


def test_a_store_that_evicts_takes_turns_also_where_all_candidates_were_used_since(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has to go back to its place before the first can go."""
    index, layout = server.server.index, ChunkLayout([GEOMETRY])

    def fill() -> None:
        chunks = []
        for key in random_keys(ARENA_BYTES // GEOMETRY.chunk_bytes):
            chunk = index.reserve(key, None, layout)
            assert chunk is not None
            assert index.claim(chunk, 0)
            index.commit(chunk, 0)
            chunks.append(chunk)
        index.pin(chunks)
        index.unpin(chunks)

    server.on_loop(fill)
    meter = Meter(server, monkeypatch)
    worker.store_new(2)
    meter.check(at_least=ARENA_BYTES // GEOMETRY.chunk_bytes)


def test_a_store_that_fails_takes_turns_to_be_forgotten(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.device.stores.close()
    meter = Meter(server, monkeypatch)
    store = worker.begin_store(random_keys(CHUNKS), range(CHUNKS * BLOCKS_PER_CHUNK))
    eventually(lambda: server.gauges()["queued_transfers"])
    worker.client.give_up_stores()
    server.device.stores.open()
    worker.wait(lambda: store.is_over)
    eventually(lambda: server.gauges()["arena_reserved_bytes"] == 0)
    meter.check(at_least=2 * CHUNKS)
    assert server.gauges()["arena_free_bytes"] == ARENA_BYTES


def test_a_long_lookup_its_retrieve_and_its_end_take_turns(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = worker.store_new(LONG)
    meter = Meter(server, monkeypatch)
    assert worker.retrieve("r", keys, range(LONG * BLOCKS_PER_CHUNK)).outcome == 0
    eventually(lambda: server.gauges()["pins"] == 0)
    meter.check(at_least=5 * 3 * CHUNKS_PER_TURN)


def test_an_engine_that_leaves_with_many_leases_takes_turns(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = worker.store_new(LEASE_CHUNKS)
    other = PageWorker(server.settings.socket, GEOMETRY)
    for number in range(LEASES):
        lookup(other, f"request {number}", keys)
    assert server.gauges()["pins"] == LEASES * LEASE_CHUNKS
    meter = Meter(server, monkeypatch)
    other.close()
    eventually(lambda: server.gauges()["pins"] == 0)
    meter.check(at_least=LEASES)
    assert server.gauges()["leases"] == 0


def test_leases_that_run_out_together_take_turns(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = worker.store_new(LEASE_CHUNKS)
    for number in range(LEASES):
        lookup(worker, f"request {number}", keys)
    meter = Meter(server, monkeypatch)
    server.clock_s += server.settings.lease_ttl_s
    eventually(lambda: server.gauges()["leases"] == 0)
    assert server.gauges()["pins"] == 0
    meter.check(at_least=LEASES)
    assert server.totals()["leases_expired"] == LEASES
