"""The soak: engines on a server, with something breaking every few seconds, and every byte checked.

    engines   `soak_worker` processes; each knows the bytes of every chunk that it can find
    faults    kills (with restart) and stops of engines and of the server, copies that fail; aborts,
              preemptions, corrupt leases and evictions come from the engines themselves
    verdict   no wrong byte, no hang, no leak, and the memory of a server that lives on is flat

The server is killed in the first half only, so that the second shows one server's memory over a
long time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lamina.errors import LaminaError
from lamina_lab.bench.processes import private_socket
from lamina_lab.soak.processes import HANG_AFTER_S, EngineProcess, WatchedServer
from lamina_lab.soak.results import (
    ENGINE_KILLED,
    ENGINE_STOPPED,
    LANE_ERROR,
    SERVER_KILLED,
    SERVER_STOPPED,
    ServerLife,
    SoakReport,
    SoakSpec,
)

FAULTS = {
    LANE_ERROR: 35,
    ENGINE_KILLED: 25,
    ENGINE_STOPPED: 20,
    SERVER_STOPPED: 14,
    SERVER_KILLED: 6,
}
"""How often each comes, relative to each other."""
_LONGEST_STOP_S = 3.0
_SAMPLE_EVERY_S = 1.0


class Soak:
    """`run` once. `progress` is called with a line every few seconds."""

    def __init__(self, spec: SoakSpec, socket: Path, progress: Callable[[str], None]) -> None:
        self._spec = spec
        self._socket = socket
        self._progress = progress
        self._random = random.Random(spec.seed)
        self._seed = spec.seed * 100_000
        self._operations: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._hangs: list[str] = []
        self._leaks: list[str] = []
        self._lives: list[ServerLife] = []
        self._checked_bytes = 0
        self._stopped: list[tuple[float, subprocess.Popen[str] | subprocess.Popen[bytes]]] = []
        self._server = WatchedServer(socket, spec)
        self._engines: list[EngineProcess] = []

    def run(self) -> SoakReport:
        try:
            self._server.stats()
            self._engines = [self._new_engine() for _ in range(self._spec.engines)]
            self._break_things()
            self._finish()
        finally:
            for engine in self._engines:
                engine.kill()
            self._server.process.kill()
            self._server.process.wait()
        return SoakReport(
            spec=self._spec,
            operations=_sorted(self._operations),
            faults=_sorted(self._faults),
            retries=_sorted(self._retries),
            errors=_sorted(self._errors),
            wrong_bytes=self._wrong,
            hangs=self._hangs,
            leaks=self._leaks,
            servers=self._lives,
            checked_bytes=self._checked_bytes,
        )

    def _break_things(self) -> None:
        began_s = time.monotonic()
        lasts_s = self._spec.minutes * 60
        every_s = 60 / self._spec.faults_per_minute
        next_fault_s = next_sample_s = began_s
        while (now_s := time.monotonic()) < began_s + lasts_s and not (self._wrong or self._hangs):
            self._go_on(now_s)
            if now_s >= next_fault_s:
                next_fault_s += every_s * self._random.uniform(0.5, 1.5)
                self._break(may_kill_server=now_s < began_s + lasts_s / 2)
            if now_s >= next_sample_s:
                next_sample_s += _SAMPLE_EVERY_S
                self._server.sample()
                self._look_after_engines(now_s)
                self._progress(self._line(now_s - began_s))
            time.sleep(0.01)

    def _break(self, may_kill_server: bool) -> None:
        (fault,) = self._random.choices(list(FAULTS), list(FAULTS.values()))
        if fault == SERVER_KILLED and not may_kill_server:
            fault = SERVER_STOPPED
        self._faults[fault] += 1
        number = self._random.randrange(len(self._engines))
        if fault == LANE_ERROR:
            self._server.process.send_signal(signal.SIGUSR1)
        elif fault == SERVER_STOPPED:
            self._stop(self._server.process)
        elif fault == ENGINE_STOPPED:
            self._stop(self._engines[number].process)
        elif fault == ENGINE_KILLED:
            self._engines[number].kill()
            self._replace(number)
        else:
            self._replace_server()

    def _replace_server(self) -> None:
        self._server.process.kill()
        self._server.process.wait()
        self._lives.append(self._server.life)
        self._server = WatchedServer(self._socket, self._spec)
        self._server.stats()  # it can be signalled now
        self._retries["servers restarted"] += 1

    def _stop(self, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        stop_s = _LONGEST_STOP_S * self._random.random() ** 2  # mostly short
        self._stopped.append((time.monotonic() + stop_s, process))

    def _go_on(self, now_s: float) -> None:
        """Let those go on that have been stopped for long enough."""
        for until_s, process in list(self._stopped):
            if now_s >= until_s:
                process.send_signal(signal.SIGCONT)
                self._stopped.remove((until_s, process))

    def _look_after_engines(self, now_s: float) -> None:
        for number, engine in enumerate(self._engines):
            if engine.process.poll() is not None:
                self._wrong.append(_last_words(engine))
                self._replace(number)
            elif now_s - engine.heard_s > HANG_AFTER_S:
                self._hangs.append(f"an engine made no progress for {HANG_AFTER_S:g} s")
                engine.kill()
                self._replace(number)
        if self._server.process.poll() is not None:
            self._wrong.append(f"the server ended by itself ({self._server.process.returncode})")
            self._replace_server()

    def _replace(self, number: int) -> None:
        """The engine's process has ended: count what it has done, and start another."""
        self._count(self._engines[number])
        self._retries["engines restarted"] += 1
        self._engines[number] = self._new_engine()

    def _new_engine(self) -> EngineProcess:
        self._seed += 1
        return EngineProcess(self._socket, self._seed)

    def _count(self, engine: EngineProcess) -> None:
        progress = engine.progress
        if progress is not None:
            self._operations.update(progress.operations)
            self._errors.update(progress.errors)
            self._retries["reconnections"] += progress.reconnected
            self._checked_bytes += progress.checked_bytes

    def _finish(self) -> None:
        """End all engines in order; then the server must be as one that has just started."""
        self._go_on(float("inf"))
        for engine in self._engines:
            engine.ask_to_end()
        for engine in self._engines:
            try:
                engine.wait(2 * HANG_AFTER_S)
            except subprocess.TimeoutExpired:
                self._hangs.append("an engine did not end")
                engine.kill()
            self._count(engine)
            if engine.progress is None or not engine.progress.is_last or engine.progress.wrong:
                self._wrong.append(_last_words(engine))
            else:
                self._leaks += engine.progress.leaks
                self._hangs += [engine.progress.hang] if engine.progress.hang else []
        self._engines.clear()
        self._check_server()

    def _check_server(self) -> None:
        until_s = time.monotonic() + HANG_AFTER_S
        while (left := self._left_at_server()) and time.monotonic() < until_s:
            time.sleep(0.1)
        self._leaks += left
        stats = self._server.stats()
        self._operations["chunks evicted by the last server"] = int(stats["evicted_chunks"])
        files = self._server.open_files()
        self._replace_server()
        if (more := files - self._server.open_files()) > 0:
            self._leaks.append(f"the server has {more} files more open than one that just started")

    def _left_at_server(self) -> list[str]:
        stats = self._server.stats()
        names = ("pins", "leases", "queued_transfers", "sessions")
        return [f"the server has {stats[name]:g} {name}" for name in names if stats[name]]

    def _line(self, elapsed_s: float) -> str:
        progresses = [engine.progress for engine in self._engines if engine.progress is not None]
        operations = self._operations.total() + sum(
            sum(progress.operations.values()) for progress in progresses
        )
        return (
            f"{elapsed_s:5.0f} s  {operations:,} operations  {self._faults.total()} faults  "
            f"{self._server.life.rss_most / 2**20:.1f} MiB"
        )


def run_soak(spec: SoakSpec, progress: Callable[[str], None] = lambda line: None) -> SoakReport:
    """Run the soak; it takes `spec.minutes` and up to two minutes more if something hangs."""
    if spec.engines < 1 or spec.minutes <= 0 or spec.faults_per_minute <= 0:
        raise LaminaError("a soak needs engines, time and faults", "Use positive numbers")
    with private_socket() as socket:
        return Soak(spec, socket, progress).run()


def _last_words(engine: EngineProcess) -> str:
    said = engine.progress.wrong if engine.progress is not None else ""
    return said or f"an engine ended by itself (exit code {engine.process.returncode})"


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts) if counts[name]}
