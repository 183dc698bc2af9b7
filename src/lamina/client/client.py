"""The client: what an engine uses of Lamina. Engine-neutral and free of blocking calls.

    client = Client(settings, HostWorkerDevice(), "my engine")
    client.register(geometry, page_map, allocations)  # what its KV is and where
    client.connect()                                  # wait for the server; optional
    lookup = client.lookup(request, keys)             # ... client.poll() ... lookup.result
    retrieve = client.retrieve(...)                   # with a Gate and StepGates around it
    store = client.store(...)                         # pages are pinned until store.is_over
    client.end_request(request)
    client.workers(count)                             # what the engine's workers say of themselves
    client.close()                                    # or `with Client(...) as client:`

`poll`, called at every engine step, reads replies and reconnects. Without a server every lookup is
a miss and every store is dropped: a cache, not a dependency. All calls are for the engine's
thread.

A call that is made wrongly (an argument of the wrong kind, out of order, after `close`, in a forked
child) raises `UsageError` or `GeometryError`, and has then done nothing. What only the server can
tell is in `refusal` of the lookup, retrieve or store, and in the log, each cause once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lamina import protocol
from lamina.client.checks import check_name, check_parent, checked_keys, checked_number
from lamina.client.connection import Connection
from lamina.client.links import Links
from lamina.client.notices import Notices
from lamina.client.retrieve import Retrieve
from lamina.client.store import Store, Ticket
from lamina.client.transfers import Transfers
from lamina.errors import RequestRefusedError, ServerUnavailableError, UsageError
from lamina.geometry import BlockIds


class LookupResult(NamedTuple):
    """`chunks` chunks of the prompt are pinned under `lease`; both 0 for a miss."""

    chunks: int
    lease: int


MISS = LookupResult(0, 0)


class Lookup:
    """One lookup. `result` is None until the answer is in, the connection is lost or time is up.

    A late answer's lease is given back, so that nothing stays pinned for nobody. Engine's thread.
    """

    def __init__(
        self,
        connection: Connection | None,
        request: str,
        keys: tuple[bytes, ...],
        deadline_s: float,
        clock: Callable[[], float],
        notices: Notices,
    ) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._clock = clock
        self._notices = notices
        self._result: LookupResult | None = None
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused to answer; the result is a miss then."""
        if connection is None or not keys:
            self._result = MISS
        else:
            connection.call(lambda number: protocol.Lookup(number, request, keys), self._answered)

    @property
    def result(self) -> LookupResult | None:
        """Reads what has arrived, polled or not, and never blocks. A miss when nobody was asked."""
        if self._result is None and self._connection is not None:
            self._connection.pump()
        if self._result is None and self._clock() >= self._deadline_s:
            self._result = MISS
        return self._result

    @property
    def is_lost(self) -> bool:
        """Whether nobody was asked, or the connection is gone: so is the lease."""
        return self._connection is None or self._connection.is_lost

    def wait(self, timeout_s: float) -> LookupResult | None:
        """Wait up to `timeout_s` for the answer."""
        until_s = self._clock() + timeout_s
        while self.result is None and (left_s := until_s - self._clock()) > 0:
            assert self._connection is not None
            self._connection.wait(left_s)
        return self.result

    def _answered(self, reply: protocol.Reply | None) -> None:
        self.refusal = self._notices.answered(protocol.Lookup, reply)
        found = MISS
        if isinstance(reply, protocol.Found) and reply.lease:  # without one nothing is pinned
            found = LookupResult(reply.chunks, reply.lease)
        if self._result is None:
            self._result = found
        elif found.lease and self._connection is not None:
            lease = found.lease
            self._connection.call(lambda number: protocol.EndLease(number, lease), lambda _: None)


class Client(Links):
    """See the module. `engine` names the engine this client belongs to; all its processes share
    it. `label` and `model`, at most 256 printable characters each, are what people read of it in
    logs. `clock` in seconds, monotonic, is what deadlines are counted by. Raises `UsageError` for
    names that are no text."""

    def ask(
        self, request: Callable[[int], protocol.Message], timeout_s: float | None = None
    ) -> protocol.Reply:
        """Send a request and wait for its reply, up to `timeout_s` or `connect_timeout_ms`.

        Raises `RequestRefusedError` or `ServerUnavailableError`.
        """
        self._check_open()
        replies: list[protocol.Reply | None] = []
        if self._link is not None and self._link.is_open:
            self._link.connection.call(request, replies.append)
            until_s = time.monotonic() + (timeout_s or self.settings.connect_timeout_ms / 1000)
            while not replies and (left_s := until_s - time.monotonic()) > 0:
                self._link.connection.wait(left_s)
        reply = replies[0] if replies else None
        if isinstance(reply, protocol.ErrorReply):
            raise RequestRefusedError(reply.code, reply.cause, reply.remedy)
        if reply is None:
            raise ServerUnavailableError(
                f"the server at {self.settings.socket} gave no answer", "Look at its log"
            )
        return reply

    def workers(self, count: int) -> tuple[bytes, ...] | None:
        """What the workers of this engine say of themselves, in order of registration; None until
        at least `count` have registered at the server. Never blocks; `poll` reads the answer."""
        self._check_open()
        connection = self._link.connection if self._link and self.is_usable else None
        return self._workers.known(count, connection, self._clock())

    def wait_for_workers(self, count: int, timeout_s: float) -> tuple[bytes, ...] | None:
        """The same, waiting up to `timeout_s` of real time. For an engine's start."""
        until_s = time.monotonic() + timeout_s
        while True:
            self.poll()
            known, left_s = self.workers(count), until_s - time.monotonic()
            if known is not None or left_s <= 0:
                return known
            pause_s = min(left_s, self.settings.reconnect_every_ms / 1000)
            if self._link is not None:
                self._link.connection.wait(pause_s)
            else:
                time.sleep(pause_s)

    def lookup(self, request: str, keys: Sequence[bytes]) -> Lookup:
        """Ask how many of `keys` are there; a miss at once when the server is not usable.

        `keys` are those of a prompt's chunks from its start. The same request's former lease ends.
        """
        self._check_open()
        check_name("the request's name", request)
        deadline_s = self._clock() + self.settings.lookup_timeout_ms / 1000
        connection = self._link.connection if self._link and self.is_usable else None
        return Lookup(
            connection, request, checked_keys(keys), deadline_s, self._clock, self._notices
        )

    def retrieve(
        self,
        request: str,
        lease: int,
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        layers_per_slice: int,
        ticket: Ticket | None = None,
        number: int | None = None,
        deadline_s: float | None = None,
    ) -> Retrieve | None:
        """Begin to retrieve leased chunks into blocks; None when the server is gone or all slots
        are taken: recompute then.

        `start_tokens` counts from the first leased chunk; `block_ids` has one array of int32 a
        group. `ticket` is one of `write_ticket`, where the blocks may still be written by work
        enqueued before. `number` is what the retrieve is called, on the wire and in the server's
        log; the client counts if none is given. No two transfers have the same that the server has
        not answered: whoever gives numbers gives them to all retrieves and stores. `deadline_s`, by
        the client's clock, takes the place of `retrieve_timeout_ms` from now: the ranks of an
        engine give up together. The lease ends with the retrieve, of several ranks with the last
        one's, however much of it was wanted, also if the retrieve is refused. Raises
        `UsageError` or `GeometryError`: nothing has begun then, and the lease stays.
        """
        self._check_registered()
        check_name("the request's name", request)
        transfers = self._transfers() if ticket is None else self._transfers_after(ticket)
        lease = checked_number("the lease", lease)
        if transfers is None or not transfers.has_free_slot:
            self.end_lease(lease)  # nobody comes back for it
            return None
        return transfers.retrieve(
            request,
            lease,
            checked_number("start_tokens", start_tokens),
            block_ids,
            checked_number("layers_per_slice", layers_per_slice),
            ticket,
            deadline_s or self._clock() + self.settings.retrieve_timeout_ms / 1000,
            number,
            watch=self._watchdog.watch,
        )

    def cancel(self, retrieve: Retrieve) -> None:
        """Give up a retrieve; its pages are the engine's again when it `is_over`."""
        for link in [self._link, *self._lost]:
            if link is not None and link.board is retrieve.board and link.transfers is not None:
                link.transfers.cancel(retrieve)

    def store(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        block_ids: Sequence[BlockIds],
        ticket: Ticket,
        number: int | None = None,
    ) -> Store | None:
        """Begin to store full chunks after `ticket`, written since the last `poll`; None when there
        is no server. It is over after `store_timeout_ms` at the latest, at the next `poll`.

        `parent` is the key of the chunk before the first of `keys`, empty at the start of a prompt:
        under a wrong one, what is stored may be dropped or never be found. `block_ids` has one
        array of int32 a group; `number` is as a retrieve's. Raises `UsageError` or `GeometryError`:
        nothing has begun then.
        """
        self._check_registered()
        check_parent(parent)
        transfers = self._transfers_after(ticket)
        if not keys:
            raise UsageError("a store has no keys", "Store at least one full chunk")
        checked = checked_keys(keys)
        if transfers is None:
            return None
        deadline_s = self._clock() + self.settings.store_timeout_ms / 1000
        return transfers.store(parent, checked, block_ids, ticket, deadline_s, number)

    def write_ticket(self, stream: Any = None) -> Ticket:
        """A ticket that is reached once everything enqueued on the compute stream is done.

        It is good for this connection: with one of a lost connection, or of a time without a
        server, nothing is stored or retrieved.
        """
        self._check_registered()
        transfers = self._transfers()
        if transfers is None:
            return Ticket(0, None)
        assert self._link is not None
        number, board = transfers.next_ticket(), self._link.board
        if transfers.has_rings:
            return Ticket(number, board, self.device.event(stream))
        self.device.write_ticket(board, number, stream)
        return Ticket(number, board)

    def end_request(self, request: str) -> None:
        """The request is over: its lease ends, its retrieves are cancelled. As often as you like,
        and after `close`; raises `UsageError` for what is no text."""
        check_name("the request's name", request)
        self._send(lambda number: protocol.EndRequest(number, request))

    def end_lease(self, lease: int) -> None:
        """The hit is not used. As often as you like, and after `close`; raises `UsageError` for
        what is no integer."""
        lease = checked_number("the lease", lease)
        self._send(lambda number: protocol.EndLease(number, lease))

    def _transfers_after(self, ticket: Ticket) -> Transfers | None:
        """Those that a transfer after `ticket` may join; None for a ticket of another connection,
        which would be reached too early or never."""
        if not isinstance(ticket, Ticket):
            raise UsageError(
                f"the ticket {ticket!r:.80} is none", "Give what `write_ticket` has returned"
            )
        is_of_this = self._link is not None and ticket.board is self._link.board
        return self._transfers() if is_of_this else None

    def _send(self, make: Callable[[int], protocol.Message]) -> None:
        if self._link is not None and not self._link.connection.is_lost:
            self._link.connection.call(make, lambda _: None)
