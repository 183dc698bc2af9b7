"""A real server process whose slices, stores and messages a test holds, fails or reorders.

`FaultServer.call` reaches these in it: `retrieves` and `stores` are the valves of its lanes
(`support.valve`), `requests` and `replies` hold messages by the name of their type.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import lamina.server.main
from lamina import protocol
from lamina.devices.host import NAME as HOST
from lamina.errors import DeviceError
from lamina.server.rpc import Connection
from lamina.settings import ServerSettings
from tests.support.remote import PATIENCE_S, Remote, jump_wall_clock, serve_commands
from tests.support.valve import ValvedDevice
from tests.support.wait import eventually

_T = TypeVar("_T")

ARENA_BYTES = 16 << 20
LINK_BROKE = DeviceError("the link broke", "Mend it")


class FaultServer(Remote):
    """A server at `socket`; it takes connections when this returns."""

    def __init__(self, socket: Path, **settings: Any) -> None:
        settings = {"arena_bytes": ARENA_BYTES, "chunk_tokens": 64, **settings}
        super().__init__(_main, ServerSettings(socket=socket, **settings))
        self.call("wait_until_serving")

    def gauges(self) -> dict[str, float]:
        values: dict[str, float] = self.call("gauges")
        return values

    def totals(self) -> dict[str, int]:
        values: dict[str, int] = self.call("totals")
        return values


class Held:
    """Messages of chosen types wait here. `hold` and `release` may be called on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, list[Callable[[], None]]] = {}

    def hold(self, kind: str) -> None:
        with self._changed:
            self._held.setdefault(kind, [])

    def wait_until_held(self, kind: str, count: int = 1) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self._held[kind]) >= count, PATIENCE_S)
        assert came, f"no {count} messages of type {kind} came"

    def count(self, kind: str) -> int:
        """How many wait."""
        with self._changed:
            return len(self._held[kind])

    def release(self, kind: str) -> None:
        """Let those that wait go on, on the event loop, and hold no more."""
        with self._changed:
            held = self._held.pop(kind)
        for go_on in held:
            _loop().call_soon_threadsafe(go_on)

    def release_latest_first(self, kind: str) -> None:
        """The same in another order."""
        with self._changed:
            self._held[kind].reverse()
        self.release(kind)

    def drop(self, kind: str) -> None:
        """Lose those that wait, and hold no more."""
        with self._changed:
            del self._held[kind]

    def passes(self, message: protocol.Message, go_on: Callable[[], None]) -> bool:
        """The event loop's side: whether the message may go on at once."""
        with self._changed:
            held = self._held.get(type(message).__name__)
            if held is None:
                return True
            held.append(go_on)
            self._changed.notify_all()
            return False


_requests, _replies = Held(), Held()
_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    return _loops[0]


class HoldingConnection(Connection):
    """Both directions pass the hold points."""

    def _dispatch(self, request: protocol.Request) -> None:
        dispatch = super()._dispatch
        if _requests.passes(request, lambda: dispatch(request)):
            dispatch(request)

    def _reply(self, reply: protocol.Message) -> None:
        send = super()._reply
        if _replies.passes(reply, lambda: send(reply)):
            send(reply)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class _Control:
    """What `FaultServer.call` can call."""

    def __init__(self, settings: ServerSettings) -> None:
        self.device = ValvedDevice()
        self.retrieves, self.stores = self.device.retrieves, self.device.stores
        self.requests, self.replies = _requests, _replies
        self.server = lamina.server.main.Server(settings, {HOST: self.device})
        self.log = _Errors()
        self._serving = threading.Event()
        self._is_freed = threading.Event()

    def wait_until_serving(self) -> None:
        assert self._serving.wait(PATIENCE_S), "the server does not start"
        eventually(lambda: self._on_loop(lambda: self.server.arena.is_filled))

    def gauges(self) -> dict[str, float]:
        return self._on_loop(self.server.gauges)

    def totals(self) -> dict[str, int]:
        return self._on_loop(self.server.counters.totals)

    def break_retrieves(self) -> None:
        self.retrieves.fail_next(LINK_BROKE)

    def break_stores(self) -> None:
        self.stores.fail_next(LINK_BROKE)

    def refused(self, code: str) -> int:
        """How many typed errors of this kind it has sent."""
        return self._on_loop(lambda: self.server.counters.refused[code])

    def expire_leases(self) -> int:
        """Let the time of all leases run out."""

        def expire() -> int:
            leases = self.server.leases
            clock, leases._clock = leases._clock, lambda: float("inf")
            try:
                return leases.expire()
            finally:
                leases._clock = clock

        return self._on_loop(expire)

    def jump_wall_clock(self) -> None:
        jump_wall_clock()

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def hang_up(self) -> None:
        """Hang up on every engine, as after a malformed message."""
        self._on_loop(lambda: [session.hang_up() for session in self.server.sessions])

    def errors(self) -> list[str]:
        """What it logged as errors."""
        return self.log.messages

    def stop(self) -> None:
        self._on_loop(self.server.stop)

    def crowd_loop(self) -> None:
        """Hold the event loop, and wake it up more often than its pipe can take."""
        _loop().call_soon_threadsafe(self._is_freed.wait, PATIENCE_S)
        for _ in range(10_000):
            _loop().call_soon_threadsafe(lambda: None)

    def free_loop(self) -> None:
        self._is_freed.set()

    async def run(self) -> None:
        _loops.append(asyncio.get_running_loop())
        await self.server.run(self._serving.set)

    def _on_loop(self, call: Callable[[], _T]) -> _T:
        async def run() -> _T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), _loop()).result(PATIENCE_S)


def _main(commands: Pipe, settings: ServerSettings) -> None:
    vars(lamina.server.main)["Connection"] = HoldingConnection
    control = _Control(settings)
    logging.getLogger().addHandler(control.log)
    threading.Thread(target=serve_commands, args=(control, commands), daemon=True).start()
    asyncio.run(control.run())
