"""A real server for tests: in a thread, with hold points, or as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lamina.client import Client
from lamina.devices.base import ServerDevice
from lamina.devices.host import NAME as HOST
from lamina.devices.host import HostWorkerDevice
from lamina.server.main import Server
from lamina.settings import ClientSettings, ServerSettings
from tests.support.valve import ValvedDevice
from tests.support.wait import PATIENT, eventually

_T = TypeVar("_T")


class ServerThread:
    """A server on a thread's event loop. `clock_s` is the clock of its leases: virtual time.
    `inner` is the device behind its valves; a host device when none is given."""

    def __init__(self, socket: Path, inner: ServerDevice | None = None, **settings: Any) -> None:
        self.device = ValvedDevice(inner)
        self.clock_s = 0.0
        settings = {"arena_bytes": 64 << 20, "chunk_tokens": 64, **settings}
        self.settings = ServerSettings(socket=socket, **settings)
        self.server = Server(self.settings, {HOST: self.device}, clock=lambda: self.clock_s)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20), "the server did not start"
        eventually(lambda: self.on_loop(lambda: self.server.arena.is_filled))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.run(self._ready.set)

    def on_loop(self, call: Callable[[], _T]) -> _T:
        """Run `call` on the server's event loop and return its result."""

        async def run() -> _T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def after_reading(self, call: Callable[[], _T]) -> _T:
        """The same, once the loop has read what was sent to its sockets before."""

        async def run() -> _T:
            for _ in range(2):  # whatever round we are in, the next one polls the sockets
                await asyncio.sleep(0)
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def gauges(self) -> dict[str, float]:
        return self.on_loop(self.server.gauges)

    def totals(self) -> dict[str, int]:
        return self.on_loop(self.server.counters.totals)

    def stop(self) -> None:
        """Open the valves and stop; the thread has ended when it returns."""
        self.device.retrieves.open()
        self.device.stores.open()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop)
            self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"


class ServerProcess:
    """`lamina serve` as a user runs it. What it says goes to a file, or to `stderr`."""

    def __init__(self, path: Path, *options: str, stderr: int | None = None) -> None:
        self.socket = path
        command = [sys.executable, "-m", "lamina.cli", "serve", "--socket", str(path), *options]
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())
            self.process = subprocess.Popen(
                command, stderr=log if stderr is None else stderr, stdout=log
            )

    @property
    def said(self) -> str:
        """All of its log so far."""
        return os.pread(self._log, 1 << 24, 0).decode()

    def wait_until_serving(self) -> None:
        """Return once it takes connections; the file alone may be a killed server's."""
        eventually(lambda: self._takes_connections() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    def wait_until_filled(self) -> None:
        """Return once all of its arena is there: until then it may have no room for a store, which
        it drops. For servers that log to no other place and on no higher level."""
        eventually(lambda: "is resident" in self.said or self.process.poll() is not None)
        self.wait_until_serving()

    def _takes_connections(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the server and return its exit code."""
        if self.process.poll() is None:
            self.send(number)
            self.send(signal.SIGCONT)
        self.process.wait(20)
        return self.process.returncode


def connected_client(socket: Path, **settings: Any) -> Client:
    """A client without KV memory (as a scheduler has), connected."""
    settings = {**PATIENT, **settings}
    client = Client(ClientSettings(socket=socket, **settings), HostWorkerDevice(), "test")
    client.connect()
    return client
