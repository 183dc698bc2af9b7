"""Transfers of one connection, against a server that the test plays on a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.client import Retrieve
from lamina.client.connection import Connection
from lamina.client.notices import Notices
from lamina.client.store import Store, Ticket
from lamina.client.transfers import Transfers
from lamina.errors import ErrorCode, GeometryError
from lamina.frames import FrameBuffer
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina_lab.known.content import ids

LAYERS = 4
DEADLINE_S = 1e9
KEY = bytes(32)


class DyingConnection(Connection):
    """A connection to a server that dies when the test says so."""

    server_is_dead = False

    def is_server_dead(self) -> bool:
        return self.server_is_dead


class World:
    """A client's transfers and, at the other end of the socket, the test as their server."""

    def __init__(self, path: Path, slots: int) -> None:
        path.parent.mkdir(0o700)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(os.fspath(path))
        self._listening.listen(1)
        self.board = Board.create(slots)
        self.connection = DyingConnection(path, self.board)
        self.server, _ = self._listening.accept()
        self.server.settimeout(20)
        self._frames = FrameBuffer()
        preface, fds, _, _ = socket.recv_fds(self.server, protocol.PREFACE_BYTES, 1)
        assert preface == protocol.preface()
        self.servers_board = Board.attach(fds[0])
        geometry = Geometry(64, (Group(16),), tuple(Layer(str(i), 0, 1, 8) for i in range(LAYERS)))
        notices = Notices("test")
        page_map = PageMap((8,), tuple((PlanePages(i, 0, 8),) for i in range(LAYERS)))
        self.transfers = Transfers(self.connection, self.board, geometry, page_map, notices)
        self.ids: dict[Retrieve, int] = {}
        """Of the requests that began them; other than their numbers."""
        self.connection.call(protocol.Ping, lambda _: None)
        assert isinstance(self.next_request(), protocol.Ping)

    def begin(self, width: int = 1, **changes: Any) -> Retrieve:
        options: dict[str, Any] = {
            "request": "r",
            "lease": 3,
            "start_tokens": 0,
            "block_ids": [ids([5, 6])],
            "layers_per_slice": width,
            "ticket": None,
            "deadline_s": DEADLINE_S,
        }
        retrieve = self.transfers.retrieve(**{**options, **changes})
        self.ids[retrieve] = self.connection._number
        return retrieve

    def store(self, number: int | None = None) -> Store:
        ticket = Ticket(self.transfers.next_ticket(), self.board)
        return self.transfers.store(b"", [KEY], [ids([0, 1, 2, 3])], ticket, DEADLINE_S, number)

    def next_request(self) -> protocol.Request:
        """The next that the client has sent."""
        (body,) = self._frames.feed(self._next_frame())
        return protocol.decode_request(body)

    def _next_frame(self) -> bytes:
        header = self.server.recv(protocol.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        return header + self.server.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)

    def sent_nothing_more(self) -> bool:
        self.server.setblocking(False)
        try:
            return not self.server.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.server.settimeout(20)

    def reply(self, reply: protocol.Message) -> None:
        """Answer, and let the client read it."""
        self.server.sendall(protocol.encode(reply))
        self.connection.pump()

    def land(self, retrieve: Retrieve, slices: int | None = None) -> None:
        count = len(retrieve.slices) if slices is None else slices
        self.servers_board.announce(retrieve.slot, retrieve.base + count)

    def acknowledge(self, retrieve: Retrieve, status: int = 0) -> None:
        self.reply(protocol.Retrieved(self.ids[retrieve], status, 10, 1, 2))

    def finish(self, retrieve: Retrieve) -> None:
        self.land(retrieve)
        self.acknowledge(retrieve)

    def hang_up(self) -> None:
        """The server closes the connection; its process lives."""
        self.server.close()
        self.connection.pump()
        assert self.connection.is_lost

    def close(self) -> None:
        self.connection.close()
        self.connection.server.close()
        self.server.close()
        self._listening.close()
        self.board.close()
        self.servers_board.close()


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    world = World(socket_path, slots=2)
    yield world
    world.close()


@pytest.fixture
def one_slot(socket_path: Path) -> Iterator[World]:
    world = World(socket_path, slots=1)
    yield world
    world.close()


def test_a_retrieve_asks_for_what_it_was_given(world: World) -> None:
    blocks = [np.array([7, -1, 2**31 - 1], np.int32)]
    ticket = Ticket(2**32 - 1, world.board)
    retrieve = world.begin(
        width=3, lease=41, start_tokens=128, block_ids=blocks, ticket=ticket, request="q"
    )
    assert world.next_request() == protocol.Retrieve(
        world.ids[retrieve],
        retrieve.number,
        41,
        128,
        tuple(protocol.pack_block_ids(group) for group in blocks),
        retrieve.slot,
        retrieve.base,
        3,
        2**32 - 1,
    )
    assert retrieve.request == "q"
    assert [(part.first_layer, part.end_layer) for part in retrieve.slices] == [(0, 3), (3, 4)]


def test_a_store_asks_for_what_it_was_given(world: World) -> None:
    keys = [bytes([n]) * 32 for n in range(2)]
    ticket = Ticket(6, world.board)
    store = world.transfers.store(KEY, keys, [ids(list(range(8)))], ticket, DEADLINE_S)
    request = world.next_request()
    packed = (protocol.pack_block_ids(ids(list(range(8)))),)
    assert request == protocol.Store(request.id, store.number, KEY, tuple(keys), packed, 6)
    assert request.id != store.number
    assert (store.chunks, store.ticket, store.deadline_s) == (2, 6, DEADLINE_S)


def test_a_retrieve_goes_from_in_flight_to_landed_to_acknowledged(world: World) -> None:
    retrieve = world.begin()
    for landed in range(LAYERS):
        world.land(retrieve, landed)
        assert retrieve.landed_slices == landed
        assert retrieve.outcome is None
        assert not retrieve.is_over
    world.land(retrieve)
    assert retrieve.landed_slices == LAYERS
    assert retrieve.outcome is TransferStatus.OK
    assert retrieve.is_over, "all bytes are in: nothing more will be written"
    assert not retrieve.is_acknowledged, "the slot is not free yet"
    assert not world.transfers.is_idle
    world.acknowledge(retrieve)
    assert retrieve.is_acknowledged
    assert retrieve.ended == protocol.Retrieved(world.ids[retrieve], 0, 10, 1, 2)
    assert world.transfers.is_idle


def test_a_slot_is_free_again_only_when_its_retrieve_is_acknowledged(one_slot: World) -> None:
    world = one_slot
    retrieve = world.begin()
    assert not world.transfers.has_free_slot
    world.land(retrieve)
    assert retrieve.outcome is TransferStatus.OK
    assert not world.transfers.has_free_slot
    world.acknowledge(retrieve)
    assert world.transfers.has_free_slot


def test_every_slot_of_the_board_can_be_in_flight_at_once(world: World) -> None:
    retrieves = [world.begin(), world.begin()]
    assert {retrieve.slot for retrieve in retrieves} == {0, 1}
    assert not world.transfers.has_free_slot
    assert set(world.transfers.retrieves.values()) == set(retrieves)


@pytest.mark.parametrize("outcome_was_read", [False, True])
def test_the_outcome_of_a_landed_retrieve_survives_its_slots_reuse(
    one_slot: World, outcome_was_read: bool
) -> None:
    first = one_slot.begin()
    one_slot.land(first)
    assert not outcome_was_read or first.outcome is TransferStatus.OK
    one_slot.acknowledge(first)
    second = one_slot.begin()
    assert second.slot == first.slot
    assert first.outcome is TransferStatus.OK
    one_slot.servers_board.fail(
        second.slot, TransferStatus.COPY_FAILED, second.base + len(second.slices)
    )
    assert first.outcome is TransferStatus.OK
    assert second.outcome is TransferStatus.COPY_FAILED
    assert first.is_over
    assert not second.is_over


@pytest.mark.parametrize("outcome_was_read", [False, True])
def test_the_outcome_of_a_failed_retrieve_survives_its_slots_reuse(
    one_slot: World, outcome_was_read: bool
) -> None:
    first = one_slot.begin()
    one_slot.servers_board.fail(0, TransferStatus.CANCELLED, first.final_count)
    assert not outcome_was_read or first.outcome is TransferStatus.CANCELLED
    one_slot.acknowledge(first, TransferStatus.CANCELLED)
    second = one_slot.begin()
    assert second.outcome is None, "the status of the first is still on the slot"
    one_slot.finish(second)
    assert first.outcome is TransferStatus.CANCELLED
    assert second.outcome is TransferStatus.OK


@pytest.mark.parametrize("end", ["landed", "failed", "forced", "refused"])
def test_a_slot_is_used_again_from_a_base_above_every_earlier_count(
    one_slot: World, end: str
) -> None:
    world = one_slot
    first = world.begin()
    if end == "landed":
        world.finish(first)
    elif end == "failed":
        world.land(first, 1)
        world.servers_board.fail(0, TransferStatus.COPY_FAILED, first.final_count)
        world.acknowledge(first, TransferStatus.COPY_FAILED)
    elif end == "forced":
        first.force(TransferStatus.TIMED_OUT)
        world.finish(first)
    else:
        number = world.ids[first]
        world.reply(protocol.ErrorReply(number, ErrorCode.UNKNOWN_LEASE, "gone", "again"))
    second = world.begin(width=2)
    assert second.base == first.final_count
    assert second.landed_slices == 0
    assert second.outcome is None
    world.land(second, 1)
    assert second.landed_slices == 1


def test_counts_wrap_at_32_bits_and_bases_on_the_wire_stay_below(one_slot: World) -> None:
    world = one_slot
    start = 2**32 - LAYERS - 2
    world.transfers._bases[0] = start
    world.board.announce(0, start)
    bases = []
    for _ in range(4):
        retrieve = world.begin()
        request = world.next_request()
        assert isinstance(request, protocol.Retrieve)
        bases.append(request.base)
        for landed in range(LAYERS):
            world.land(retrieve, landed)
            assert (retrieve.landed_slices, retrieve.outcome) == (landed, None)
        world.finish(retrieve)
        assert retrieve.outcome is TransferStatus.OK
    assert bases == [start, 2**32 - 2, LAYERS - 2, 2 * LAYERS - 2]


def test_a_refused_retrieve_fails_with_the_servers_reason_and_is_over(world: World) -> None:
    retrieve = world.begin()
    number = world.ids[retrieve]
    refusal = protocol.ErrorReply(number, ErrorCode.UNKNOWN_LEASE, "gone", "look again")
    world.reply(refusal)
    assert retrieve.outcome is TransferStatus.REFUSED
    assert retrieve.refusal == refusal
    assert retrieve.ended is None
    assert retrieve.is_over
    assert world.transfers.is_idle


def test_a_retrieve_given_up_stays_failed_when_the_server_finishes_late(world: World) -> None:
    retrieve = world.begin()
    retrieve.force(TransferStatus.TIMED_OUT)
    assert not retrieve.is_over, "its pages may still be written"
    world.land(retrieve, 2)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    world.finish(retrieve)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert retrieve.is_over
    assert world.transfers.is_idle


def test_a_cancel_names_the_retrieve_and_ends_nothing_by_itself(world: World) -> None:
    retrieve = world.begin()
    world.next_request()
    world.transfers.cancel(retrieve)
    cancel = world.next_request()
    assert cancel == protocol.Cancel(cancel.id, retrieve.number)
    assert retrieve.outcome is None
    assert not retrieve.is_over
    world.servers_board.fail(retrieve.slot, TransferStatus.CANCELLED, retrieve.final_count)
    assert not retrieve.is_over, "a failure is over when it is acknowledged"
    world.reply(protocol.Cancelled(cancel.id))
    assert not retrieve.is_over, "that is not the retrieve's own reply"
    world.acknowledge(retrieve, TransferStatus.CANCELLED)
    assert retrieve.is_over
    assert retrieve.outcome is TransferStatus.CANCELLED


def test_a_retrieve_that_is_acknowledged_or_lost_is_not_cancelled(world: World) -> None:
    retrieve = world.begin()
    world.next_request()
    world.finish(retrieve)
    world.transfers.cancel(retrieve)
    assert world.sent_nothing_more()
    other = world.begin()
    world.hang_up()
    world.transfers.cancel(other)
    assert other.outcome is TransferStatus.SERVER_DIED


def test_a_lost_connection_fails_a_retrieve_but_its_pages_stay_taken(one_slot: World) -> None:
    world = one_slot
    retrieve = world.begin()
    world.land(retrieve, 1)
    world.hang_up()
    assert retrieve.outcome is TransferStatus.SERVER_DIED
    assert not retrieve.is_over
    world.transfers.reap()
    assert not retrieve.is_over, "the server's process lives and may still write"
    assert not world.transfers.has_free_slot
    world.connection.server_is_dead = True
    world.transfers.reap()
    assert retrieve.is_over
    assert retrieve.is_acknowledged
    assert world.transfers.has_free_slot
    assert world.transfers.is_idle


def test_a_retrieve_that_had_landed_survives_the_servers_death(world: World) -> None:
    retrieve = world.begin()
    world.land(retrieve)
    world.connection.server_is_dead = True
    world.hang_up()
    world.transfers.reap()
    assert retrieve.outcome is TransferStatus.OK
    assert retrieve.is_over
    assert world.transfers.is_idle


def test_what_the_server_failed_before_it_died_keeps_its_status(world: World) -> None:
    retrieve = world.begin()
    world.servers_board.fail(retrieve.slot, TransferStatus.COPY_FAILED, retrieve.final_count)
    world.connection.server_is_dead = True
    world.hang_up()
    world.transfers.reap()
    assert retrieve.outcome is TransferStatus.COPY_FAILED


def test_death_ends_all_waits_of_all_retrieves(world: World) -> None:
    retrieves = [world.begin(), world.begin(width=LAYERS)]
    world.connection.server_is_dead = True
    world.transfers.reap()
    assert [r.outcome for r in retrieves] == [TransferStatus.SERVER_DIED] * 2
    assert [world.board.landed(r.slot) for r in retrieves] == [r.final_count for r in retrieves]


@pytest.mark.parametrize("refused", [False, True])
def test_a_stores_pages_are_free_with_its_reply(world: World, refused: bool) -> None:
    store = world.store()
    number = world.next_request().id
    assert not store.is_over
    assert not world.transfers.is_idle
    stored = protocol.Stored(number, 0, 1, 0, 0)
    world.reply(
        protocol.ErrorReply(number, ErrorCode.BAD_REQUEST, "no", "do") if refused else stored
    )
    assert store.is_over
    assert store.ended == (None if refused else stored)
    assert world.transfers.is_idle


def test_a_store_on_a_lost_connection_is_over_when_the_server_is_dead(world: World) -> None:
    store = world.store()
    world.hang_up()
    world.transfers.reap()
    assert not store.is_over, "the server may still read the pages"
    world.connection.server_is_dead = True
    world.transfers.reap()
    assert store.is_over
    assert store.ended is None
    assert world.transfers.is_idle


def test_replies_may_come_in_any_order(world: World) -> None:
    one, two = world.begin(), world.begin()
    world.finish(two)
    assert (one.is_acknowledged, two.is_acknowledged) == (False, True)
    world.finish(one)
    assert one.is_acknowledged


def test_tickets_count_up_and_wrap_at_32_bits(world: World) -> None:
    assert [world.transfers.next_ticket() for _ in range(3)] == [1, 2, 3]
    world.transfers._tickets = 2**32 - 2
    assert [world.transfers.next_ticket() for _ in range(3)] == [2**32 - 1, 0, 1]


def test_no_fresh_store_is_void_however_far_tickets_have_come(world: World) -> None:
    """Half way round from the last that was given up, and past the wrap, without one since."""
    world.store()
    assert world.transfers.give_up_stores() == 1
    step = 2**30 - 1
    for number, ticket in enumerate(range(step, 6 * 2**32, step)):
        world.transfers._tickets = (ticket - 1) & 0xFFFF_FFFF
        store = world.store()
        assert store.ticket == ticket & 0xFFFF_FFFF
        assert not world.servers_board.is_void(store.ticket)
        assert world.transfers.give_up_stores(DEADLINE_S - 1) == 0
        if number % 10:
            world.transfers.stores.clear()  # it has ended
        else:
            assert world.transfers.give_up_stores() == 1
            assert world.servers_board.is_void(store.ticket)


def test_stores_on_both_sides_of_the_wrap_are_given_up_together(world: World) -> None:
    for tickets in (2**30, 2**31, 3 * 2**30, 2**32 - 3):
        world.transfers._tickets = tickets
        world.transfers.next_ticket()
    stores = [world.store() for _ in range(4)]
    assert [store.ticket for store in stores] == [2**32 - 1, 0, 1, 2]
    assert world.transfers.give_up_stores() == 4
    assert [world.servers_board.is_void(store.ticket) for store in stores] == [True] * 4
    assert not world.servers_board.is_void(world.store().ticket)


@pytest.mark.parametrize("width", [0, LAYERS + 1])
def test_a_retrieve_that_cannot_be_asked_for_takes_no_slot(one_slot: World, width: int) -> None:
    with pytest.raises(GeometryError, match="does not fit 4 layers"):
        one_slot.begin(width=width)
    assert one_slot.transfers.is_idle
    assert one_slot.transfers.has_free_slot
