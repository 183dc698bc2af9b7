"""The server process: puts the parts together, serves, and stops without losing a reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from lamina import __version__
from lamina.board import TransferStatus
from lamina.devices.base import ServerDevice
from lamina.devices.cuda import server_devices
from lamina.devices.host import NAME as HOST
from lamina.devices.host import HostServerDevice
from lamina.errors import ErrorCode, SettingsError
from lamina.server.arena import Arena, ArenaFiller
from lamina.server.counters import Counters
from lamina.server.index import Index
from lamina.server.lane import Lanes
from lamina.server.leases import LeaseTable
from lamina.server.limits import TRANSFER_TTL_S, StoreBudget
from lamina.server.listener import MAX_SESSIONS, Listener
from lamina.server.mappings import Memories
from lamina.server.memory import arena_bytes, memory_limits
from lamina.server.rpc import Connection, handlers_of
from lamina.server.service import Cache, Service
from lamina.server.sessions import Session, Sessions
from lamina.server.status import StatusServer, status_app
from lamina.server.turns import Chores
from lamina.settings import ServerSettings, parse_address

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""How long transfers in flight may take to end before they are cut short at a stop."""
CLOSE_GRACE_S = 1.0
"""How long a client may then take to read its last replies."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """One cache server. Everything but the lanes and the filler runs on its event loop.

    Making one takes the socket's lock; raises `SettingsError` when it cannot, and for an arena
    larger than this process may have. `devices` by name; the host and every visible GPU by default.
    `clock` in seconds is what leases run out by. `reopen_log` is called on a SIGHUP.
    """

    def __init__(
        self,
        settings: ServerSettings,
        devices: Mapping[str, ServerDevice] | None = None,
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
        reopen_log: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.counters = counters or Counters()
        self._reopen_log = reopen_log
        self.arena = Arena(arena_bytes(settings.arena_bytes, memory_limits()))
        self._chores = Chores()
        self.index = Index(self.arena, self._chores.add)
        self.leases = LeaseTable(self.index, settings.lease_ttl_s, clock, self._chores.add)
        self.lanes = Lanes(devices or _all_devices(settings))
        self._memories = Memories()
        self.sessions = Sessions()
        self.budget = StoreBudget(self.arena.capacity_bytes)
        self._clock = clock
        self._begun_s = time.monotonic()
        service = Service(
            settings,
            Cache(self.index, self.leases, self.budget, self._chores),
            self.lanes,
            self._memories,
            self.sessions,
            self.counters,
            clock,
            self.gauges,
        )
        self._handlers = handlers_of(service)
        self._listener = Listener(settings.socket, settings.allow_uids)
        self._transports: dict[Session, asyncio.Transport] = {}
        self._stop: asyncio.Event | None = None
        self.http_address: tuple[str, int] | None = None

    def gauges(self) -> dict[str, float]:
        """Current values, by name."""
        return {
            "uptime_s": round(time.monotonic() - self._begun_s, 3),
            "chunk_tokens": self.settings.chunk_tokens,
            "sessions": len(self.sessions),
            "chunks": len(self.index),
            "pins": self.index.pins,
            "leases": len(self.leases),
            "evicted_chunks": self.index.evicted,
            "queued_transfers": self.lanes.queued,
            "arena_capacity_bytes": self.arena.capacity_bytes,
            "arena_ready_bytes": self.arena.ready_bytes,
            "arena_free_bytes": self.arena.free_bytes,
            "arena_reserved_bytes": self.budget.reserved_bytes,
            "socket_lost": int(self._listener.is_lost),
        }

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` or a SIGTERM or SIGINT; `ready` is called once connections are taken.
        A second signal ends the process at once.

        Raises `SettingsError` when the HTTP port cannot be had.
        """
        loop = asyncio.get_running_loop()
        stop = self._stop = asyncio.Event()

        def end(*_: object) -> None:
            """The next one is the kernel's: it works whatever holds us up."""
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _call_on(loop, stop.set)

        # Not with `add_signal_handler`: its signals go through the pipe by which other threads wake
        # the loop, and one that arrives while that is full of wake-ups is lost.
        with contextlib.suppress(ValueError):  # not the main thread: no signals
            signal.signal(signal.SIGHUP, lambda *_: _call_on(loop, self._reopen_log))
            for number in _STOP_SIGNALS:
                signal.signal(number, end)

        def publish(nbytes: int) -> None:
            _call_on(loop, partial(self.arena.extend, nbytes))

        async with contextlib.AsyncExitStack() as stack:
            if self.settings.http is not None:  # before the socket, which engines connect to
                await self._serve_http(self.settings.http, stack)
            filler = ArenaFiller(self.arena, self.lanes.near_cpus(), self.lanes.pin, publish)
            stack.callback(filler.stop)
            self._listener.open()
            tasks = [
                asyncio.create_task(
                    self._listener.serve(self._welcome, self._has_room, self._count_refusal)
                ),
                asyncio.create_task(self.sessions.beat()),
                asyncio.create_task(self._end_overdue()),
                asyncio.create_task(self._chores.run()),
            ]
            stack.push_async_callback(_end_tasks, tasks)
            stack.callback(self._listener.close)
            log.info("lamina %s serves %s", __version__, self.settings.socket)
            ready()
            await stop.wait()
            log.info("stopping")
            await self._drain()
            await self._memories.stop()
        self.lanes.stop()

    def stop(self) -> None:
        """Stop serving. On the event loop, or through its `call_soon_threadsafe`."""
        assert self._stop is not None, "the server does not run"
        self._stop.set()

    def _is_stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    async def _welcome(self, session: Session, sock: socket.socket) -> None:
        self.sessions.add(session)
        connection = Connection(
            session, self._handlers, self._is_stopping, self._count_refusal, self._lost
        )
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection, sock
        )
        self._transports[session] = transport

    def _has_room(self) -> bool:
        return len(self.sessions) < MAX_SESSIONS

    def _lost(self, session: Session) -> None:
        self._transports.pop(session, None)
        self.leases.end_owner(session)
        self.sessions.end(session)

    def _count_refusal(self, code: ErrorCode) -> None:
        self.counters.refused[code.value] += 1

    async def _end_overdue(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease_ttl_s / 4))
            while expired := self.leases.expire():
                self.counters.leases_expired += expired
                await asyncio.sleep(0)
            overdue = self.sessions.cancel_overdue(self._clock() - TRANSFER_TTL_S)
            self.counters.overdue_transfers += overdue

    async def _serve_http(self, address: str, stack: contextlib.AsyncExitStack) -> None:
        host, port = parse_address(address)
        try:
            (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            self._listener.close()
            raise SettingsError(
                f"{address} cannot be served: {error.strerror}", "Choose another --http"
            ) from error
        self.http_address = listening.getsockname()[:2]
        http = StatusServer(status_app(self.counters, self.gauges), host, port)
        task = asyncio.create_task(http.serve([listening]))

        async def end() -> None:
            http.should_exit = True
            await task

        stack.push_async_callback(end)

    async def _drain(self) -> None:
        """Let transfers in flight end, so that each gets its reply; then close every connection."""
        deadline = time.monotonic() + STOP_GRACE_S
        while any(session.transfers or session.in_hand for session in self.sessions):
            if time.monotonic() > deadline:
                for session in self.sessions:
                    session.cancel(lambda _: True, TransferStatus.STOPPED)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # the last replies are written by tasks that are ready now
        for transport in list(self._transports.values()):
            transport.close()
        deadline = time.monotonic() + CLOSE_GRACE_S
        while self._transports:
            if time.monotonic() > deadline:  # whoever is left does not read its replies
                for transport in list(self._transports.values()):
                    transport.abort()
            await asyncio.sleep(0.005)
        await self.sessions.all_over()


def _all_devices(settings: ServerSettings) -> dict[str, ServerDevice]:
    devices: dict[str, ServerDevice] = {HOST: HostServerDevice(settings.host_link_gbps)}
    devices.update(server_devices())
    return devices


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody needs it any more
        loop.call_soon_threadsafe(call)


async def _end_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
