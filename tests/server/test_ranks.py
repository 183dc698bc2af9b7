"""The ranks of an engine: workers that come and go, what is refused of them, and their leases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina.board import Board, TransferStatus
from lamina.devices.base import EngineMemory
from lamina.devices.host import HostMemory, HostServerDevice
from lamina.errors import DeviceError, ErrorCode, RequestRefusedError
from lamina.geometry import Geometry, Group
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.shards import ChunkLayout, Shard
from lamina_lab.known.content import equal_layers, random_keys
from tests.support.ranks import (
    CHUNKS,
    GEOMETRIES,
    TARGET,
    Engine,
    Make,
    begin,
    check_all_comes_back,
    counts,
    retrieve,
    store,
    wait_for_end,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker

# Workers come and go.


def test_nothing_is_stored_or_retrieved_before_all_shards_have_registered(
    server: ServerThread, engine: Engine, make_worker: Make, keys: list[bytes]
) -> None:
    engine.store(keys)
    late = Engine(make_worker, "late", ranks=[Shard(0, 2)])
    one = late.workers[0]
    assert counts(store(one, random_keys(2))) == (0, 0, 2)
    refused = one.retrieve("r", keys, TARGET)
    assert refused.outcome is TransferStatus.REFUSED
    assert refused.refusal is not None
    assert refused.refusal.code is ErrorCode.NOT_REGISTERED
    assert "not all 2 shards" in str(refused.refusal)
    late.workers.append(late.worker(Shard(1, 2)))
    assert counts(store(one, random_keys(2))) == (2, 0, 0)
    assert late.found(keys) == CHUNKS


def layout_of(server: ServerThread, name: str) -> ChunkLayout | None:
    return server.on_loop(lambda: server.server.sessions.layout_of(name))


def test_a_layout_stays_as_long_as_each_shard_has_a_worker(
    server: ServerThread, engine: Engine
) -> None:
    layout = layout_of(server, "one")
    assert layout is not None
    assert layout.digest == engine.layout.digest
    lingering, successor = engine.workers[1], engine.worker(Shard(1, 2))
    sessions = server.gauges()["sessions"]
    lingering.close()
    eventually(lambda: server.gauges()["sessions"] == sessions - 1)
    assert layout_of(server, "one") is layout
    successor.close()
    eventually(lambda: server.gauges()["sessions"] == sessions - 2)
    assert layout_of(server, "one") is None
    engine.workers[1] = engine.worker(Shard(1, 2))
    again = layout_of(server, "one")
    assert again is not None
    assert again.digest == layout.digest
    for worker in engine.workers:
        worker.close()
    eventually(lambda: server.gauges()["sessions"] == 0)
    assert not server.server.sessions._layouts


def test_a_rank_that_dies_in_the_middle_of_its_store_leaves_the_others_columns(
    server: ServerThread, engine: Engine, keys: list[bytes]
) -> None:
    server.device.stores.close()
    begin(engine.workers[1], keys)
    server.device.stores.wait_until_held()
    ours = begin(engine.workers[0], keys)
    eventually(lambda: server.gauges()["queued_transfers"] == 2)
    sessions = server.gauges()["sessions"]
    engine.workers[1].client.close()
    eventually(lambda: server.gauges()["sessions"] == sessions - 1)
    server.device.stores.open()
    wait_for_end(engine.workers[0], ours)
    assert counts(ours) == (CHUNKS, 0, 0)
    eventually(lambda: server.gauges()["pins"] == 0)
    assert counts(engine.store(random_keys(1), 0)[0]) == (0, 0, 1), "the engine has no layout"
    engine.workers[1] = engine.worker(Shard(1, 2))
    assert engine.found(keys) == 0
    assert counts(engine.store(keys, 1)[0]) == (CHUNKS, 0, 0)
    assert engine.found(keys) == CHUNKS
    check_all_comes_back(server)


# What is refused.

OTHER_BLOCKS = equal_layers(2, 256, block_tokens=32)
TWO_GROUPS = Geometry(64, (Group(16), Group(16)), GEOMETRIES[1].layers)


@pytest.mark.parametrize(
    ("shard", "geometry", "why"),
    [
        (Shard(1, 3), GEOMETRIES[1], "3 shards in 1 replicas.* 2 in 1.*Tell all workers"),
        (Shard(1, 2, 0, 2), GEOMETRIES[1], "2 shards in 2 replicas.* 2 in 1.*Tell all workers"),
        (Shard(), GEOMETRIES[0], "1 shards in 1 replicas.* 2 in 1.*Tell all workers"),
        (Shard(0, 2), GEOMETRIES[1], "another worker keeps shard 0.*Register what replicas"),
        (Shard(1, 2), OTHER_BLOCKS, "shards 1 and 0 have other groups.*Use the same blocks"),
        (Shard(1, 2), equal_layers(2, 256, chunk_tokens=32), "have 32 tokens.*--chunk-tokens"),
        (Shard(1, 2), equal_layers(8, 2 << 20), "2 shards of a chunk take .*--arena of several"),
    ],
)
def test_a_worker_that_does_not_fit_its_engines_others_is_refused(
    server: ServerThread, make_worker: Make, shard: Shard, geometry: Geometry, why: str
) -> None:
    blocks = {"blocks": 4} if geometry.chunk_bytes > 1 << 20 else {}
    make_worker(geometry=GEOMETRIES[0], engine="e", shard=Shard(0, 2), data_path="direct")
    with pytest.raises(RequestRefusedError, match=why) as refused:
        make_worker(geometry=geometry, engine="e", shard=shard, data_path="direct", **blocks)
    assert refused.value.code is ErrorCode.BAD_GEOMETRY
    assert layout_of(server, "e") is None
    make_worker(geometry=GEOMETRIES[1], engine="e", shard=Shard(1, 2), data_path="direct")
    assert layout_of(server, "e") is not None


class Slow(HostServerDevice):
    """A device on which memory is opened once a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open = threading.Event()
        self.asked = threading.Semaphore(0)
        self.open_memories: list[EngineMemory] = []

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        device = self

        class Memory(HostMemory):
            def close(self) -> None:
                device.open_memories.remove(self)

        self.asked.release()
        assert self.may_open.wait(20)
        self.open_memories.append(Memory(peer, board, regions))
        return self.open_memories[-1]


def test_of_two_that_do_not_fit_and_register_at_the_same_time_one_is_refused(
    socket_path: Path, make_worker: Make
) -> None:
    device = Slow()
    server = ServerThread(socket_path, device)
    try:
        outcomes: list[object] = []

        def register(shard: Shard) -> None:
            try:
                outcomes.append(make_worker(geometry=GEOMETRIES[0], engine="e", shard=shard))
            except RequestRefusedError as error:
                outcomes.append(error)

        shards = (Shard(0, 2), Shard(0, 3))
        threads = [threading.Thread(target=register, args=(shard,)) for shard in shards]
        for thread in threads:
            thread.start()
        assert device.asked.acquire(timeout=20)
        eventually(lambda: sum(s.in_hand for s in server.server.sessions) == 2)
        device.may_open.set()
        for thread in threads:
            thread.join(20)
        refused = [outcome for outcome in outcomes if isinstance(outcome, RequestRefusedError)]
        assert len(outcomes) == 2
        assert [error.code for error in refused] == [ErrorCode.BAD_GEOMETRY]
        eventually(lambda: len(device.open_memories) == 1)
    finally:
        server.stop()


# Leases.


def leased(engine: Engine, keys: Sequence[bytes]) -> int:
    engine.store(keys)
    return engine.workers[0].find("r", keys)


def test_a_lease_ends_with_the_retrieve_of_the_last_rank(
    server: ServerThread, make_worker: Make, keys: list[bytes]
) -> None:
    engine = Engine(make_worker, "one", replicas=2)
    lease = leased(engine, keys)
    for rank in (3, 0, 3, 0, 1):
        assert retrieve(engine.workers[rank], "r", lease) is TransferStatus.OK
        assert (server.gauges()["leases"], server.gauges()["pins"]) == (1, CHUNKS)
    assert retrieve(engine.workers[2], "r", lease) is TransferStatus.OK
    assert (server.gauges()["leases"], server.gauges()["pins"]) == (0, 0)


def fails(server: ServerThread, worker: PageWorker, lease: int) -> None:
    server.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    assert retrieve(worker, "r", lease) is TransferStatus.COPY_FAILED


def is_refused(server: ServerThread, worker: PageWorker, lease: int) -> None:
    assert retrieve(worker, "r", lease, range(60, 68)) is TransferStatus.REFUSED


def is_cancelled(server: ServerThread, worker: PageWorker, lease: int) -> None:
    server.device.retrieves.close()
    begun = worker.begin_leased("r", lease, TARGET)
    server.device.retrieves.wait_until_held()
    worker.client.cancel(begun)
    server.device.retrieves.open()
    worker.wait(lambda: begun.is_acknowledged)


@pytest.mark.parametrize("ends", [fails, is_refused, is_cancelled])
def test_a_rank_whose_retrieve_does_not_end_well_is_done_with_the_lease(
    server: ServerThread, engine: Engine, keys: list[bytes], ends: Any
) -> None:
    lease = leased(engine, keys)
    ends(server, engine.workers[1], lease)
    assert (server.gauges()["leases"], server.gauges()["pins"]) == (1, CHUNKS)
    assert retrieve(engine.workers[0], "r", lease) is TransferStatus.OK
    assert (server.gauges()["leases"], server.gauges()["pins"]) == (0, 0)


@pytest.mark.parametrize("end", ["request", "lease", "time", "owner"])
def test_a_lease_that_a_rank_does_not_retrieve_ends_as_any(
    server: ServerThread, engine: Engine, keys: list[bytes], end: str
) -> None:
    lease = leased(engine, keys)
    retrieve(engine.workers[1], "r", lease)
    assert server.gauges()["leases"] == 1
    owner = engine.workers[0]
    if end == "request":
        owner.client.end_request("r")
    elif end == "lease":
        owner.client.end_lease(lease)
    elif end == "time":
        server.clock_s += server.settings.lease_ttl_s + 1
    else:
        owner.client.close()
    eventually(lambda: server.gauges()["leases"] == server.gauges()["pins"] == 0)
