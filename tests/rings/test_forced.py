"""Retrieves that are given up while the engine's own device has not passed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lamina.board import Board, TransferStatus, reached
from lamina.client import Gate, StepGates
from lamina.client.retrieve import RingRetrieve
from lamina.errors import DeviceError
from lamina.geometry import BlockIds
from lamina.records import Span
from lamina_lab.known.content import ids
from tests.rings.ring_worker import (
    CHUNKS,
    COMMANDS_A_RECORD,
    RECORDS,
    RingWorker,
    WaitingDevice,
    must_return,
    passed,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually

Make = Callable[..., RingWorker]


def test_a_step_waits_until_a_forced_retrieve_is_passed(
    server: ServerThread, make_ring_worker: Make
) -> None:
    """A count that is forced ends the wait of the place stream, not that of the compute stream."""
    device = WaitingDevice()
    worker = make_ring_worker(device=device)
    keys = worker.store_new(CHUNKS)
    server.device.retrieves.close()
    worker.rings.place_stream.hold()
    retrieve = worker.begin(1, keys)
    StepGates(device, [Gate(retrieve, 1)]).before_layer(0)
    retrieve.force(TransferStatus.TIMED_OUT)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert not device.may_go_on
    worker.rings.place_stream.step(COMMANDS_A_RECORD - 1)
    eventually(lambda: worker.rings.place_stream.enqueued == RECORDS * COMMANDS_A_RECORD - 2)
    assert not device.may_go_on  # its bytes are on their way into pages
    worker.rings.place_stream.step()
    eventually(lambda: device.may_go_on)
    server.device.retrieves.open()


def test_pages_are_free_when_passed_and_the_slot_when_answered_too(
    server: ServerThread, worker: RingWorker
) -> None:
    keys = worker.store_new(CHUNKS)
    server.device.retrieves.close()
    worker.rings.place_stream.hold()
    retrieve = worker.begin(1, keys)
    worker.clock.pass_deadlines()
    eventually(lambda: retrieve.outcome is TransferStatus.TIMED_OUT)
    assert not retrieve.is_over
    assert worker.client.quarantined == 1
    worker.rings.place_stream.step(RECORDS * COMMANDS_A_RECORD - 1)
    eventually(lambda: worker.rings.place_stream.enqueued == 1)
    assert not retrieve.is_over
    worker.rings.place_stream.go_on()
    eventually(passed(retrieve))
    assert retrieve.is_over
    assert worker.client.quarantined == 0
    worker.client.poll()
    assert not retrieve.is_acknowledged
    assert worker.client.transfers_in_flight == 1
    server.device.retrieves.open()
    worker.wait(lambda: retrieve.is_acknowledged)
    worker.check(2, keys)


def test_a_retrieve_that_is_answered_keeps_its_slot_until_it_is_passed(
    server: ServerThread, worker: RingWorker
) -> None:
    keys = worker.store_new(CHUNKS)
    worker.rings.place_stream.hold()
    retrieve = worker.begin(1, keys)
    worker.client.cancel(retrieve)
    worker.wait(lambda: retrieve.answered)
    assert retrieve.outcome is TransferStatus.CANCELLED, "as the server says at once"
    assert not retrieve.is_over
    assert worker.begin(2, keys).slot != retrieve.slot
    worker.rings.place_stream.go_on()
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.CANCELLED
    worker.check(3, keys)


def test_to_cancel_what_is_answered_does_not_cancel_another(
    server: ServerThread, worker: RingWorker
) -> None:
    """Its number may be used again before it is passed."""
    keys = worker.store_new(1)
    leases = [worker.find(name, keys) for name in ("first", "second")]
    blocks = [[ids(worker.blocks_of(number)[:4])] for number in (1, 2)]
    worker.rings.place_stream.hold()
    first = worker.client.retrieve("first", leases[0], 0, blocks[0], 1, number=7)
    assert isinstance(first, RingRetrieve)
    worker.wait(lambda: first.answered)
    server.device.retrieves.close()
    second = worker.client.retrieve("second", leases[1], 0, blocks[1], 1, number=7)
    assert second is not None
    server.device.retrieves.wait_until_held()
    worker.client.cancel(first)
    server.after_reading(lambda: None)
    server.device.retrieves.open()
    worker.rings.place_stream.go_on()
    worker.wait(lambda: second.is_acknowledged)
    assert second.outcome is TransferStatus.OK


def test_a_retrieve_that_landed_is_not_forced_while_it_is_placed(
    server: ServerThread, worker: RingWorker
) -> None:
    """Its records are all in the ring: it is right, however late the engine's device is."""
    keys = worker.store_new(1)
    worker.rings.place_stream.hold()
    retrieve = worker.begin_retrieve("late", keys, worker.blocks_of(1)[:4])
    worker.wait(lambda: reached(retrieve.board.landed(retrieve.slot), retrieve.final_count))
    worker.clock.pass_deadlines()
    retrieve.force(TransferStatus.TIMED_OUT)
    assert retrieve.outcome is None
    worker.rings.place_stream.go_on()
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.OK
    worker.expect_chunks(keys, worker.blocks_of(1)[:4])


def test_pages_are_written_after_what_is_enqueued_before(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier work may still write them: a retrieve with its ticket is placed behind it."""
    keys = worker.store_new(1)
    is_over: list[bool] = []
    monkeypatch.setattr(worker.space.device, "event", lambda stream=None: lambda: bool(is_over))
    lease, blocks = worker.find("late writer", keys), worker.blocks_of(1)[:4]
    ticket = worker.client.write_ticket()
    retrieve = worker.client.retrieve("late writer", lease, 0, [ids(blocks)], 1, ticket)
    assert retrieve is not None
    worker.wait(lambda: reached(retrieve.board.landed(retrieve.slot), retrieve.final_count))
    assert retrieve.landed_slices == 0
    worker.poison(blocks)
    is_over.append(True)
    worker.wait(lambda: retrieve.is_acknowledged)
    worker.expect_chunks(keys, blocks)


def test_a_message_that_is_not_sent_fails_its_retrieve(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device waits for nothing that the server has not been asked for."""
    keys = worker.store_new(CHUNKS)
    lease = worker.find("unsent", keys)
    with monkeypatch.context() as patch:
        patch.setattr(worker.connection, "_flush", lambda: None)
        retrieve = worker.begin_with(1, lease)
        assert retrieve.outcome is TransferStatus.TIMED_OUT
        eventually(passed(retrieve))
        assert not retrieve.is_acknowledged
    worker.check(2, keys)
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.TIMED_OUT


@pytest.mark.parametrize("placed", [0, 1, 3])
@pytest.mark.parametrize("landed", [False, True], ids=["before it lands", "after it has landed"])
def test_a_retrieve_that_cannot_be_placed_fails(
    server: ServerThread,
    worker: RingWorker,
    monkeypatch: pytest.MonkeyPatch,
    placed: int,
    landed: bool,
) -> None:
    """Whatever the server does meanwhile: what is not in the pages is not OK."""
    keys = worker.store_new(2)  # four records, which all fit into the ring
    place = worker.rings.place

    def half(board: Board, slot: int, base: int, span: Span, *others: Any) -> None:
        part = Span(span.first_number, span.shapes[:placed], span.positions[:placed])
        place(board, slot, base, part, *others)
        count = base + len(span.shapes)
        eventually(lambda: not landed or reached(board.landed(slot), count))
        raise DeviceError("the launch failed", "Mend it")

    lease = worker.find("half", keys)
    blocks = worker.blocks_of(1)[:8]
    worker.poison(blocks)
    if not landed:
        server.device.retrieves.close()
    with monkeypatch.context() as patch:
        patch.setattr(worker.rings, "place", half)
        retrieve = worker.begin_leased("half", lease, blocks)
    assert retrieve.outcome is TransferStatus.COPY_FAILED
    server.device.retrieves.open()
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.COPY_FAILED
    worker.check_hit("again", keys, worker.blocks_of(2)[:8])


def test_a_device_that_blocks_in_its_calls_is_freed_at_the_deadline(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches block where many are enqueued: the watchdog knows of the retrieve by then."""
    keys = worker.store_new(CHUNKS)
    place = worker.rings.place

    def blocking(
        board: Board, slot: int, base: int, span: Span, ids: Sequence[BlockIds], after: Any = None
    ) -> None:
        place(board, slot, base, span, ids, after)
        worker.clock.pass_deadlines()
        worker.rings.place_stream.synchronize()

    lease = worker.find("blocking", keys)
    server.device.retrieves.close()
    with monkeypatch.context() as patch:
        patch.setattr(worker.rings, "place", blocking)
        must_return(lambda: worker.begin_with(1, lease))
    server.device.retrieves.open()
    worker.wait(lambda: not worker.client.transfers_in_flight)
    worker.check(2, keys)


def test_a_client_closes_with_retrieves_in_flight(server: ServerThread, worker: RingWorker) -> None:
    keys = worker.store_new(CHUNKS)
    server.device.retrieves.close()
    retrieves = [worker.begin(number, keys) for number in (1, 2, 3)]
    server.device.retrieves.wait_until_held()
    must_return(worker.close)
    assert all(retrieve.is_over for retrieve in retrieves)
    assert {retrieve.outcome for retrieve in retrieves} == {TransferStatus.SERVER_DIED}


def test_a_client_closes_though_its_server_writes_once_more(
    server: ServerThread, worker: RingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count that was forced is lowered by a server that is stopped right then."""
    keys = worker.store_new(CHUNKS)
    server.device.retrieves.close()
    worker.rings.place_stream.hold()
    retrieve = worker.begin(1, keys)
    server.device.retrieves.wait_until_held()
    close = worker.connection.close

    def close_and_write() -> None:
        close()
        retrieve.board.announce(retrieve.slot, retrieve.base)
        worker.rings.place_stream.go_on()

    monkeypatch.setattr(worker.connection, "close", close_and_write)
    must_return(worker.client.close)
    assert retrieve.is_over
