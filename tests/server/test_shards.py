"""Engines of several workers, each of which keeps a shard of every chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina.board import Board, TransferStatus
from lamina.client import Store
from lamina.devices.base import EngineMemory
from lamina.devices.host import HostMemory, HostServerDevice, HostWorkerDevice
from lamina.errors import DeviceError, ErrorCode, RequestRefusedError
from lamina.geometry import Geometry, Group
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.server import limits
from lamina.shards import ChunkLayout, Shard
from lamina_lab.known.content import equal_layers, random_keys
from lamina_lab.known.stream import StreamDevice
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

CHUNKS = 4
GEOMETRIES = (equal_layers(3), equal_layers(2, 256), equal_layers(4), equal_layers(1, 1024))
"""Of shards 0 to 3."""
SOURCE, TARGET = range(CHUNKS * BLOCKS_PER_CHUNK), range(32, 32 + CHUNKS * BLOCKS_PER_CHUNK)
Make = Callable[..., PageWorker]


class Engine:
    """Its workers, in the order of their ranks."""

    def __init__(
        self,
        make: Make,
        name: str,
        shards: int = 2,
        replicas: int = 1,
        ranks: Sequence[Shard] = (),
        **options: Any,
    ) -> None:
        self._make = make
        self._options = {"device": StreamDevice(), "data_path": "direct", **options}
        self.name = name
        self.ranks = ranks or [
            Shard(n, shards, r, replicas) for n in range(shards) for r in range(replicas)
        ]
        self.workers = [self.worker(shard) for shard in self.ranks]
        self.requests = 0

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(GEOMETRIES[: self.ranks[0].shards])

    def worker(self, shard: Shard) -> PageWorker:
        geometry = GEOMETRIES[shard.number]
        return self._make(geometry=geometry, engine=self.name, shard=shard, **self._options)

    def store(self, keys: Sequence[bytes], *ranks: int) -> list[Store]:
        """By these ranks, or by all, one after the other."""
        return [store(self.workers[rank], keys) for rank in ranks or range(len(self.ranks))]

    def found(self, keys: Sequence[bytes]) -> int:
        """How many of the chunks are found; every rank retrieves them, and looks at each byte."""
        self.requests += 1
        request = f"{self.name} {self.requests}"
        found = self.workers[0].client.lookup(request, keys).wait(20)
        assert found is not None
        blocks = TARGET[: found.chunks * BLOCKS_PER_CHUNK]
        for worker in self.workers if found.chunks else ():
            worker.poison(blocks)
            assert retrieve(worker, request, found.lease, blocks) is TransferStatus.OK
            worker.expect_chunks(keys[: found.chunks], blocks)
        return found.chunks


def begin(
    worker: PageWorker, keys: Sequence[bytes], parent: bytes = b"", *, is_computed: bool = True
) -> Store:
    blocks = SOURCE[: len(keys) * BLOCKS_PER_CHUNK]
    worker.compute(keys, blocks)
    begun = worker.begin_store(keys, blocks, parent)
    if is_computed and isinstance(worker.space.device, StreamDevice):
        worker.space.device.compute()
    return begun


def store(worker: PageWorker, keys: Sequence[bytes], parent: bytes = b"") -> Store:
    """Ended or given up."""
    begun = begin(worker, keys, parent)
    worker.wait(lambda: begun.is_over and begun.is_settled)
    return begun


def wait_for_end(worker: PageWorker, begun: Store) -> None:
    worker.wait(lambda: begun.ended is not None)


def retrieve(
    worker: PageWorker, request: str, lease: int, blocks: Sequence[int] = TARGET
) -> TransferStatus | None:
    """How it has ended."""
    begun = worker.begin_leased(request, lease, blocks)
    worker.wait(lambda: begun.is_acknowledged)
    return begun.outcome


def counts(begun: Store) -> tuple[int, int, int]:
    assert begun.ended is not None
    return begun.ended.stored, begun.ended.present, begun.ended.dropped


def check_all_comes_back(server: ServerThread) -> None:
    """Nothing is pinned, leased or reserved, and a cleared arena is free to the last byte."""
    eventually(lambda: not any(server.gauges()[n] for n in ("pins", "arena_reserved_bytes")))
    assert server.gauges()["leases"] == 0

    def clear() -> None:
        for _ in server.server.index.clear():
            pass

    server.on_loop(clear)
    gauges = server.gauges()
    assert (gauges["chunks"], gauges["arena_free_bytes"]) == (0, gauges["arena_capacity_bytes"])


@pytest.fixture
def keys() -> list[bytes]:
    return random_keys(CHUNKS)


@pytest.fixture
def engine(server: ServerThread, make_worker: Make) -> Engine:
    """Of two shards, connected."""
    return Engine(make_worker, "one")


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
