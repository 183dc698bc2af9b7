"""A client's connections: the one there is, those that were lost, and what is in flight on them.

`Client` is made of this and of the calls that an engine makes over it. Engine's thread only, but
for what the watchdog reads (`_in_flight`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from lamina import protocol
from lamina.client import forks
from lamina.client.checks import check_name
from lamina.client.link import Link, Memory
from lamina.client.notices import ALARM_AFTER_S, Notices
from lamina.client.retrieve import Retrieve
from lamina.client.transfers import Transfers
from lamina.client.watchdog import Watchdog
from lamina.client.workers import Workers
from lamina.devices.base import EngineRings, WorkerDevice
from lamina.errors import (
    DeviceError,
    LaminaError,
    RequestRefusedError,
    ServerUnavailableError,
    SettingsError,
    UsageError,
)
from lamina.geometry import Allocation, Geometry, PageMap
from lamina.protocol import Region
from lamina.settings import AUTO, ClientSettings
from lamina.shards import ALONE, Shard

_Self = TypeVar("_Self", bound="Links")
_PATIENCE_S = 0.01
"""How long `connect` waits at a time while a former connection comes to its end."""


class Links:
    """Connects, notices that a server is lost, reconnects, and frees what was in flight with it.

    Raises `UsageError` for names that are no text.
    """

    def __init__(
        self,
        settings: ClientSettings,
        device: WorkerDevice,
        label: str,
        engine: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
    ) -> None:
        check_name("the engine's label", label)
        check_name("the model's name", model)
        check_name("the engine's name", engine or "")
        self.settings = settings
        self.device = device
        self.label = label
        self.model = model
        self.engine = engine or uuid.uuid4().hex
        self._clock = clock
        self._memory: Memory | None = None
        self._link: Link | None = None
        self._lost: list[Link] = []
        self._next_attempt_s = 0.0
        self._chunk_tokens = settings.chunk_tokens
        self._notices = Notices(label)
        self._workers = Workers(settings.reconnect_every_ms / 1000)
        self._watchdog = Watchdog(self._in_flight, clock)
        self._ended_as = ""
        """Why the client cannot be used any more."""
        forks.close_in_children(self)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def register(
        self,
        geometry: Geometry,
        page_map: PageMap,
        allocations: Iterable[Allocation],
        description: bytes = b"",
        shard: Shard = ALONE,
    ) -> None:
        """Say what the engine's KV is and where it lies; before the first `connect` or `poll`.

        `allocations` are what the regions of the page map are in this process. The server copies
        into them, or else into rings that are made here (`data_path`): nothing may be running on
        the device then that must not be waited for. `description`, at most 4096 bytes, is what the
        engine's other processes get to know of this worker (`workers`). Where several workers keep
        the engine's KV, `shard` says which part is this one's. Raises `GeometryError`,
        `DeviceError` or `SettingsError` when it cannot be served, `UsageError` once there is a
        connection or memory was registered before.
        """
        self._check_open()
        if self._memory is not None or self._link is not None:
            raise UsageError(
                "the client " + ("has registered" if self._memory else "is connected") + " already",
                "Register once, before the first connect or poll; make another client for other KV",
            )
        places = tuple(allocations)
        page_map.check(geometry, [place.nbytes for place in places])
        width, layers = self.settings.layerwise_overlap, len(geometry.layers)
        if width != AUTO and width > layers:
            raise SettingsError(
                f"layerwise_overlap is {width}, but the model has {layers} layers",
                f"Use 1 to {layers}, or false for whole transfers",
            )
        regions, rings = self._shown_to_server(geometry, page_map, places)
        memory = Memory(geometry, page_map, regions, description, shard, rings)
        protocol.check(memory.to_message(0, self.device.name))
        self._memory = memory

    def _shown_to_server(
        self, geometry: Geometry, page_map: PageMap, places: Sequence[Allocation]
    ) -> tuple[tuple[Region, ...], EngineRings | None]:
        """The KV itself, or rings (`data_path`). Raises `DeviceError`."""
        path = self.settings.data_path
        if path == "ring" or (path == AUTO and self.device.prefers_rings(geometry)):
            try:
                rings = self.device.rings(geometry, page_map, places)
                return rings.regions, rings
            except DeviceError as error:
                if path != AUTO:
                    raise
                self._notices.no_rings(error)
        return tuple(map(self.device.export, places)), None

    def connect(self) -> None:
        """Wait until the server takes us, at most `connect_timeout_ms`.

        Raises `ServerUnavailableError` when none answers, `RequestRefusedError` with the server's
        reason when it will not have us.
        """
        self._check_open()
        timeout_s = self.settings.connect_timeout_ms / 1000
        until_s = time.monotonic() + timeout_s
        link = self._link = self._link or self._new_link()
        while not link.is_ready:
            self._end_lost(link)
            link.connection.wait(max(0.0, min(_PATIENCE_S, until_s - time.monotonic())))
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
    def has_rings(self) -> bool:
        """Whether KV goes through rings in this worker's memory (`data_path`)."""
        return self._memory is not None and self._memory.rings is not None

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
        is time. Never blocks, but for a GPU: what a lost connection leaves there is given back once
        all that the engine has enqueued is done."""
        self._check_open()
        link = self._link
        if link is not None:
            link.connection.pump()
            self._note_health(link)
            if link.connection.is_lost:
                self._drop_link()
        elif self._clock() >= self._next_attempt_s:
            self._reconnect()
        for transfers in self._open_transfers():
            transfers.poll()
        self._give_up_late_stores()
        self._end_lost(link)
        self._notices.quarantined(self.quarantined, self._clock())

    def _end_lost(self, link: Link | None) -> None:
        """Free what lost connections leave, as far as that is proven by now; then the rings may be
        the present one's."""
        for lost in list(self._lost):
            has_taken_us = link is not None and link.is_welcomed and not link.connection.is_lost
            successor = link.connection if link is not None and has_taken_us else None
            lost.reap(successor, self._clock())
            if lost.is_over:
                self._lost.remove(lost)
                with forks.no_fork:
                    lost.close()
        if link is not None:
            link.go_on()

    def give_up_stores(self) -> int:
        """Give up every store in flight: it is over, and what of it is not found yet never will be.
        Returns how many. For an engine that resets its caches."""
        return sum(transfers.give_up_stores() for transfers in self._open_transfers())

    def close(self) -> None:
        """End the connection and the watchdog, and give up all stores; the engine's memory must
        outlive open retrieves. Does nothing the second time, or in a forked child."""
        if self._ended_as:
            return
        self._ended_as = "the client is closed"
        self.give_up_stores()
        if self._link is not None:
            self._drop_link()
        for transfers in self._open_transfers():
            transfers.end_waits()
        self._watchdog.watch()
        for link in self._lost:
            link.leave_device()
        self._watchdog.stop()
        with forks.no_fork:
            for link in self._lost:
                link.close()
            self._lost.clear()
        if self._memory is not None and self._memory.rings is not None:
            self._memory.rings.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of what is open. The watchdog is not there."""
        links, self._link, self._lost = [self._link, *self._lost], None, []
        self._ended_as = self._ended_as or "the client belongs to the process that has made it"
        for link in links:
            if link is not None:
                link.leave_to_parent()

    def note_trouble(self, trouble: str) -> None:
        """Log why there is no cache, once however often it is tried."""
        self._notices.trouble(trouble)

    def _check_open(self) -> None:
        if self._ended_as:
            raise UsageError(self._ended_as, "Make another one")

    def _check_registered(self) -> None:
        self._check_open()
        if self._memory is None:
            raise UsageError(
                "the client has registered no KV memory", "Call `register` before `connect`"
            )

    def _transfers(self) -> Transfers | None:
        return self._link.transfers if self._link is not None and self._link.is_open else None

    def _open_transfers(self) -> Iterator[Transfers]:
        """Of this connection and of lost ones; also called by the watchdog's thread."""
        for link in [self._link, *self._lost]:
            if link is not None and link.transfers is not None:
                yield link.transfers

    def _in_flight(self) -> Iterator[Retrieve]:
        """Every retrieve not yet acknowledged; also called by the watchdog's thread."""
        for transfers in self._open_transfers():
            yield from list(transfers.retrieves.values())

    def _new_link(self) -> Link:
        with forks.no_fork:
            return Link(
                self.settings,
                self.device,
                self.engine,
                self.label,
                self.model,
                self._memory,
                self._notices,
                lambda: not self._lost,
            )

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
        elif self.is_usable:
            self._notices.no_trouble()

    def _give_up_late_stores(self) -> None:
        late = 0
        for transfers in self._open_transfers():
            if transfers.take_stored():
                self._notices.store_done()
            late += transfers.give_up_stores(self._clock())
        self._notices.stores_given_up(late, self.settings.store_timeout_ms)
