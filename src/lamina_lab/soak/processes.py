"""The processes of the soak: engines that report, and a server whose memory is watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from lamina import protocol
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError
from lamina.settings import ClientSettings
from lamina_lab.soak.engine import GEOMETRY
from lamina_lab.soak.results import ServerLife, SoakSpec
from lamina_lab.soak.worker import Progress

HANG_AFTER_S = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class EngineProcess:
    """One engine's process, its reports read by a thread."""

    def __init__(self, socket: Path, seed: int) -> None:
        command = [sys.executable, "-m", "lamina_lab.soak.worker", str(socket), str(seed)]
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


class WatchedServer:
    """One server's process, its memory sampled by the driver."""

    def __init__(self, socket: Path, spec: SoakSpec) -> None:
        arguments = [str(socket), str(spec.arena_bytes), str(GEOMETRY.chunk_tokens)]
        self._warm_up_s = spec.warm_up_s
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lamina_lab.soak.server", *arguments]
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
