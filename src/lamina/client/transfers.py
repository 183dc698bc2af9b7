"""Retrieves and stores of one connection, from the request to the proof that they are over.

A retrieve's progress is its slot's count on the board; its end is acknowledged by the server's
reply or proven by the server's death. Between the two a retrieve may have been given up (its
waits are ended, its request has failed): its pages and its slot stay taken all the same.

    in flight ──▶ all landed ──────────────▶ acknowledged: slot and pages are free
        └──────▶ forced (time-out, death) ──▶    "

A store only reads its pages. The board's word that it is void gives it up: then its pages are free
at once, because the server publishes nothing of what it read, whether or not it is heard of again.

    in flight ──▶ acknowledged: pages are free, its chunks are found
        └──────▶ given up: pages are free, its chunks are found if they were before
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamina import protocol
from lamina.board import Board, TransferStatus, reached
from lamina.client.checks import checked_blocks, checked_number
from lamina.client.connection import Connection
from lamina.client.notices import Notices
from lamina.errors import UsageError
from lamina.geometry import BlockIds, Geometry, Slice

_MAX_TICKETS = 1 << 30
"""A store as many tickets old is void: so the board's word about that keeps up with tickets that
wrap at 2**32, and no fresh one looks void. None is ever so old, by its deadline."""


class Ticket(NamedTuple):
    """A number that the engine's compute stream writes to `board`; None where nobody reads it."""

    number: int
    board: Board | None


class Retrieve:
    """One retrieve. Its owner is the engine's thread; the watchdog may `force` it.

    `number` names it among the retrieves and stores of its connection."""

    def __init__(
        self,
        number: int,
        request: str,
        board: Board,
        slot: int,
        base: int,
        slices: tuple[Slice, ...],
        deadline_s: float,
        is_server_dead: Callable[[], bool],
    ) -> None:
        self.number = number
        self.request = request
        self.board = board
        self.slot = slot
        self.base = base
        self.slices = slices
        self.deadline_s = deadline_s
        self.is_server_dead = is_server_dead
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused it; its lease has ended then."""
        self.ended: protocol.Retrieved | None = None
        """The server's account of it, once it came."""
        self._acknowledged = False
        self._forced: TransferStatus | None = None
        self._outcome: TransferStatus | None = None  # kept, since the slot is used again
        self._lock = threading.Lock()  # between `force` and giving the slot back, nothing else

    @property
    def final_count(self) -> int:
        return self.base + len(self.slices)

    def slice_of(self, layer: int) -> int:
        """The number of the slice that `layer` is in. Raises `UsageError` for a layer that the
        geometry lacks: its slice would never land, and nobody would end a wait for it."""
        first, layers = self.slices[0], self.slices[-1].end_layer
        if not 0 <= layer < layers:
            raise UsageError(
                f"there is no layer {layer} among {layers}",
                "Number layers as the geometry has them, in order of execution",
            )
        return layer // (first.end_layer - first.first_layer)

    @property
    def landed_slices(self) -> int:
        """How many slices are in the pages. Meaningless once `outcome` is a failure."""
        if self._acknowledged:  # the slot is another's, and the board may be gone
            return 0 if self._outcome else len(self.slices)
        landed = (self.board.landed(self.slot) - self.base) & 0xFFFF_FFFF
        return landed if landed <= len(self.slices) else 0

    @property
    def outcome(self) -> TransferStatus | None:
        """None while in flight; OK when every slice has landed; why it failed otherwise.

        A failure is final for the engine, but its pages are free only when `is_over`.
        """
        if self._outcome is None and (self._forced is not None or self._has_ended()):
            # Read in this order: whoever forces the count says so first (`force`), and the server
            # writes the status before it forces the count.
            forced = self._forced
            self._outcome = forced if forced is not None else self.board.status(self.slot)
        return self._outcome

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written to the pages."""
        return self._acknowledged or self.outcome is TransferStatus.OK

    @property
    def is_acknowledged(self) -> bool:
        """Whether the slot is free too."""
        return self._acknowledged

    def force(self, status: TransferStatus) -> None:
        """End every wait on this retrieve and make it failed; again if the server wrote since.

        Any thread: makes no device call, and its lock is never held across one.
        """
        with self._lock:
            if self._acknowledged or (self._forced is None and self._has_ended()):
                return
            self._forced = self._forced or status
            self.board.announce(self.slot, self.final_count)

    def acknowledge(self) -> None:
        """The server will not write again. Called by `Transfers` only."""
        assert self.outcome is not None, "acknowledged before its final count"
        with self._lock:
            self._acknowledged = True

    def _has_ended(self) -> bool:
        return reached(self.board.landed(self.slot), self.final_count)


class Store:
    """One store; the pages are the engine's again once `is_over`. `number` is as a retrieve's."""

    def __init__(self, number: int, chunks: int, ticket: int, deadline_s: float) -> None:
        self.number = number
        self.chunks = chunks
        self.ticket = ticket
        self.deadline_s = deadline_s
        self.ended: protocol.Stored | None = None
        """The server's account of it, once it came; late, if the store was given up."""
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused it: nothing was stored."""
        self.given_up = False
        """Whether the engine did not wait for its end. It is over all the same."""
        self.is_over = False


class Transfers:
    """The slots of one connection's board and what is in flight on them."""

    def __init__(
        self, connection: Connection, board: Board, geometry: Geometry, notices: Notices
    ) -> None:
        self._notices = notices
        self._connection = connection
        self._board = board
        self._geometry = geometry
        self._free_slots = list(range(board.slots))
        self._bases = [0] * board.slots
        self.retrieves: dict[int, Retrieve] = {}
        """In flight or given up, by slot, until acknowledged. The watchdog reads it."""
        self.stores: set[Store] = set()
        """Those that are not over."""
        self._numbers = itertools.count(1)
        self._unanswered: set[int] = set()
        """The numbers that the server may have in use: also those of stores that are given up."""
        self._tickets = 0
        self._has_stored = False

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

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
        ticket: int | None,
        deadline_s: float,
        number: int | None = None,
    ) -> Retrieve:
        """Begin a retrieve; see `protocol.Retrieve`. Needs `has_free_slot`.

        Raises `GeometryError` for a width that does not fit the layers, and as `checked_blocks`;
        `UsageError` for what cannot be sent, and for a number in use. It takes no slot then.
        """
        slices = self._geometry.slices(layers_per_slice)
        packed = self._packed(block_ids)
        slot = self._free_slots[-1]
        self._board.reset(slot)
        retrieve = Retrieve(
            self._free_number(number),
            request,
            self._board,
            slot,
            self._bases[slot],
            slices,
            deadline_s,
            self._connection.is_server_dead,
        )
        self._connection.call(
            lambda request_id: protocol.Retrieve(
                request_id,
                retrieve.number,
                lease,
                start_tokens,
                packed,
                slot,
                retrieve.base,
                layers_per_slice,
                ticket,
            ),
            lambda reply: self._retrieve_ended(retrieve, reply),
        )
        self._unanswered.add(retrieve.number)
        self._free_slots.pop()
        self._bases[slot] = retrieve.final_count & 0xFFFF_FFFF
        self.retrieves[slot] = retrieve
        return retrieve

    def cancel(self, retrieve: Retrieve) -> None:
        """Give up a retrieve. Its pages are free when it `is_over`, not before."""
        if not retrieve.is_acknowledged and not self._connection.is_lost:
            self._connection.call(
                lambda request_id: protocol.Cancel(request_id, retrieve.number), lambda _: None
            )

    def store(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        block_ids: Sequence[BlockIds],
        ticket: int,
        deadline_s: float,
        number: int | None = None,
    ) -> Store:
        """Begin a store; see `protocol.Store`. Raises as `checked_blocks`, or `UsageError` for what
        cannot be sent, and for a number in use."""
        packed = self._packed(block_ids)
        store = Store(self._free_number(number), len(keys), ticket, deadline_s)
        self._connection.call(
            lambda request_id: protocol.Store(
                request_id, store.number, parent, tuple(keys), packed, ticket
            ),
            lambda reply: self._store_ended(store, reply),
        )
        self._unanswered.add(store.number)
        self.stores.add(store)
        return store

    def give_up_stores(self, now_s: float = math.inf) -> int:
        """Give up the stores whose deadline is `now_s` or before; returns how many.

        With or without the connection. Those with an earlier ticket go with them, whatever their
        deadline: the board has one word for all, and what it voids must be given up, no less.
        """
        overdue = [store for store in self.stores if store.deadline_s <= now_s]
        if not overdue:
            return 0
        latest = min(overdue, key=lambda store: (self._tickets - store.ticket) & 0xFFFF_FFFF)
        self._board.void_stores(latest.ticket)
        given_up = [store for store in self.stores if self._board.is_void(store.ticket)]
        for store in given_up:
            store.given_up = store.is_over = True
            self.stores.remove(store)
        return len(given_up)

    def take_stored(self) -> bool:
        """Whether a store has succeeded, in time, since this was asked last."""
        has_stored, self._has_stored = self._has_stored, False
        return has_stored

    def reap(self) -> None:
        """End everything if the server has died. For a connection that was lost."""
        if not self.is_idle and self._connection.is_server_dead():
            self.end()

    def end(self) -> None:
        """All is over: the connection is lost, and the server touches nothing of it any more."""
        for retrieve in list(self.retrieves.values()):
            retrieve.force(TransferStatus.SERVER_DIED)
            self._release(retrieve)
        for store in self.stores:
            store.is_over = True
        self.stores.clear()

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

    def _packed(self, block_ids: Sequence[BlockIds]) -> tuple[bytes, ...]:
        arrays = checked_blocks(block_ids, len(self._geometry.groups))
        return tuple(protocol.pack_block_ids(ids) for ids in arrays)

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
        self._release(retrieve)

    def _release(self, retrieve: Retrieve) -> None:
        retrieve.acknowledge()
        del self.retrieves[retrieve.slot]
        self._free_slots.append(retrieve.slot)

    def _store_ended(self, store: Store, reply: protocol.Reply | None) -> None:
        self._unanswered.discard(store.number)
        if reply is None:
            return
        store.refusal = self._notices.answered(protocol.Store, reply)
        if isinstance(reply, protocol.Stored):
            store.ended = reply
            self._has_stored |= not reply.status and not store.given_up
        store.is_over = True
        self.stores.discard(store)
