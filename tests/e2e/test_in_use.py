"""What transfers of one connection may not have in common: numbers, and retrieves their slots."""

from __future__ import annotations

import pytest

from lamina import protocol
from lamina.errors import ErrorCode
from lamina_lab.known.content import ids, random_keys
from tests.e2e.strangers import Bystander, Pages, Stranger, assert_refused, lease_of, retrieve


def test_a_slot_or_a_number_that_is_in_use(
    bystander: Bystander, worker_guest: Stranger, pages: Pages
) -> None:
    lease = lease_of(worker_guest, bystander)
    bystander.server.device.retrieves.close()
    first = retrieve(lease, id=20, slot=3)
    worker_guest.send(first)
    bystander.server.device.retrieves.wait_until_held()
    reply = worker_guest.ask(retrieve(lease, id=21, slot=3))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "slot 3 belongs to a transfer in flight")
    again = retrieve(lease_of(worker_guest, bystander), id=22, slot=4, transfer=first.transfer)
    used = f"transfer number {first.transfer} is in use"
    assert_refused(worker_guest.ask(again), ErrorCode.BAD_REQUEST, used)
    blocks = (protocol.pack_block_ids(ids(range(4))),)
    store = protocol.Store(23, first.transfer, b"", tuple(random_keys(1)), blocks, 0)
    assert_refused(worker_guest.ask(store), ErrorCode.BAD_REQUEST, used)
    bystander.server.device.retrieves.open()
    done = worker_guest.receive()
    assert isinstance(done, protocol.Retrieved)
    assert (done.id, done.status) == (20, 0)
    assert worker_guest.board.landed(3) == 4
    stored = worker_guest.ask(store)
    assert isinstance(stored, protocol.Stored), "the number is free again"
    assert stored.stored == 1


@pytest.mark.parametrize("number", [-1, -(2**63)])
def test_a_store_whose_number_is_negative(
    bystander: Bystander, worker_guest: Stranger, number: int
) -> None:
    blocks = (protocol.pack_block_ids(ids(range(4))),)
    reply = worker_guest.ask(protocol.Store(20, number, b"", tuple(random_keys(1)), blocks, 0))
    assert_refused(reply, ErrorCode.BAD_REQUEST, f"{number} is negative")
    assert bystander.server.gauges()["chunks"] == 2


def test_retrieves_and_stores_share_one_space_of_numbers(
    bystander: Bystander, worker_guest: Stranger
) -> None:
    """And the largest there is names one of them as well."""
    number = 2**64 - 1
    bystander.server.device.stores.close()
    blocks = (protocol.pack_block_ids(ids(range(4))),)
    worker_guest.send(protocol.Store(20, number, b"", tuple(random_keys(1)), blocks, 0))
    bystander.server.device.stores.wait_until_held()
    reply = worker_guest.ask(retrieve(lease_of(worker_guest, bystander), id=21, transfer=number))
    assert_refused(reply, ErrorCode.BAD_REQUEST, f"{number} is in use")
    assert bystander.server.gauges()["leases"] == 0
    bystander.server.device.stores.open()
    stored = worker_guest.receive()
    assert isinstance(stored, protocol.Stored)
    assert stored.id == 20
