"""What a transfer is called, by its engine or by the client: no two of a connection the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamina import protocol
from lamina.client import TransferStatus, UsageError
from lamina.errors import ErrorCode
from lamina_lab.known.content import ids, random_keys
from tests.support.misused import BLOCKS, ELSEWHERE, find, retrieve
from tests.support.played import KEY, Greeted, World
from tests.support.server import ServerThread
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker


@pytest.fixture
def played(world: World) -> Greeted:
    return world.serve()


def begin_store(world: World, number: int | None = None) -> Any:
    blocks, ticket = [ids(range(BLOCKS_PER_CHUNK))], world.client.write_ticket()
    return world.client.store(b"", [KEY], blocks, ticket, number)


def begin_retrieve(world: World, number: int | None = None) -> Any:
    return world.client.retrieve("r", 1, 0, [ids([0])], 1, None, number)


def test_the_client_counts_retrieves_and_stores_together(world: World, played: Greeted) -> None:
    begun = [begin(world) for begin in (begin_store, begin_retrieve, begin_store, begin_retrieve)]
    assert [transfer.number for transfer in begun] == [1, 2, 3, 4]


def test_a_number_that_the_engine_gives_is_on_the_wire(world: World, played: Greeted) -> None:
    store, begun = begin_store(world, 2**64 - 1), begin_retrieve(world, 0)
    assert (store.number, begun.number) == (2**64 - 1, 0)
    stored, retrieved = played.next(protocol.Store), played.next(protocol.Retrieve)
    assert (stored.transfer, retrieved.transfer) == (2**64 - 1, 0)
    world.client.cancel(begun)
    assert played.next(protocol.Cancel).transfer == 0


@pytest.mark.parametrize("first", [begin_store, begin_retrieve])
@pytest.mark.parametrize("second", [begin_store, begin_retrieve])
def test_a_number_in_use_is_refused_before_anything_is_sent(
    world: World, played: Greeted, first: Callable[..., Any], second: Callable[..., Any]
) -> None:
    assert first(world, 7).number == 7
    played.expect(protocol.Store if first is begin_store else protocol.Retrieve)
    with pytest.raises(UsageError, match="the number 7 is that of a transfer"):
        second(world, 7)
    assert world.client.transfers_in_flight == 1
    assert played.has_been_sent_nothing()


def test_a_number_is_free_again_once_its_transfer_is_answered(
    world: World, played: Greeted
) -> None:
    begin_store(world, 7)
    played.reply(protocol.Stored(played.expect(protocol.Store), 0, 1, 0, 0))
    world.client.poll()
    begin_retrieve(world, 7)
    played.refuse(played.expect(protocol.Retrieve), ErrorCode.UNKNOWN_LEASE)
    world.client.poll()
    assert begin_store(world, 7).number == 7


def test_the_number_of_a_store_that_was_given_up_is_the_servers_until_it_answers(
    world: World, played: Greeted
) -> None:
    begin_store(world, 7)
    request_id = played.expect(protocol.Store)
    world.client.give_up_stores()
    assert world.client.transfers_in_flight == 0
    with pytest.raises(UsageError, match="which the server has not answered"):
        begin_store(world, 7)
    played.reply(protocol.Stored(request_id, TransferStatus.CANCELLED, 0, 0, 1))
    world.client.poll()
    assert begin_store(world, 7).number == 7


def test_the_client_passes_over_what_an_engine_has_given(world: World, played: Greeted) -> None:
    begin_store(world, 1)
    begin_retrieve(world, 3)
    assert [begin_store(world).number for _ in range(3)] == [2, 4, 5]


def test_a_new_connection_has_all_its_numbers(world: World, played: Greeted) -> None:
    begin_store(world, 7)
    played.close()
    world.client.poll()
    world.serve()
    assert begin_store(world, 7).number == 7


@pytest.mark.parametrize(
    ("number", "cause"),
    [(-1, "is negative"), ("7", "of type str"), (1.0, "of type float"), (2**64, "cannot be sent")],
)
def test_a_number_that_is_none(
    worker: PageWorker, is_unharmed: Callable[[], bool], number: Any, cause: str
) -> None:
    lease = find(worker)
    with pytest.raises(UsageError, match=cause):
        worker.client.retrieve("r", lease, 0, [ids(ELSEWHERE)], 1, number=number)
    ticket = worker.client.write_ticket()
    with pytest.raises(UsageError, match=cause):
        worker.client.store(b"", random_keys(2), [ids(BLOCKS)], ticket, number)
    assert not worker.client.transfers_in_flight
    assert retrieve(worker, lease, number=3).number == 3
    assert is_unharmed()


def test_the_retrieve_that_is_cancelled_is_the_one_of_that_number(
    server: ServerThread, worker: PageWorker, is_unharmed: Callable[[], bool]
) -> None:
    server.device.retrieves.close()
    wanted = {40: ids(range(40, 48)), 41: ids(range(48, 56))}
    begun = {
        number: worker.client.retrieve(str(number), find(worker, str(number)), 0, [blocks], 1,
                                       number=number)
        for number, blocks in wanted.items()
    }  # fmt: skip
    kept, given_up = begun[40], begun[41]
    assert kept is not None
    assert given_up is not None
    server.device.retrieves.wait_until_held()
    worker.client.cancel(given_up)

    def cancelled() -> dict[int, bool]:
        transfers = [s.transfers for s in server.server.sessions if s.transfers]
        return {n: bool(t.cancelled_as) for n, t in transfers[0].items()}

    assert server.after_reading(cancelled) == {40: False, 41: True}
    server.device.retrieves.open()
    worker.wait(lambda: kept.is_acknowledged and given_up.is_acknowledged)
    assert kept.outcome is TransferStatus.OK
    assert given_up.outcome is TransferStatus.CANCELLED
    assert is_unharmed()
