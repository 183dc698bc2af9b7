"""A scene: a server, its engines, and what must hold when it is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.engine import FaultEngine
from tests.support.fault_server import FaultServer
from tests.support.remote import Remote
from tests.support.wait import eventually

HIT_TOKENS = 256
HITS_AGAIN_WITHIN_S = 5.0
NOTHING_HELD = {"pins": 0, "leases": 0, "queued_transfers": 0}


class Scene:
    """Real processes at one socket. `end` checks that nothing is left of anything."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._processes: list[Remote] = []
        self.engines: list[FaultEngine] = []
        self.server = self.start_server()
        self.engine = self.start_engine()
        self.replies_held: set[str] = set()

    def start_server(self, **settings: Any) -> FaultServer:
        """A server; the one before it must be gone."""
        self.server = FaultServer(self.socket, **settings)
        self._processes.append(self.server)
        return self.server

    def start_engine(self, name: str = "engine", **settings: Any) -> FaultEngine:
        engine = FaultEngine(self.socket, name, **settings)
        self._processes.append(engine)
        self.engines.append(engine)
        engine.call("connect")
        return engine

    def kill_server(self) -> None:
        self.server.kill()
        self.replies_held.clear()

    def kill_engine(self, engine: FaultEngine) -> None:
        engine.kill()
        self.engines.remove(engine)

    def is_server_alive(self) -> bool:
        return self.server.process.is_alive()

    def hold_replies(self, kind: str) -> None:
        self.replies_held.add(kind)
        self.server.call("replies.hold", kind)

    def open_all(self) -> None:
        """Whatever was held may go on."""
        if self.is_server_alive():
            self.server.call("retrieves.open")
            self.server.call("stores.open")
            for kind in self.replies_held:
                self.server.call("replies.release", kind)
        self.replies_held.clear()

    def wait_for_gauges(self, **wanted: float) -> None:
        """Fails when the server's gauges do not come to these values."""

        def are_there() -> bool:
            gauges = self.server.gauges()
            return all(gauges[name] == value for name, value in wanted.items())

        eventually(are_there)

    def step_until(
        self, condition: Callable[[], object], engine: FaultEngine | None = None
    ) -> None:
        """Let an engine, which may have no requests, take steps until something holds."""

        def stepped() -> object:
            (engine or self.engine).call("step")
            return condition()

        eventually(stepped)

    def check_hits(self, engine: FaultEngine, seed: int = 1) -> None:
        """The engine finds a prompt again: stored if need be, retrieved, every bit compared."""
        engine.call("release_tickets")
        eventually(
            lambda: engine.call("hit", f"hit {seed}", seed, True) == HIT_TOKENS, HITS_AGAIN_WITHIN_S
        )

    def end(self) -> None:
        """Nothing is held by anybody, every process ends in order, none is left."""
        self.open_all()
        if not self.is_server_alive():
            self.start_server()
        for engine in self.engines:
            engine.call("finish")
        self.wait_for_gauges(**NOTHING_HELD)
        for engine in self.engines:
            engine.call("close")
            assert engine.join() == 0
        self.wait_for_gauges(sessions=0, **NOTHING_HELD)
        assert self.server.call("errors") == []
        self.server.send(signal.SIGTERM)
        assert self.server.join() == 0
        assert not self.socket.exists()
        for process in self._processes:
            assert not process.process.is_alive(), "a process is left"

    def abandon(self) -> None:
        """After a failed check."""
        for process in self._processes:
            if process.process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()
