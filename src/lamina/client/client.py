"""The client: what an engine uses of Lamina. Engine-neutral and free of blocking calls.

    client = Client(settings, HostWorkerDevice(), "my engine")
    client.register(geometry, page_map, regions)      # what its KV is and where
    client.connect()                                  # wait for the server; optional
    lookup = client.lookup(request, keys)             # ... client.poll() ... lookup.result
    retrieve = client.retrieve(...)                   # with a Gate and StepGates around it
    store = client.store(...)                         # pages are pinned until store.is_over
    client.end_request(request)
    client.workers(count)                             # what the engine's workers say of themselves

`poll`, called at every engine step, reads replies and reconnects. Without a server every lookup is
a miss and every store is dropped: a cache, not a dependency. All calls are for the engine's
thread.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lamina import protocol
from lamina.client.link import Link, Memory
from lamina.client.lookup import Lookup
from lamina.client.transfers import Retrieve, Store, Transfers
from lamina.client.watchdog import Watchdog
from lamina.client.workers import Workers
from lamina.devices.base import WorkerDevice
from lamina.errors import (
    LaminaError,
    RequestRefusedError,
    ServerUnavailableError,
    SettingsError,
)
from lamina.geometry import BlockIds, Geometry, PageMap
from lamina.protocol import Region
from lamina.settings import AUTO, ClientSettings

log = logging.getLogger(__name__)

ALARM_AFTER_S = 1.0
"""A server silent for so long, or pages quarantined for so long, are worth a line in the log."""


class Client:
    """See the module. `engine` names the engine this client belongs to; all its processes share
    it. `clock` in seconds, monotonic, is what deadlines are counted by."""

    def __init__(
        self,
        settings: ClientSettings,
        device: WorkerDevice,
        label: str,
        engine: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.device = device
        self.label = label
        self.engine = engine or uuid.uuid4().hex
        self._clock = clock
        self._memory: Memory | None = None
        self._link: Link | None = None
        self._lost: list[Link] = []
        self._next_attempt_s = 0.0
        self._chunk_tokens = settings.chunk_tokens
        self._last_trouble = ""
        self._quarantined_since_s: float | None = None
        self._is_alarmed = False
        self._are_stores_late = False
        self._workers = Workers(settings.reconnect_every_ms / 1000)
        self._watchdog = Watchdog(self._in_flight, clock)

    def register(
        self,
        geometry: Geometry,
        page_map: PageMap,
        regions: Iterable[Region],
        description: bytes = b"",
    ) -> None:
        """Say what the engine's KV is and where it lies; before the first `connect` or `poll`.

        `description`, at most 4096 bytes, is what the engine's other processes get to know of this
        worker (`workers`). Raises `GeometryError` or `SettingsError` when it cannot be served.
        """
        memory = Memory(geometry, page_map, tuple(regions), description)
        page_map.check(geometry, [region.nbytes for region in memory.regions])
        width, layers = self.settings.layerwise_overlap, len(geometry.layers)
        if width != AUTO and width > layers:
            raise SettingsError(
                f"layerwise_overlap is {width}, but the model has {layers} layers",
                f"Use 1 to {layers}, or false for whole transfers",
            )
        self._memory = memory

    def connect(self) -> None:
        """Wait until the server takes us, at most `connect_timeout_ms`.

        Raises `ServerUnavailableError` when none answers, `RequestRefusedError` with the server's
        reason when it will not have us.
        """
        timeout_s = self.settings.connect_timeout_ms / 1000
        until_s = time.monotonic() + timeout_s
        link = self._link = self._link or self._new_link()
        while not link.is_ready:
            link.connection.wait(max(0.0, until_s - time.monotonic()))
            if link.connection.is_lost or time.monotonic() > until_s:
                refusal = link.refusal or link.connection.parting_word
                self._drop_link()
                if refusal is not None:
                    raise RequestRefusedError(refusal.code, refusal.cause, refusal.remedy)
                raise ServerUnavailableError(
                    f"the server at {self.settings.socket} did not answer in {timeout_s:g} s",
                    "Look at its log; it may be stopped or overloaded",
                )

    def try_connect(self) -> None:
        """As `connect`, but without a server go on: it is said once, and `poll` tries again.

        Raises `RequestRefusedError` all the same when the server will not have us.
        """
        try:
            self.connect()
        except (OSError, ServerUnavailableError) as error:
            self.note_trouble(str(error))

    def ask(self, request: type[protocol.Message]) -> protocol.Reply:
        """Send a request without fields and wait for its reply, as a command line does.

        Raises `RequestRefusedError` or `ServerUnavailableError`.
        """
        replies: list[protocol.Reply | None] = []
        if self._link is not None and self._link.is_open:
            self._link.connection.call(request, replies.append)
            until_s = time.monotonic() + self.settings.connect_timeout_ms / 1000
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

    @property
    def is_usable(self) -> bool:
        """Whether a lookup makes sense: the server took us and its heart beats."""
        return (
            self._link is not None
            and self._link.is_open
            and self._link.connection.heartbeat_age_s() * 1000 <= self.settings.suspect_after_ms
        )

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk as agreed with the server, the last one when it is gone; None before
        the first connection."""
        if self._link is not None and self._link.chunk_tokens:
            self._chunk_tokens = self._link.chunk_tokens
        return self._chunk_tokens

    @property
    def lease_ttl_s(self) -> float:
        """Seconds after which the server ends a lease that is not used; 0 without a server."""
        return self._link.lease_ttl_s if self._link is not None else 0.0

    @property
    def quarantined(self) -> int:
        """Retrieves given up whose pages may still be written: they are not over."""
        return sum(1 for r in self._in_flight() if r.outcome is not None and not r.is_over)

    @property
    def transfers_in_flight(self) -> int:
        """Retrieves whose end the server has not acknowledged, given up or not, and stores that
        are not over."""
        return sum(len(t.retrieves) + len(t.stores) for t in self._open_transfers())

    def poll(self) -> None:
        """Read replies, give up stores past their deadline, notice a lost server, reconnect when it
        is time. Never blocks."""
        link = self._link
        if link is not None:
            link.connection.pump()
            self._note_health(link)
            if link.connection.is_lost:
                self._drop_link()
        elif self._clock() >= self._next_attempt_s:
            self._reconnect()
        self._give_up_late_stores()
        for lost in list(self._lost):
            successor = link.connection if link is not None and link.is_open else None
            lost.reap(successor, self._clock())
            if lost.is_over:
                self._lost.remove(lost)
                lost.close()
        self._alarm()

    def lookup(self, request: str, keys: Sequence[bytes]) -> Lookup:
        """Ask how many of `keys` are held; a miss at once when the server is not usable."""
        deadline_s = self._clock() + self.settings.lookup_timeout_ms / 1000
        connection = self._link.connection if self._link and self.is_usable else None
        return Lookup(connection, request, tuple(keys), deadline_s, self._clock)

    def retrieve(
        self,
        request: str,
        lease: int,
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        layers_per_slice: int,
        ticket: int | None = None,
    ) -> Retrieve | None:
        """Begin to load leased chunks into blocks; None when the server is gone or all slots are
        taken: recompute then. `ticket` is one of `write_ticket`, where the blocks may still be
        written by work enqueued before."""
        transfers = self._transfers()
        if transfers is None or not transfers.has_free_slot:
            return None
        retrieve = transfers.retrieve(
            request,
            lease,
            start_tokens,
            block_ids,
            layers_per_slice,
            ticket,
            self._clock() + self.settings.retrieve_timeout_ms / 1000,
        )
        self._watchdog.watch()
        return retrieve

    def cancel(self, retrieve: Retrieve) -> None:
        """Give up a retrieve; its pages are the engine's again when it `is_over`."""
        for link in [self._link, *self._lost]:
            if link is not None and link.board is retrieve.board and link.transfers is not None:
                link.transfers.cancel(retrieve)

    def store(
        self, parent: bytes, keys: Sequence[bytes], block_ids: Sequence[BlockIds], ticket: int
    ) -> Store | None:
        """Begin to store full chunks after `ticket`, written since the last `poll`; None when there
        is no server. It is over after `store_timeout_ms` at the latest, at the next `poll`."""
        transfers = self._transfers()
        if transfers is None:
            return None
        deadline_s = self._clock() + self.settings.store_timeout_ms / 1000
        return transfers.store(parent, keys, block_ids, ticket, deadline_s)

    def give_up_stores(self) -> int:
        """Give up every store in flight: it is over, and what of it is not found yet never will be.
        Returns how many. For an engine that resets its caches."""
        return sum(transfers.give_up_stores() for transfers in self._open_transfers())

    def write_ticket(self, stream: Any = None) -> int:
        """A ticket that is reached once everything enqueued on the compute stream is done."""
        transfers = self._transfers()
        if transfers is None:
            return 0  # there is nobody to read it
        assert self._link is not None
        ticket = transfers.next_ticket()
        self.device.write_ticket(self._link.board, ticket, stream)
        return ticket

    def end_request(self, request: str) -> None:
        """The request is over: its lease ends, its retrieves are cancelled."""
        self._send(lambda number: protocol.EndRequest(number, request))

    def end_lease(self, lease: int) -> None:
        """The hit is not used."""
        self._send(lambda number: protocol.EndLease(number, lease))

    def close(self) -> None:
        """End the connection and the watchdog, and give up all stores; the engine's memory must
        outlive open retrieves."""
        self._watchdog.stop()
        self.give_up_stores()
        if self._link is not None:
            self._drop_link()
        for link in self._lost:
            link.close()
        self._lost.clear()

    def _transfers(self) -> Transfers | None:
        return self._link.transfers if self._link is not None and self._link.is_open else None

    def _open_transfers(self) -> Iterator[Transfers]:
        """Of this connection and of lost ones; also called by the watchdog's thread."""
        for link in [self._link, *self._lost]:
            if link is not None and link.transfers is not None:
                yield link.transfers

    def _send(self, make: Callable[[int], protocol.Message]) -> None:
        if self._link is not None and not self._link.connection.is_lost:
            self._link.connection.call(make, lambda _: None)

    def _in_flight(self) -> Iterator[Retrieve]:
        """Every retrieve not yet acknowledged; also called by the watchdog's thread."""
        for transfers in self._open_transfers():
            yield from list(transfers.retrieves.values())

    def _new_link(self) -> Link:
        return Link(self.settings, self.device, self.engine, self.label, self._memory)

    def _reconnect(self) -> None:
        self._next_attempt_s = self._clock() + self.settings.reconnect_every_ms / 1000
        try:
            self._link = self._new_link()
        except (OSError, LaminaError) as error:  # a cache, not a dependency
            self.note_trouble(str(error))

    def _drop_link(self) -> None:
        assert self._link is not None
        self._link.connection.close()
        self._lost.append(self._link)
        self._link = None
        self._next_attempt_s = self._clock() + self.settings.reconnect_every_ms / 1000

    def _note_health(self, link: Link) -> None:
        if link.connection.is_lost:
            said = link.refusal or link.connection.parting_word
            reason = f"{said.cause}. {said.remedy}" if said else "the server closed the connection"
            self.note_trouble(reason)
        elif link.is_open and link.connection.heartbeat_age_s() > ALARM_AFTER_S:
            self.note_trouble(
                f"the server (pid {link.connection.server.pid}) is silent. "
                "It may be stopped, or the host overloaded"
            )
        elif self._last_trouble and self.is_usable:
            log.info("%s has its cache back", self.label)
            self._last_trouble = ""

    def _give_up_late_stores(self) -> None:
        """Say so once, and again only after a store has succeeded."""
        late = 0
        for transfers in self._open_transfers():
            self._are_stores_late &= not transfers.take_stored()
            late += transfers.give_up_stores(self._clock())
        if late and not self._are_stores_late:
            self._are_stores_late = True
            log.warning(
                "%s has given up %d stores that were not done in %d ms: the server is stopped or "
                "starved, or its link is busy. Continue it, give it a core, or raise "
                "lamina.store_timeout_ms",
                self.label,
                late,
                self.settings.store_timeout_ms,
            )

    def _alarm(self) -> None:
        """Say so when pages stay quarantined, once each time, and when they are back."""
        quarantined = self.quarantined
        if not quarantined:
            if self._is_alarmed:
                log.info("%s has its quarantined pages back", self.label)
            self._quarantined_since_s, self._is_alarmed = None, False
        elif self._quarantined_since_s is None:
            self._quarantined_since_s = self._clock()
        elif not self._is_alarmed and self._clock() - self._quarantined_since_s > ALARM_AFTER_S:
            self._is_alarmed = True
            log.error(
                "%s has quarantined the pages of %d failed transfers: the server may still write "
                "them until it answers or its process ends. Continue or kill it",
                self.label,
                quarantined,
            )

    def note_trouble(self, trouble: str) -> None:
        """Log why there is no cache, once however often it is tried."""
        if trouble != self._last_trouble:
            log.warning("%s goes on without a cache: %s", self.label, trouble)
        self._last_trouble = trouble
