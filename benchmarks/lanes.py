"""What one server process can feed: 1 to 8 GPUs' lanes at once, without a GPU.

    make bench-lanes                                     four tables
    python -m benchmarks.lanes --piece-us 1.2 --lanes 8  a row

A real server loads `fake_cuda.c` (built here: needs `cc`) in the place of the CUDA driver: its
calls cost what they cost on an H200's host, its links are clocks, and no byte moves. An engine a
GPU (`lanes_engines`) keeps retrieves in flight; another connection looks keys up all the time and
looks at its heartbeat.

Where there are fewer cores than lanes need, GB/s say nothing: what counts is what a GB costs.
*Calls* are processor time inside the driver, without the interpreter lock. *Lanes' Python* is the
other processor time of the lanes' threads, nearly all of it under that lock: there is one, so a
process moves at most what a second of it pays for, less what the event loop takes. With `--away`
calls sleep in place of computing, as if each lane had a core of its own for them. With `--no-link`
links and calls cost nothing, so that Python is all there is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec

from benchmarks.core import host
from benchmarks.heartbeat import random_keys
from benchmarks.lanes_engines import Load, Log, Outcome, open_log
from lamina import protocol
from lamina.board import Board
from lamina.client.connection import Connection
from lamina_lab.bench.processes import (
    private_socket,
    python_process,
    server_process,
    wait_until_filled,
)

LINK_GBPS = 54.8
WANTED_GBPS = 50
LOOKUP_CHUNKS = 64
LOOKUP_EVERY_S = 0.005
SAMPLE_S = 0.001
_NO_LINK_GBPS = 100_000.0


class Costs(msgspec.Struct, frozen=True):
    """Of the driver's calls: a piece of a batch, any batch at least, a count's write."""

    piece_us: float = 0.5
    call_us: float = 4.0
    write_us: float = 2.7
    away: bool = False


class Case(msgspec.Struct, frozen=True):
    """One row."""

    load: Load
    costs: Costs
    may_share: bool = True
    """Whether a lane's second thread issues half of a batch when the link runs dry."""


class Seen(msgspec.Struct, frozen=True):
    """By a connection that only looks keys up: the oldest heartbeat, and its lookups."""

    oldest_heartbeat_ms: float
    lookup_ms: list[float]


class Row(msgspec.Struct, frozen=True):
    """A case and its figures; cores are processor seconds of the server a second."""

    case: Case
    gbps: list[float]
    cores: float
    loop_cores: float
    call_cores: float
    """In the driver's calls, waiting in the kernel included."""
    lanes_us_a_gb: float
    """The lanes' Python."""
    bound_gbps: float
    """What one interpreter lock pays for, with the event loop as busy as it was."""
    calls_us_a_gb: float
    calls_a_gb: float
    first_late_ms: tuple[float, float, float]
    late_ms: tuple[float, float, float]
    lookup_ms: tuple[float, float, float]
    oldest_heartbeat_ms: float


def measure(case: Case, rounds: int) -> Row:
    """The round that was disturbed least by what else the machine did."""
    return min((measure_once(case) for _ in range(rounds)), key=lambda row: row.lanes_us_a_gb)


def measure_once(case: Case) -> Row:
    """A server and its engines, for as long as the load says."""
    load = case.load
    arena_bytes = load.chunks * load.geometry.chunk_bytes + (512 << 20)
    options = ("--arena", str(arena_bytes), "--chunk-tokens", str(load.geometry.chunk_tokens))
    with (
        _fake_driver(case) as log,
        private_socket() as socket,
        _server(case, socket, *options) as server,
        python_process(*_engines(socket, load)) as engines,
    ):
        assert engines.stdout is not None
        _expect(engines, "begin")
        before = _processor_s(server.pid, log)
        seen = _look(socket, load.seconds)
        after = _processor_s(server.pid, log)
        _expect(engines, "end")
        outcome = msgspec.json.decode(engines.stdout.readline(), type=Outcome)
    took_s, all_s, loop_s, front_s, calls_s, calls = (
        b - a for a, b in zip(before, after, strict=True)
    )
    moved_gb = sum(outcome.gbps) * took_s
    lanes_s = all_s - loop_s - front_s - calls_s
    return Row(
        case,
        outcome.gbps,
        (all_s - front_s) / took_s,
        loop_s / took_s,
        calls_s / took_s,
        lanes_s / moved_gb * 1e6,
        (1 - loop_s / took_s) * moved_gb / lanes_s,
        calls_s / moved_gb * 1e6,
        calls / moved_gb,
        _spread(outcome.first_late_ms),
        _spread(outcome.late_ms),
        _spread(seen.lookup_ms),
        seen.oldest_heartbeat_ms,
    )


@contextmanager
def _fake_driver(case: Case) -> Iterator[Log]:
    """Whatever starts meanwhile finds it as the CUDA driver."""
    costs = case.costs
    with tempfile.TemporaryDirectory() as directory:
        source = Path(__file__).with_name("fake_cuda.c")
        library = Path(directory, "libcuda.so.1")
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True
        )
        log = Path(directory, "log")
        settings = {
            "LD_LIBRARY_PATH": directory,
            "FAKE_LOG": str(log),
            "FAKE_GPUS": str(case.load.lanes),
            "FAKE_LINK_BYTES_S": str(round(case.load.link_gbps * 1e9)),
            "FAKE_PIECE_NS": str(round(costs.piece_us * 1e3)),
            "FAKE_CALL_NS": str(round(costs.call_us * 1e3)),
            "FAKE_WRITE_NS": str(round(costs.write_us * 1e3)),
            "FAKE_AWAY": str(int(costs.away)),
            "FAKE_RINGS": str(int(case.load.has_rings)),
        }
        with patch.dict(os.environ, settings):
            yield open_log(log)


@contextmanager
def _server(case: Case, socket: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    if case.may_share:
        with server_process(socket, *options) as server:
            yield server
        return
    code = (
        "import sys, lamina.devices.cuda_stream as stream; stream._SHARED_PIECES = 1 << 60; "
        "from lamina.cli import main; main()"
    )
    serve = ("-c", code, "serve", "--log-level", "warning", "--socket", str(socket))
    with python_process(*serve, *options) as server:
        wait_until_filled(socket, server)
        yield server


def _engines(socket: Path, load: Load) -> Sequence[str]:
    log = os.environ["FAKE_LOG"]
    return "-m", "benchmarks.lanes_engines", str(socket), msgspec.json.encode(load).decode(), log


def _expect(engines: subprocess.Popen[str], word: str) -> None:
    assert engines.stdout is not None
    line = engines.stdout.readline()
    assert line.strip() == word, f"the engines said {line!r}"


def _processor_s(pid: int, log: Log) -> tuple[float, float, float, float, float, float]:
    """Now; processor seconds of all threads, the event loop's, the front ends, calls; and how many
    calls there were."""
    used = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        used[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    calls_ns, calls, front_ns = map(int, log.header)
    loop_s = used[str(pid)]
    return (
        time.monotonic(),
        sum(used.values()),
        loop_s,
        front_ns / 1e9,
        calls_ns / 1e9,
        float(calls),
    )


def _look(socket: Path, seconds: float) -> Seen:
    """Look unknown keys up, and at the heartbeat, all the time."""
    board = Board.create(1)
    connection = Connection(socket, board)
    answered: list[float] = []
    keys = tuple(random_keys(LOOKUP_CHUNKS))
    asked_s = oldest_s = 0.0
    waiting = False

    def found(reply: protocol.Reply | None) -> None:
        nonlocal waiting
        assert not isinstance(reply, protocol.ErrorReply), reply
        answered.append((time.monotonic() - asked_s) * 1e3)
        waiting = False

    connection.call(lambda number: protocol.Hello(number, "looks", "benchmark"), found)
    until_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < until_s:
        oldest_s = max(oldest_s, connection.heartbeat_age_s()) if answered else 0.0
        if answered and not waiting and now_s - asked_s > LOOKUP_EVERY_S:
            asked_s, waiting = now_s, True
            connection.call(lambda number: protocol.Lookup(number, "looks", keys), found)
        connection.wait(SAMPLE_S)
    connection.close()
    board.close()
    return Seen(oldest_s * 1e3, answered[1:])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99 of 100, worst."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1]


def show(row: Row) -> str:
    """A line."""
    case = row.case
    least, most = min(row.gbps), max(row.gbps)
    late = "  ".join(
        "/".join(f"{value:.2f}" for value in spread)
        for spread in (row.first_late_ms, row.late_ms, row.lookup_ms)
    )
    return (
        f"{case.load.lanes}  {least:6.1f} {most:6.1f}  {row.cores:5.2f} {row.loop_cores:5.2f} "
        f"{row.call_cores:5.2f}  {row.calls_us_a_gb:6.0f} {row.lanes_us_a_gb:6.0f} "
        f"{row.bound_gbps:5.0f}  {late}  {row.oldest_heartbeat_ms:5.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=32, help="of a retrieve")
    parser.add_argument("--in-flight", type=int, default=2, help="retrieves of a lane")
    parser.add_argument("--layers-per-slice", type=int, default=1)
    parser.add_argument("--piece-us", type=float, default=0.5)
    parser.add_argument("--rings", action="store_true", help="records in place of pieces")
    parser.add_argument("--away", action="store_true", help="calls sleep: a core a lane for them")
    parser.add_argument("--no-link", action="store_true", help="and calls are free: Python's most")
    parser.add_argument("--one-thread", action="store_true", help="a lane's second one never helps")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3, help="the least disturbed is shown")
    parser.add_argument("--save", type=Path, help="write JSON")
    given = parser.parse_args()
    costs = Costs(0, 0, 0) if given.no_link else Costs(given.piece_us, away=given.away)
    print(f"on {host()}")
    print("lanes; GB/s of the slowest and fastest; cores: all, loop, calls; us a GB: calls, lanes'")
    print("Python; one lock's bound, GB/s; ms (median/p99/worst): first slices late, slices late,")
    print("lookups; oldest heartbeat, ms")
    rows = []
    for lanes in given.lanes:
        load = Load(
            lanes,
            given.page_kib << 10,
            given.chunks,
            given.in_flight,
            given.layers_per_slice,
            given.rings,
            _NO_LINK_GBPS if given.no_link else LINK_GBPS,
            given.seconds,
        )
        rows.append(measure(Case(load, costs, not given.one_thread), given.rounds))
        print(show(rows[-1]), flush=True)
    if given.save:
        rows_json = msgspec.to_builtins(rows)
        given.save.write_text(json.dumps({"host": host(), "rows": rows_json}, indent=2) + "\n")


if __name__ == "__main__":
    main()
