"""What a server serves while nobody reads its log, beside one that logs to a file.

    python -m benchmarks.logs [--operations 100] [--rounds 40]

Each operation is a connection, its hello, a lookup and its end, told of at level DEBUG. The pipe is
full from the start. Many short rounds of both take turns, as hosts have moods: the median of each
is shown, and that of the pairs' ratios. Then how long each server takes to end on a SIGTERM, and
what a line costs whoever logs it when no two are alike, so that none is held back.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.server.counters import Counters
from lamina.server.log_lines import plain_line
from lamina.server.logs import LogFile, LogHandler
from lamina.settings import ClientSettings
from lamina_lab.bench.processes import private_socket, wait_until_filled

_STOP_TIMEOUT_S = 10.0
_LEAST_PIPE_BYTES = 4096


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """The end to write to; whoever writes waits for ever."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _LEAST_PIPE_BYTES)
    os.write(writer, b"." * _LEAST_PIPE_BYTES)
    yield writer
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def server(socket: Path, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """`lamina serve` with its log on a descriptor; killed if it has not ended before."""
    command = [sys.executable, "-m", "lamina.cli", "serve", "--log-level", "debug"]
    process = subprocess.Popen(
        [*command, "--arena", "16MiB", "--socket", str(socket)], stderr=stderr
    )
    try:
        wait_until_filled(socket, process)  # type: ignore[arg-type]
        yield process
    finally:
        process.kill()
        process.wait()


def operate(socket: Path, count: int) -> float:
    """Operations a second."""
    began_s = time.monotonic()
    for number in range(count):
        client = Client(ClientSettings(socket=socket), HostWorkerDevice(), f"benchmark {number}")
        client.connect()
        client.lookup("request", [number.to_bytes(32, "little")]).wait(10)
        client.close()
    return count / (time.monotonic() - began_s)


def line_us(log: LogFile, count: int = 20_000) -> tuple[float, int]:
    """What a line costs its logger, and how many were dropped."""
    counters = Counters()
    handler = LogHandler(log, plain_line, counters)
    records = [
        logging.LogRecord("benchmark", logging.INFO, "", 0, f"event {number}", (), None)
        for number in range(count)
    ]
    began_s = time.monotonic()
    for record in records:
        handler.handle(record)
    each_us = (time.monotonic() - began_s) / count * 1e6
    handler.writer.close()
    return each_us, counters.log_lines_dropped


def stop_s(process: subprocess.Popen[bytes]) -> float:
    """How long it takes to end; it must end well."""
    began_s = time.monotonic()
    process.terminate()
    assert process.wait(_STOP_TIMEOUT_S) == 0
    return time.monotonic() - began_s


def main() -> None:
    """Run both and print the figures; exits with 1 when the full pipe costs more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100, help="of one round")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(private_socket()) for _ in range(2)]
        log = stack.enter_context(tempfile.NamedTemporaryFile())
        pipe = stack.enter_context(full_pipe())
        logs = (log.fileno(), pipe)
        servers = [stack.enter_context(server(*both)) for both in zip(sockets, logs, strict=True)]
        rates: list[list[float]] = [[], []]
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                rates[which].append(operate(sockets[which], options.operations))
        stops = [stop_s(process) for process in servers]
        paths = (Path(log.name), Path(f"/proc/self/fd/{pipe}"))
        lines = [line_us(LogFile(path)) for path in paths]
    medians = [statistics.median(rate) for rate in rates]
    for name, rate, stop, line in zip(("file", "full pipe"), medians, stops, lines, strict=True):
        print(
            f"log in a {name:9}  {rate:6,.0f} operations/s  ends in {stop:.2f} s  "
            f"a line costs {line[0]:.1f} us, {line[1]:,} dropped"
        )
    ratio = statistics.median(unread / read for read, unread in zip(*rates, strict=True))
    print(f"the full pipe: {ratio - 1:+.1%} operations/s")
    sys.exit(ratio < 0.95)


if __name__ == "__main__":
    main()
