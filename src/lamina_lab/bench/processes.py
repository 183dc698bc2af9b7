"""Processes that a benchmark or the demo starts, and ends whatever happens."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lamina import protocol
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError
from lamina.settings import ClientSettings

_START_TIMEOUT_S = 120.0  # an arena of 100 GiB is resident and pinned after about a minute
_STOP_TIMEOUT_S = 10.0


@contextmanager
def private_socket() -> Iterator[Path]:
    """A path for a server's socket that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        yield Path(directory) / "run" / "lamina.sock"


@contextmanager
def python_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with its standard input and output piped."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def started_server(socket: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`lamina serve` on `socket`, not waited for."""
    serve = ("-m", "lamina.cli", "serve", "--log-level", "warning", "--socket", str(socket))
    with python_process(*serve, *options) as process:
        yield process


@contextmanager
def server_process(socket: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The same, entered once it answers and all of its arena is resident.

    Raises `ServerUnavailableError` when it does not come up.
    """
    with started_server(socket, *options) as process:
        wait_until_filled(socket, process)
        yield process


def wait_until_filled(socket: Path, process: subprocess.Popen[str]) -> None:
    """Return once the server answers and all of its arena is resident.

    Raises `ServerUnavailableError` when it does not come up.
    """
    until_s = time.monotonic() + _START_TIMEOUT_S
    client = Client(ClientSettings(socket=socket), HostWorkerDevice(), "benchmark")
    try:
        while process.poll() is None and time.monotonic() < until_s:
            try:
                client.connect()
            except ServerUnavailableError:
                time.sleep(0.02)
                continue
            stats = client.ask(protocol.GetStats)
            assert isinstance(stats, protocol.Stats)
            if stats.values["arena_ready_bytes"] == stats.values["arena_capacity_bytes"]:
                return
            time.sleep(0.05)
    finally:
        client.close()
    raise ServerUnavailableError("the server did not start", "Its error is above")
