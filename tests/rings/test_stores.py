"""Stores through a ring: whole or absent, whatever is given up or refused, and never a stall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamina.board import GATHERED, TransferStatus, reached
from lamina.client.store import RingStore, Store
from lamina.errors import DeviceError
from lamina_lab.known.content import ids, random_keys
from tests.rings.ring_worker import BLOCKS, CHUNKS, RingWorker
from tests.support.server import ServerThread
from tests.support.wait import eventually

Make = Callable[..., RingWorker]


def begin(worker: RingWorker, number: int, keys: list[bytes], parent: bytes = b"") -> RingStore:
    """Compute chunks in blocks of their own, and begin to store them."""
    blocks = worker.blocks_of(number)[: len(keys) * BLOCKS // CHUNKS]
    worker.compute(keys, blocks)
    store = worker.begin_store(keys, blocks, parent)
    assert isinstance(store, RingStore)
    return store


def found(worker: RingWorker, keys: list[bytes]) -> int:
    result = worker.client.lookup("found", keys).wait(20)
    assert result is not None
    worker.client.end_lease(result.lease)
    return result.chunks


def give_up(worker: RingWorker, store: Store) -> None:
    """Its blocks are free at once, and used for something else."""
    worker.client.give_up_stores()
    assert store.is_over
    assert store.given_up
    worker.poison(worker.blocks_of(1))


def check_all_goes_on(server: ServerThread, worker: RingWorker) -> None:
    """Later stores are right, more of them than the ring has room for."""
    worker.let_streams_go()
    server.device.stores.open()
    stored = [(number, random_keys(CHUNKS)) for number in range(2, 6)]
    stores = [begin(worker, number, keys) for number, keys in stored]
    worker.wait(lambda: all(store.is_over and store.is_settled for store in stores))
    assert [store.ended and store.ended.stored for store in stores] == [CHUNKS] * 4
    for number, keys in stored:
        worker.check(number, keys)
    eventually(lambda: server.gauges()["queued_transfers"] == 0)
    assert server.gauges()["arena_reserved_bytes"] == 0


@pytest.mark.parametrize("gathered", [0, 1, 3])
def test_a_store_is_given_up_before_it_is_gathered(
    server: ServerThread, worker: RingWorker, gathered: int
) -> None:
    keys = random_keys(CHUNKS)
    worker.rings.gather_stream.hold()
    store = begin(worker, 1, keys)
    worker.rings.gather_stream.step(2 * gathered)
    eventually(lambda: reached(worker.client._link.board.landed(GATHERED), gathered))  # type: ignore[union-attr]
    give_up(worker, store)
    check_all_goes_on(server, worker)
    assert found(worker, keys) == 0


@pytest.mark.parametrize("copied", [0, 1, 3])
def test_a_store_is_given_up_before_it_is_copied(
    server: ServerThread, worker: RingWorker, copied: int
) -> None:
    keys = random_keys(CHUNKS)
    server.device.stores.close()
    server.device.stores.let_pass(copied)
    store = begin(worker, 1, keys)
    server.device.stores.wait_until_held()
    give_up(worker, store)
    check_all_goes_on(server, worker)
    assert found(worker, keys) == 0


def test_a_store_is_given_up_before_it_is_committed(
    server: ServerThread, worker: RingWorker
) -> None:
    """Its engine has not seen yet that it is gathered."""
    keys = random_keys(1)  # a ring's
    server.device.stores.hold_ends()
    store = begin(worker, 1, keys)
    server.device.stores.wait_until_ending()
    give_up(worker, store)
    check_all_goes_on(server, worker)
    assert found(worker, keys) == 0
    assert server.totals()["stores_void"] == 1


def test_blocks_are_free_once_they_are_gathered(server: ServerThread, worker: RingWorker) -> None:
    """The server copies from the ring later, and what it finds there is right."""
    keys = random_keys(1)
    server.device.stores.close()
    store = begin(worker, 1, keys)
    worker.wait(lambda: store.is_over)
    assert not store.is_settled
    worker.poison(worker.blocks_of(1))
    server.device.stores.open()
    worker.wait(lambda: store.is_settled)
    worker.check_hit("hit", keys, worker.blocks_of(2)[:4])


def test_refused_stores_do_not_stall_the_ring(server: ServerThread, worker: RingWorker) -> None:
    """Their records were numbered, and are not the server's."""
    twice = random_keys(1) * CHUNKS
    stores = [begin(worker, 1, twice) for _ in range(3)]
    worker.wait(lambda: all(store.is_over and store.is_settled for store in stores))
    assert all(store.refusal is not None for store in stores)
    check_all_goes_on(server, worker)


@pytest.mark.parametrize("parent", [b"", bytes(32)], ids=["present", "dropped"])
def test_stores_of_nothing_do_not_stall_the_ring(
    server: ServerThread, worker: RingWorker, parent: bytes
) -> None:
    keys = random_keys(CHUNKS) if parent else worker.store_new(CHUNKS)
    stores = [begin(worker, 1, keys, parent) for _ in range(3)]
    worker.wait(lambda: all(store.is_over and store.is_settled for store in stores))
    for store in stores:
        assert store.ended is not None
        assert store.ended.stored == 0
        assert (store.ended.dropped if parent else store.ended.present) == CHUNKS
    check_all_goes_on(server, worker)


def test_more_stores_than_the_ring_has_room_for_all_end(
    server: ServerThread, worker: RingWorker
) -> None:
    """None is gathered over what the server has not copied yet."""
    all_keys = [random_keys(CHUNKS) for _ in range(12)]
    server.device.stores.close()
    stores = [begin(worker, number, keys) for number, keys in enumerate(all_keys)]
    server.device.stores.wait_until_held()
    for _ in range(3):
        worker.client.poll()
    worker.rings.gather_stream.synchronize()
    assert sum(store.enqueued for store in stores) <= 4  # a ring's
    server.device.stores.open()
    worker.wait(lambda: all(store.is_over and store.is_settled for store in stores))
    for number, keys in enumerate(all_keys):
        worker.check(number, keys)


def test_block_ids_may_change_once_the_call_is_made(
    server: ServerThread, worker: RingWorker
) -> None:
    """An engine uses its arrays again, as it may where they are sent at once."""
    keys = random_keys(CHUNKS)
    blocks = ids(worker.blocks_of(1))
    worker.compute(keys, blocks)
    worker.rings.gather_stream.hold()
    store = worker.client.store(b"", keys, [blocks], worker.client.write_ticket())
    assert store is not None
    blocks[:] = ids(worker.blocks_of(2))
    worker.rings.gather_stream.go_on()
    worker.wait(lambda: store.is_over and store.is_settled)
    worker.check(3, keys)


def test_a_store_whose_pages_are_computed_late_is_gathered_late(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is enqueued before its ticket comes first."""
    is_computed: list[bool] = []
    monkeypatch.setattr(worker.space.device, "event", lambda stream=None: lambda: bool(is_computed))
    keys = random_keys(CHUNKS)
    store = worker.begin_store(keys, worker.blocks_of(1))
    assert not reached(worker.client._link.board.landed(GATHERED), 1)  # type: ignore[union-attr]
    worker.compute(keys, worker.blocks_of(1))
    is_computed.append(True)
    worker.wait(lambda: store.is_over and store.is_settled)
    worker.check(2, keys)


@pytest.mark.parametrize("before", [0, 1])
def test_a_store_that_cannot_be_gathered_is_given_up(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A cache, not a dependency: no call of the engine fails for it."""
    keys, gather = random_keys(CHUNKS), worker.rings.gather
    calls: list[None] = []

    def failing(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) > before:
            raise DeviceError("the launch failed", "Mend it")
        gather(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(worker.rings, "gather", failing)
        store = begin(worker, 1, keys)
        worker.wait(lambda: store.is_over)
        assert store.given_up
    worker.wait(lambda: store.ended is not None)
    assert store.ended is not None
    assert store.ended.status == TransferStatus.CANCELLED
    check_all_goes_on(server, worker)
    assert found(worker, keys) == 0
