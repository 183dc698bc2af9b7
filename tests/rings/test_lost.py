"""Rings whose server is stopped, or lives on while its connection is lost, or dies."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.board import TransferStatus
from lamina.client import Gate, StepGates
from lamina.client.store import RingStore
from lamina_lab.known.content import random_keys
from tests.rings.ring_worker import CHUNKS, RingWorker, WaitingDevice, must_return, passed
from tests.support.fault_server import FaultServer
from tests.support.server import ServerThread
from tests.support.wait import eventually

Make = Callable[..., RingWorker]


@pytest.mark.parametrize("copied", [0, 1, 5, 7])
def test_a_server_goes_on_after_its_ring_is_used_again(
    fault_server: FaultServer, make_ring_worker: Make, copied: int
) -> None:
    """It was stopped in a copy, and fills records that nobody wants before those that follow."""
    worker = make_ring_worker()
    keys = worker.store_new(CHUNKS)
    leases = {number: worker.find(f"lease {number}", keys) for number in range(1, 7)}
    fault_server.call("retrieves.close")
    fault_server.call("retrieves.let_pass", copied)
    late = worker.begin_with(1, leases[1])
    fault_server.call("retrieves.wait_until_held")
    fault_server.send(signal.SIGSTOP)
    worker.clock.pass_deadlines()
    eventually(lambda: late.outcome is TransferStatus.TIMED_OUT)
    eventually(passed(late))
    worker.poison(worker.blocks_of(1))  # its pages are free
    others = {number: worker.begin_with(number, leases[number]) for number in range(2, 7)}
    fault_server.send(signal.SIGCONT)
    fault_server.call("retrieves.open")
    worker.wait(lambda: all(other.is_acknowledged for other in others.values()))
    for number, other in others.items():
        assert other.outcome is TransferStatus.OK
        worker.expect_chunks(keys, worker.blocks_of(number))
    worker.expect(worker.blocks_of(1), 0xA5, "a page that is free was written")
    worker.wait(lambda: late.is_acknowledged)


def lose_while_held(server: ServerThread, worker: RingWorker) -> None:
    """The server has taken up a new connection, and is not done with the old one."""
    worker.lose_connection()

    def is_welcomed() -> bool:
        worker.clock.now_s += 0.001
        worker.client.poll()
        return worker.client._link is not None and worker.client._link.is_welcomed

    eventually(is_welcomed)
    for _ in range(3):
        server.after_reading(lambda: None)
        worker.client.poll()


def test_a_connection_is_lost_in_a_retrieve(server: ServerThread, worker: RingWorker) -> None:
    """The old session may still write the ring: the new connection has misses until it is over."""
    keys = worker.store_new(CHUNKS)
    server.device.retrieves.close()
    retrieve = worker.begin(1, keys)
    server.device.retrieves.wait_until_held()
    lose_while_held(server, worker)
    assert retrieve.outcome is TransferStatus.SERVER_DIED
    eventually(lambda: retrieve.is_over)
    assert not worker.client.is_usable
    assert worker.client.lookup("miss", keys).result is not None
    assert server.gauges()["sessions"] == 1  # the new one, which has registered nothing
    assert worker.client._link is not None
    assert not worker.client._link._is_registering
    server.device.retrieves.open()
    worker.reconnect()
    worker.wait(lambda: retrieve.is_acknowledged)
    for number in (2, 3):
        worker.check(number, keys)


def test_a_connection_is_lost_in_a_store(server: ServerThread, worker: RingWorker) -> None:
    """It was gathered, its blocks are free, and the server copies it from a ring that is used
    again: nothing of what it copies then is found."""
    keys, later = random_keys(1), random_keys(1)
    server.device.stores.close()
    worker.compute(keys, worker.blocks_of(1)[:4])
    store = worker.begin_store(keys, worker.blocks_of(1)[:4])
    assert isinstance(store, RingStore)
    worker.wait(lambda: store.is_over)
    server.device.stores.let_pass(len(store.span.shapes) - 1)
    eventually(lambda: server.device.stores.passed == len(store.span.shapes) - 1)
    server.device.stores.wait_until_held()
    lose_while_held(server, worker)
    assert store.is_settled
    if worker.client.is_usable:  # then the ring is the new connection's
        worker.compute(later, worker.blocks_of(2)[:4])
        again = worker.begin_store(later, worker.blocks_of(2)[:4])
        worker.wait(lambda: again.is_over)
    server.device.stores.open()
    worker.reconnect()
    eventually(lambda: server.gauges()["queued_transfers"] == 0)
    assert server.gauges()["arena_reserved_bytes"] == 0
    for name in (keys, later):
        found = worker.client.lookup("found", name).wait(20)
        assert found is not None
        if found.chunks:
            worker.check_hit("hit", name, worker.blocks_of(3)[:4])
    worker.check(4, worker.store_new(CHUNKS))


def test_a_server_dies_in_a_retrieve_and_in_a_store(
    fault_server: FaultServer, make_ring_worker: Make, socket_path: Path
) -> None:
    """All waits end, and another server is used."""
    device = WaitingDevice()
    worker = make_ring_worker(device=device)
    keys = worker.store_new(CHUNKS)
    fault_server.call("retrieves.close")
    fault_server.call("retrieves.let_pass", 3)
    fault_server.call("stores.close")
    retrieves = [worker.begin(number, keys) for number in (1, 2, 3)]
    gates = StepGates(device, [Gate(retrieve, 1) for retrieve in retrieves])
    gates.before_all()
    stores = [worker.begin_store(random_keys(CHUNKS), worker.blocks_of(n)) for n in (4, 5, 6)]
    fault_server.call("retrieves.wait_until_held")
    fault_server.call("stores.wait_until_held")
    fault_server.kill()
    eventually(lambda: device.may_go_on)  # without a poll
    assert gates.settle() == retrieves
    assert {retrieve.outcome for retrieve in retrieves} == {TransferStatus.SERVER_DIED}
    worker.wait(lambda: not worker.client.transfers_in_flight)
    assert all(store.is_over and store.is_settled for store in stores)
    other = FaultServer(socket_path)
    try:
        worker.reconnect()
        device.waits.clear()
        for number in (1, 2, 3):
            worker.check(number, worker.store_new(CHUNKS))
        worker.client.close()
    finally:
        other.kill()


def test_a_client_closes_while_its_server_is_stopped(
    fault_server: FaultServer, make_ring_worker: Make
) -> None:
    """Its rings stay where they are: the server goes on, and may write there once more."""
    worker = make_ring_worker()
    keys = worker.store_new(CHUNKS)
    fault_server.call("retrieves.close")
    retrieve = worker.begin(1, keys)
    fault_server.call("retrieves.wait_until_held")
    fault_server.send(signal.SIGSTOP)
    address = load_ring_address(worker)
    must_return(worker.client.close)
    assert retrieve.outcome is TransferStatus.SERVER_DIED
    worker.client._memory = None
    gc.collect()
    assert is_mapped(address)
    fault_server.send(signal.SIGCONT)
    fault_server.call("retrieves.open")


def load_ring_address(worker: RingWorker) -> int:
    """Of its retrieve ring, without keeping it."""
    return int(worker.rings.retrieves.ctypes.data)


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    extents = [line.split()[0].split("-") for line in lines]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in extents)
