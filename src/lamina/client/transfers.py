"""Retrieves and stores of one connection: their slots and numbers, and what becomes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from lamina import protocol
from lamina.board import RING_SLOTS, Board, TransferStatus
from lamina.client.checks import check_placed_blocks, checked_blocks, checked_number
from lamina.client.connection import Connection
from lamina.client.notices import Notices
from lamina.client.retrieve import Retrieve, RingRetrieve
from lamina.client.rings import Rings
from lamina.client.store import RingStore, Store, Ticket
from lamina.errors import DeviceError, UsageError
from lamina.geometry import BlockIds, Geometry, PageMap, Slice
from lamina.records import last_records

_MAX_TICKETS = 1 << 30
"""A store as many tickets old is void: so the board's word about that keeps up with tickets that
wrap at 2**32, and no fresh one looks void. None is ever so old, by its deadline."""


class Transfers:
    """The slots of one connection's board and what is in flight on them. With `rings`, what moves
    goes through these."""

    def __init__(
        self,
        connection: Connection,
        board: Board,
        geometry: Geometry,
        page_map: PageMap,
        notices: Notices,
        rings: Rings | None = None,
    ) -> None:
        self._notices = notices
        self._connection = connection
        self._board = board
        self._geometry = geometry
        self._page_map = page_map
        self._rings = rings
        self._free_slots = [s for s in range(board.slots) if rings is None or s not in RING_SLOTS]
        self.slots = len(self._free_slots)
        """How many retrieves there may be at a time."""
        self._bases = [0] * board.slots
        self.retrieves: dict[int, Retrieve] = {}
        """In flight or given up, by slot, until acknowledged. The watchdog reads it."""
        self.stores: set[Store] = set()
        """Those that are not over."""
        self._gathered: set[Store] = set()
        """Those that are over, as their pages are read, and not answered."""
        self._numbers = itertools.count(1)
        self._unanswered: set[int] = set()
        """The numbers that the server may have in use: also those of stores that are given up."""
        self._tickets = 0
        self._has_stored = False
        self._is_ended = False

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def has_rings(self) -> bool:
        """Whether transfers go through rings."""
        return self._rings is not None

    @property
    def is_idle(self) -> bool:
        """Whether every retrieve is over and acknowledged, and every store over."""
        return not self.retrieves and not self.stores

    def next_ticket(self) -> int:
        """The number of the next ticket of this board."""
        self._tickets = (self._tickets + 1) & 0xFFFF_FFFF
        self._board.void_stores(self._tickets - _MAX_TICKETS)
        return self._tickets

    def retrieve(
        self,
        request: str,
        lease: int,
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        layers_per_slice: int,
        ticket: Ticket | None,
        deadline_s: float,
        number: int | None = None,
        *,
        watch: Callable[[], None] = lambda: None,
    ) -> Retrieve:
        """Begin a retrieve; see `protocol.Retrieve`. Needs `has_free_slot`.

        `watch` is called once it is in flight and before any device call, which may block until
        the retrieve lands or is forced.
        Raises `GeometryError` for a width that does not fit the layers, and as `checked_blocks`;
        `UsageError` for what cannot be sent, and for a number in use. It takes no slot then.
        """
        slices = self._geometry.slices(layers_per_slice)
        arrays = checked_blocks(block_ids, len(self._geometry.groups))
        slot = self._free_slots[-1]
        self._board.reset(slot)
        message = protocol.Retrieve(
            0,
            self._free_number(number),
            lease,
            start_tokens,
            (),
            slot,
            self._bases[slot],
            layers_per_slice,
        )
        begin = self._through_pages if self._rings is None else self._through_ring
        retrieve = begin(message, request, slices, arrays, ticket, deadline_s)
        self._unanswered.add(retrieve.number)
        self._free_slots.pop()
        self._bases[slot] = retrieve.final_count & 0xFFFF_FFFF
        self.retrieves[slot] = retrieve
        watch()
        if isinstance(retrieve, RingRetrieve):
            self._place(retrieve, start_tokens, arrays, ticket)
        return retrieve

    def _through_pages(
        self,
        message: protocol.Retrieve,
        request: str,
        slices: tuple[Slice, ...],
        block_ids: list[BlockIds],
        ticket: Ticket | None,
        deadline_s: float,
    ) -> Retrieve:
        """The server copies into the pages."""
        retrieve = Retrieve(
            message.transfer,
            request,
            self._board,
            message.slot,
            message.base,
            slices,
            deadline_s,
            self._connection.is_server_dead,
        )
        packed = tuple(map(protocol.pack_block_ids, block_ids))
        after = ticket.number if ticket is not None else None
        self._send(retrieve, replace(message, block_ids=packed, ticket=after))
        return retrieve

    def _through_ring(
        self,
        message: protocol.Retrieve,
        request: str,
        slices: tuple[Slice, ...],
        block_ids: list[BlockIds],
        ticket: Ticket | None,
        deadline_s: float,
    ) -> Retrieve:
        """The server fills the ring: the message first, then (`_place`) all that the device is to
        do."""
        rings = self._rings
        assert rings is not None
        check_placed_blocks(self._geometry, self._page_map, message.start_tokens, block_ids)
        tokens = len(block_ids[0]) * self._geometry.groups[0].block_tokens
        span = rings.retrieve_span(message.start_tokens, tokens, slices)
        retrieve = RingRetrieve(
            message.transfer,
            request,
            self._board,
            message.slot,
            message.base,
            slices,
            deadline_s,
            self._connection.is_server_dead,
            span,
            last_records(span.shapes, slices),
        )
        self._send(retrieve, replace(message, ring=rings.retrieve_place(tokens, span)))
        rings.take_retrieve(span)
        return retrieve

    def _place(
        self,
        retrieve: RingRetrieve,
        start_tokens: int,
        block_ids: list[BlockIds],
        ticket: Ticket | None,
    ) -> None:
        """Enqueue what the device is to do for a retrieve that has joined its ring."""
        rings = self._rings
        assert rings is not None
        if not self._connection.is_flushed:  # the device must not wait for what is not sent
            retrieve.force(TransferStatus.TIMED_OUT)
            rings.skip(retrieve)
            return
        try:
            rings.place(retrieve, start_tokens, block_ids, ticket.event if ticket else None)
        except DeviceError as error:
            self._notices.trouble(f"a retrieve could not be placed: {error}")
            retrieve.spoil(TransferStatus.COPY_FAILED)  # the server may have landed all of it
            rings.skip(retrieve)

    def _send(self, retrieve: Retrieve, message: protocol.Retrieve) -> None:
        self._connection.call(
            lambda request_id: replace(message, id=request_id),
            lambda reply: self._retrieve_ended(retrieve, reply),
        )

    def cancel(self, retrieve: Retrieve) -> None:
        """Give up a retrieve. Its pages are free when it `is_over`, not before."""
        is_answered = retrieve.is_acknowledged or (
            isinstance(retrieve, RingRetrieve) and retrieve.answered
        )
        if not is_answered and not self._connection.is_lost:  # else its number may be another's
            self._connection.call(
                lambda request_id: protocol.Cancel(request_id, retrieve.number), lambda _: None
            )

    def store(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        block_ids: Sequence[BlockIds],
        ticket: Ticket,
        deadline_s: float,
        number: int | None = None,
    ) -> Store:
        """Begin a store; see `protocol.Store`. Raises as `checked_blocks`, or `UsageError` for what
        cannot be sent, and for a number in use."""
        arrays = checked_blocks(block_ids, len(self._geometry.groups))
        number = self._free_number(number)
        store: Store
        packed: tuple[bytes, ...] = ()
        place: protocol.RingPlace | None = None
        if self._rings is None:
            store = Store(number, len(keys), ticket.number, deadline_s)
            packed = tuple(map(protocol.pack_block_ids, arrays))
        else:
            check_placed_blocks(self._geometry, self._page_map, 0, arrays, len(keys))
            # Voided and copied in the order in which stores join, whenever their tickets are from.
            ticket = ticket._replace(number=self.next_ticket())
            span = self._rings.store_span(len(keys))
            place = self._rings.store_place(len(keys), span)
            kept = [ids.copy() for ids in arrays]  # the caller's may change before they are used
            store = RingStore(number, len(keys), ticket, deadline_s, span, kept)
        self._connection.call(
            lambda request_id: protocol.Store(
                request_id, number, parent, tuple(keys), packed, ticket.number, place
            ),
            lambda reply: self._store_ended(store, reply),
        )
        self._unanswered.add(number)
        self.stores.add(store)
        if isinstance(store, RingStore):
            assert self._rings is not None
            self._rings.join_store(store)
            self._pump(self._rings)
        return store

    def poll(self) -> None:
        """Go on with what goes through rings, and note what of it is passed."""
        if self._rings is None:
            return
        if not self._connection.is_lost:
            self._pump(self._rings)
        for retrieve in list(self.retrieves.values()):
            if isinstance(retrieve, RingRetrieve) and retrieve.answered and retrieve.is_passed:
                self._release(retrieve)
        for store in list(self.stores):
            if isinstance(store, RingStore) and self._rings.is_gathered(store):
                self._end_store(store)
                if not store.answered:
                    self._gathered.add(store)

    def give_up_stores(self, now_s: float = math.inf) -> int:
        """Give up the stores whose deadline is `now_s` or before; returns how many.

        With or without the connection. Those with an earlier ticket go with them, whatever their
        deadline: the board has one word for all, and what it voids must be given up, no less.
        """
        in_flight = self.stores | self._gathered
        overdue = [store for store in in_flight if store.deadline_s <= now_s]
        if not overdue:
            return 0
        latest = min(overdue, key=lambda store: (self._tickets - store.ticket) & 0xFFFF_FFFF)
        self._board.void_stores(latest.ticket)
        given_up = [store for store in in_flight if self._board.is_void(store.ticket)]
        for store in given_up:
            store.given_up = store.is_settled = True
            self._end_store(store)
            self._gathered.discard(store)
        return len(given_up)

    def take_stored(self) -> bool:
        """Whether a store has succeeded, in time, since this was asked last."""
        has_stored, self._has_stored = self._has_stored, False
        return has_stored

    def reap(self) -> None:
        """For a connection that was lost: end everything if the server has died."""
        if not self.is_idle and (self._is_ended or self._connection.is_server_dead()):
            self.end()

    def end(self) -> None:
        """All is over: the connection is lost, and the server touches nothing of it any more. What
        the engine's own device has still to pass is over when it has."""
        self._is_ended = True
        for retrieve in list(self.retrieves.values()):
            retrieve.force(TransferStatus.SERVER_DIED)
            if retrieve.is_passed:
                self._release(retrieve)
        for store in list(self.stores):
            if self._is_read(store):
                self._end_store(store)

    def end_waits(self) -> None:
        """Let the watchdog end all waits of rings from now on: the client is closed."""
        for retrieve in list(self.retrieves.values()) if self._rings is not None else []:
            retrieve.deadline_s = -math.inf

    def leave_rings(self) -> None:
        """Wait until the engine's own device uses nothing of this connection any more."""
        if self._rings is None:
            return
        self._rings.synchronize()
        for retrieve in self.retrieves.values():  # while there is a board to look at
            assert retrieve.is_passed
            assert retrieve.outcome is not None

    def _pump(self, rings: Rings) -> None:
        """Gather what has room. Where the device refuses, stores are given up."""
        try:
            rings.pump()
        except DeviceError as error:
            self._notices.trouble(f"stores could not be gathered: {error}")
            self.give_up_stores()

    def _is_read(self, store: Store) -> bool:
        """Whether nothing that is enqueued here reads its pages any more."""
        return not (self._rings and isinstance(store, RingStore)) or self._rings.is_read(store)

    def _end_store(self, store: Store) -> None:
        store.is_over = True
        self.stores.discard(store)

    def _free_number(self, given: int | None) -> int:
        """The number of the next transfer: what the engine has given, or the next that is free."""
        if given is None:
            return next(number for number in self._numbers if number not in self._unanswered)
        number = checked_number("the transfer's number", given)
        if number < 0:
            raise UsageError(f"the transfer's number {number} is negative", "Count from 0 on")
        if number in self._unanswered:
            raise UsageError(
                f"the number {number} is that of a transfer which the server has not answered",
                "Give every retrieve and store a number of its own",
            )
        return number

    def _retrieve_ended(self, retrieve: Retrieve, reply: protocol.Reply | None) -> None:
        self._unanswered.discard(retrieve.number)
        if reply is None:
            retrieve.force(TransferStatus.SERVER_DIED)
            return  # lost, not over: `end` comes once the server is known to be done with it
        retrieve.refusal = self._notices.answered(protocol.Retrieve, reply)
        if isinstance(reply, protocol.Retrieved):
            retrieve.ended = reply
        else:
            assert retrieve.refusal is not None
            retrieve.force(TransferStatus.REFUSED)
        if isinstance(retrieve, RingRetrieve):
            retrieve.answered = True
        if retrieve.is_passed:
            self._release(retrieve)

    def _release(self, retrieve: Retrieve) -> None:
        retrieve.acknowledge()
        del self.retrieves[retrieve.slot]
        self._free_slots.append(retrieve.slot)

    def _store_ended(self, store: Store, reply: protocol.Reply | None) -> None:
        self._unanswered.discard(store.number)
        self._gathered.discard(store)
        store.is_settled = True
        if isinstance(store, RingStore):
            store.answered = reply is not None
            if reply is None:  # the server may still copy it, from a ring that is used again
                self._board.void_stores(store.ticket)
        if reply is None:
            return
        store.refusal = self._notices.answered(protocol.Store, reply)
        if isinstance(reply, protocol.Stored):
            store.ended = reply
            self._has_stored |= not reply.status and not store.given_up
        if self._is_read(store):
            self._end_store(store)
