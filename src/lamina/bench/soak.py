"""The soak: engines on a server, with something breaking every few seconds, and every byte checked.

    engines   `soak_worker` processes; each knows the bytes of every chunk that it can find
    faults    kills (with restart) and stops of engines and of the server, copies that fail; aborts,
              preemptions, corrupt leases and evictions come from the engines themselves
    verdict   no wrong byte, no hang, no leak, and the memory of a server that lives on is flat

The server is killed in the first half only, so that the second shows one server's memory over a
long time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from lamina import protocol
from lamina.bench.processes import private_socket
from lamina.bench.soak_engine import CHUNK_TOKENS
from lamina.bench.soak_results import (
    ENGINE_KILLED,
    ENGINE_STOPPED,
    LANE_ERROR,
    SERVER_KILLED,
    SERVER_STOPPED,
    ServerLife,
    SoakReport,
    SoakSpec,
)
from lamina.bench.soak_worker import Progress
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import LaminaError, ServerUnavailableError
from lamina.settings import ClientSettings

FAULTS = {
    LANE_ERROR: 35,
    ENGINE_KILLED: 25,
    ENGINE_STOPPED: 20,
    SERVER_STOPPED: 14,
    SERVER_KILLED: 6,
}
"""How often each comes, relative to each other."""
HANG_AFTER_S = 60.0
_LONGEST_STOP_S = 3.0
_SAMPLE_EVERY_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Engine:
    """One engine's process, its reports read by a thread."""

    def __init__(self, socket: Path, seed: int) -> None:
        command = [sys.executable, "-m", "lamina.bench.soak_worker", str(socket), str(seed)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.progress: Progress | None = None
        self.heard_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(msgspec.DecodeError):  # cut off by a kill
                self.progress = msgspec.json.decode(line, type=Progress)
                self.heard_s = time.monotonic()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("end\n")
            self.process.stdin.flush()

    def wait(self, timeout_s: float = HANG_AFTER_S) -> None:
        self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Server:
    """One server's process, its memory sampled by the driver."""

    def __init__(self, socket: Path, spec: SoakSpec) -> None:
        arguments = [str(socket), str(spec.arena_bytes), str(CHUNK_TOKENS)]
        self._warm_up_s = spec.warm_up_s
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lamina.bench.soak_server", *arguments]
        )
        self.started_s = time.monotonic()
        self.life = ServerLife(lived_s=0.0)
        self.socket = socket

    def sample(self) -> None:
        """Note its resident memory."""
        self.life.lived_s = time.monotonic() - self.started_s
        if self.life.lived_s < self._warm_up_s:
            return
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            rss = pages * _PAGE_BYTES
            self.life.rss_least = min(self.life.rss_least or rss, rss)
            self.life.rss_most = max(self.life.rss_most, rss)

    def stats(self) -> dict[str, float]:
        """Its counters and gauges; waits until it answers."""
        until_s = time.monotonic() + HANG_AFTER_S
        while True:
            client = Client(ClientSettings(socket=self.socket), HostWorkerDevice(), "soak")
            try:
                client.connect()
                reply = client.ask(protocol.GetStats)
                assert isinstance(reply, protocol.Stats)
                return reply.values
            except ServerUnavailableError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)
            finally:
                client.close()

    def open_files(self) -> int:
        """The fewest that it has had open within a second: whoever asked it something has left."""
        counts = []
        for _ in range(20):
            counts.append(len(os.listdir(f"/proc/{self.process.pid}/fd")))
            time.sleep(0.05)
        return min(counts)


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
        self._server = _Server(socket, spec)
        self._engines: list[_Engine] = []

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
        self._server = _Server(self._socket, self._spec)
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

    def _new_engine(self) -> _Engine:
        self._seed += 1
        return _Engine(self._socket, self._seed)

    def _count(self, engine: _Engine) -> None:
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
        names = ("pins", "leases", "queued_transfers")
        left = [f"the server has {stats[name]:g} {name}" for name in names if stats[name]]
        if stats["sessions"] > 1:
            left.append(f"the server has {stats['sessions'] - 1:g} sessions")
        return left

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


def _last_words(engine: _Engine) -> str:
    said = engine.progress.wrong if engine.progress is not None else ""
    return said or f"an engine ended by itself (exit code {engine.process.returncode})"


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts) if counts[name]}
