"""Chunks of which several workers keep a shard each: stores, what is found of them, and room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.board import TransferStatus
from lamina.devices.host import HostWorkerDevice
from lamina.errors import DeviceError
from lamina.server import limits
from lamina.shards import ChunkLayout
from lamina_lab.known.content import random_keys
from tests.support.ranks import (
    CHUNKS,
    GEOMETRIES,
    TARGET,
    Engine,
    Make,
    begin,
    check_all_comes_back,
    counts,
    store,
    wait_for_end,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker


@pytest.mark.parametrize("first", [0, 1])
def test_what_two_shards_have_stored_is_found_and_every_byte_comes_back(
    server: ServerThread, engine: Engine, keys: list[bytes], first: int
) -> None:
    assert counts(engine.store(keys, first)[0]) == (CHUNKS, 0, 0)
    assert engine.found(keys) == 0
    assert counts(engine.store(keys, 1 - first)[0]) == (CHUNKS, 0, 0)
    assert engine.found(keys) == CHUNKS
    totals, gauges = server.totals(), server.gauges()
    nbytes = CHUNKS * engine.layout.chunk_bytes
    assert (totals["stored_chunks"], totals["stored_bytes"]) == (2 * CHUNKS, nbytes)
    assert gauges["chunks"] == CHUNKS
    assert gauges["arena_capacity_bytes"] - gauges["arena_free_bytes"] == nbytes
    assert [counts(again) for again in engine.store(keys)] == [(0, CHUNKS, 0)] * 2
    check_all_comes_back(server)


def test_shards_that_store_at_the_same_time_share_the_room_and_one_pays_for_it(
    server: ServerThread, engine: Engine, keys: list[bytes]
) -> None:
    server.device.stores.close()
    stores = [begin(worker, keys) for worker in engine.workers]
    eventually(lambda: server.gauges()["queued_transfers"] == 2)
    nbytes = CHUNKS * engine.layout.chunk_bytes
    assert server.gauges()["arena_reserved_bytes"] == nbytes
    assert server.gauges()["arena_free_bytes"] == server.gauges()["arena_capacity_bytes"] - nbytes
    server.device.stores.open()
    for worker, begun in zip(engine.workers, stores, strict=True):
        wait_for_end(worker, begun)
    assert engine.found(keys) == CHUNKS
    check_all_comes_back(server)


def test_as_far_as_all_shards_have_stored_is_found(
    server: ServerThread, engine: Engine, keys: list[bytes]
) -> None:
    engine.store(keys, 0)
    engine.store(keys[:2], 1)
    assert engine.found(keys) == 2
    assert counts(store(engine.workers[1], keys[2:], keys[1])) == (2, 0, 0)
    assert engine.found(keys) == CHUNKS


# A store of one rank that comes to nothing, and the next one that makes it good.


def dropped(server: ServerThread, worker: PageWorker, keys: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_STORES", 0)
        assert counts(store(worker, keys)) == (0, 0, CHUNKS)


def failed(server: ServerThread, worker: PageWorker, keys: list[bytes]) -> None:
    server.device.stores.fail_next(DeviceError("the link broke", "Mend it"))
    begun = store(worker, keys)
    assert begun.ended is not None
    assert begun.ended.status == TransferStatus.COPY_FAILED
    assert counts(begun) == (0, 0, CHUNKS)


def voided(server: ServerThread, worker: PageWorker, keys: list[bytes]) -> None:
    server.device.stores.close()
    begin(worker, keys)
    server.device.stores.wait_until_held()
    worker.client.give_up_stores()
    server.device.stores.open()
    eventually(lambda: server.totals()["stores_void"] == 1)


def cancelled(server: ServerThread, worker: PageWorker, keys: list[bytes]) -> None:
    begun = begin(worker, keys, is_computed=False)
    eventually(lambda: server.gauges()["queued_transfers"] == 1)

    def cancel() -> None:
        for session in server.server.sessions:
            session.cancel(lambda _: True)

    server.on_loop(cancel)
    wait_for_end(worker, begun)
    assert counts(begun) == (0, 0, CHUNKS)


WAYS = [dropped, failed, voided, cancelled]


def test_shards_go_through_rings_as_well(
    server: ServerThread, make_worker: Make, keys: list[bytes]
) -> None:
    engine = Engine(make_worker, "one", device=HostWorkerDevice(), data_path="ring")
    assert all(worker.client.has_rings for worker in engine.workers)
    assert [counts(begun) for begun in engine.store(keys)] == [(CHUNKS, 0, 0)] * 2
    assert [counts(begun) for begun in engine.store(keys)] == [(0, CHUNKS, 0)] * 2
    assert engine.found(keys) == CHUNKS
    check_all_comes_back(server)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_store_that_came_to_nothing_is_made_good_by_the_next(
    server: ServerThread, engine: Engine, keys: list[bytes], way: Any, rank: int, is_first: bool
) -> None:
    """Whether its rank or the other is the first to store."""
    if not is_first:
        engine.store(keys, 1 - rank)
    way(server, engine.workers[rank], keys)
    eventually(lambda: server.gauges()["pins"] == 0)
    assert server.gauges()["chunks"] == (0 if is_first else CHUNKS), "what nobody needs is kept"
    if is_first:
        assert counts(engine.store(keys, 1 - rank)[0]) == (CHUNKS, 0, 0)
    assert engine.found(keys) == 0
    assert counts(engine.store(keys, rank)[0]) == (CHUNKS, 0, 0)
    assert engine.found(keys) == CHUNKS
    check_all_comes_back(server)


def test_another_engine_completes_what_the_first_has_left(
    server: ServerThread, engine: Engine, make_worker: Make, keys: list[bytes]
) -> None:
    other = Engine(make_worker, "other")
    engine.store(keys, 0)
    assert [counts(begun) for begun in other.store(keys)] == [(0, CHUNKS, 0), (CHUNKS, 0, 0)]
    assert (engine.found(keys), other.found(keys)) == (CHUNKS, CHUNKS)
    check_all_comes_back(server)


def test_what_another_engine_cuts_otherwise_counts_as_present_and_is_not_retrieved(
    server: ServerThread, engine: Engine, make_worker: Make, keys: list[bytes]
) -> None:
    """Two that made no difference between their keys."""
    other = Engine(make_worker, "other", shards=3)
    engine.store(keys, 0)
    assert [counts(begun) for begun in other.store(keys)] == [(0, CHUNKS, 0)] * 3
    engine.store(keys, 1)
    assert engine.found(keys) == CHUNKS
    refused = other.workers[1].retrieve("r", keys, TARGET)
    assert refused.outcome is TransferStatus.REFUSED
    other.workers[1].expect(TARGET, 0xA5)


@pytest.mark.parametrize(("shards", "replicas"), [(1, 2), (2, 3)])
def test_replicas_share_the_writing_and_each_retrieves_all(
    server: ServerThread, make_worker: Make, shards: int, replicas: int
) -> None:
    engine, keys = Engine(make_worker, "one", shards, replicas), random_keys(CHUNKS)
    total = 0
    for rank, shard in enumerate(engine.ranks):
        stored, present, dropped = counts(engine.store(keys, rank)[0])
        assert (stored, stored + present, dropped) == (sum(map(shard.writes, keys)), CHUNKS, 0)
        total += stored
        if total < shards * CHUNKS:
            assert engine.found(keys) < CHUNKS
    assert total == shards * CHUNKS
    assert engine.found(keys) == CHUNKS
    assert server.totals()["stored_bytes"] == CHUNKS * engine.layout.chunk_bytes
    check_all_comes_back(server)


def test_a_fourth_of_a_chunk_is_never_found(server: ServerThread, make_worker: Make) -> None:
    engine, keys = Engine(make_worker, "one", shards=4), random_keys(CHUNKS)
    for rank in (2, 0, 3):
        engine.store(keys, rank)
        assert engine.found(keys) == 0
    engine.store(keys, 1)
    assert engine.found(keys) == CHUNKS


# Room.


@pytest.fixture
def small(socket_path: Path) -> Iterator[ServerThread]:
    """A server with room for six chunks of two shards."""
    thread = ServerThread(socket_path, arena_bytes=6 * ChunkLayout(GEOMETRIES[:2]).chunk_bytes)
    yield thread
    thread.stop()


def test_what_is_not_complete_is_evicted_in_its_turn_and_its_room_comes_back(
    small: ServerThread, make_worker: Make
) -> None:
    engine = Engine(make_worker, "one")
    halves = [random_keys(2) for _ in range(8)]
    for keys in halves:
        assert counts(engine.store(keys, 0)[0]) == (2, 0, 0)
    assert small.gauges()["evicted_chunks"] == 2 * 5
    assert counts(engine.store(halves[0], 1)[0]) == (2, 0, 0), "it reserves anew"
    assert counts(engine.store(halves[-1], 1)[0]) == (2, 0, 0), "it completes what is there"
    assert [engine.found(keys) for keys in halves] == [0] * 7 + [2]
    assert small.gauges()["evicted_chunks"] == 2 * 6
    check_all_comes_back(small)


def test_a_column_of_what_is_there_needs_no_room_and_no_budget(
    small: ServerThread, make_worker: Make
) -> None:
    engine, keys = Engine(make_worker, "one"), random_keys(3)
    engine.store(keys, 0)
    small.device.stores.close()
    others = [begin(engine.workers[1], random_keys(1)) for _ in range(3)]
    eventually(lambda: small.gauges()["queued_transfers"] == 3)
    assert small.gauges()["arena_free_bytes"] == 0
    begun = begin(engine.workers[1], keys)
    small.device.stores.open()
    for one in (begun, *others):
        wait_for_end(engine.workers[1], one)
    assert counts(begun) == (3, 0, 0)
    assert engine.found(keys) == 3
