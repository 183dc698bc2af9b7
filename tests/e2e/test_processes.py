"""Real processes: a `lamina serve` and its engines live, stop, die and come back.

Where a retrieve must be under way when something happens, the link is throttled so that its slices
take 80 ms each; what happens is triggered by the first slice's landing.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import MISS, Retrieve
from lamina.errors import ServerUnavailableError
from tests.support.server import ServerProcess, connected_client
from tests.support.wait import PATIENCE_S, eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

CHUNKS = 4
BLOCKS = list(range(CHUNKS * BLOCKS_PER_CHUNK))
TARGET = list(range(20, 20 + len(BLOCKS)))
KEYS = [bytes([number]) * 32 for number in range(CHUNKS)]
SLOW = ("--host-link-gbps", "0.0001")
"""64 KiB of chunks in 0.66 s."""

StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server(socket_path: Path) -> Iterator[StartServer]:
    """Starts servers at `socket_path`, one after another; none outlives the test."""
    servers: list[ServerProcess] = []

    def start(*options: str, is_filled: bool = True) -> ServerProcess:
        options = ("--arena", "8MiB", "--chunk-tokens", "64", *options)
        servers.append(ServerProcess(socket_path, *options))
        if is_filled:
            servers[-1].wait_until_filled()
        else:
            servers[-1].wait_until_serving()
        return servers[-1]

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)


class EngineProcess:
    """A worker in a process of its own. `call` runs one of its methods there."""

    def __init__(self, socket: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_engine_main, args=(socket, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        self._ours.send((method, arguments))
        assert self._ours.poll(20), f"the engine did not answer {method!r}"
        return self._ours.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


class _Engine:
    """What `EngineProcess.call` can call."""

    def __init__(self, socket: Path) -> None:
        self.worker = PageWorker(socket)

    def populate(self) -> int:
        store = self.worker.populate(KEYS, BLOCKS)
        return store.ended.stored if store.ended is not None else 0

    def check_hit(self) -> bool:
        self.worker.check_hit("r", KEYS, TARGET)
        return True

    def begin_to_retrieve(self) -> int:
        """With a second lease that is not used."""
        self.worker.client.lookup("other", KEYS).wait(20)
        retrieve = self.worker.begin_retrieve("r", KEYS, TARGET)
        self.worker.wait(lambda: retrieve.landed_slices)
        return retrieve.landed_slices


def _engine_main(socket: Path, commands: Connection) -> None:
    engine = _Engine(socket)
    while True:
        method, arguments = commands.recv()
        commands.send(getattr(engine, method)(*arguments))


@pytest.fixture
def start_engine(socket_path: Path) -> Iterator[Callable[[], EngineProcess]]:
    engines: list[EngineProcess] = []

    def start() -> EngineProcess:
        engines.append(EngineProcess(socket_path))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


def begin_retrieve(worker: PageWorker) -> Retrieve:
    """A retrieve of which something has landed, but not all."""
    retrieve = worker.begin_retrieve("r", KEYS, TARGET)
    worker.wait(lambda: retrieve.landed_slices)
    assert retrieve.outcome is None, "the retrieve is over already: nothing was tested"
    return retrieve


def wait_for_layers(worker: PageWorker, retrieve: Retrieve) -> None:
    """What the compute stream does before each layer; returns when the last wait has ended."""

    def wait() -> None:
        for part in retrieve.slices:
            count = retrieve.base + part.number + 1
            worker.client.device.wait_landed(retrieve.board, retrieve.slot, count)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive(), "a wait did not end"


# Engines come and go.


def test_chunks_outlive_the_engine_that_stored_them_and_are_hit_by_others(
    start_server: StartServer,
    start_engine: Callable[[], EngineProcess],
    make_worker: Callable[..., PageWorker],
) -> None:
    start_server()
    engine, ours = start_engine(), make_worker()
    assert engine.call("populate") == CHUNKS
    ours.check_hit("r", KEYS, TARGET)
    engine.kill()
    restarted = start_engine()
    assert restarted.call("check_hit")
    ours.check_hit("r", KEYS, TARGET)


def test_an_engine_killed_in_mid_retrieve_leaves_nothing_behind(
    start_server: StartServer,
    start_engine: Callable[[], EngineProcess],
    make_worker: Callable[..., PageWorker],
    socket_path: Path,
) -> None:
    start_server(*SLOW)
    engine, ours = start_engine(), make_worker()
    ours.populate(KEYS, BLOCKS)
    assert 0 < engine.call("begin_to_retrieve") < len(ours.geometry.layers)
    engine.kill()
    ours.check_hit("r", KEYS, TARGET)
    observer = connected_client(socket_path)

    def stats() -> dict[str, float]:
        reply = observer.ask(protocol.GetStats)
        assert isinstance(reply, protocol.Stats)
        return reply.values

    eventually(lambda: stats()["sessions"] == 1)  # ours; who asks is not counted
    eventually(lambda: stats()["pins"] == stats()["leases"] == stats()["queued_transfers"] == 0)
    assert stats()["chunks"] == CHUNKS
    observer.close()


# The server dies.


def test_a_server_killed_in_mid_retrieve_ends_every_wait_and_its_successor_is_used(
    start_server: StartServer, make_worker: Callable[..., PageWorker]
) -> None:
    server = start_server(*SLOW)
    worker = make_worker(reconnect_every_ms=20)
    worker.populate(KEYS, BLOCKS)
    retrieve = begin_retrieve(worker)
    server.send(signal.SIGKILL)
    wait_for_layers(worker, retrieve)
    assert retrieve.outcome is TransferStatus.SERVER_DIED
    worker.wait(lambda: retrieve.is_over)
    assert worker.client.quarantined == 0
    assert worker.client.lookup("r", KEYS).result == MISS
    worker.poison(TARGET)
    start_server()
    worker.wait(lambda: worker.client.is_usable)
    lookup = worker.client.lookup("r", KEYS)
    assert lookup.wait(20) == MISS, "the new server has none of the old one's chunks"
    worker.check_hit("r", worker.store_new(CHUNKS), TARGET)


@pytest.mark.parametrize("failure", ["deadline", "connection"])
def test_pages_of_a_failed_retrieve_stay_quarantined_until_a_stopped_server_is_dead(
    start_server: StartServer, make_worker: Callable[..., PageWorker], failure: str
) -> None:
    """A stopped server may go on at any time and write; only its death is a proof."""
    clock_s = 0.0
    server = start_server(*SLOW)
    worker = make_worker(clock=lambda: clock_s)
    worker.populate(KEYS, BLOCKS)
    retrieve = begin_retrieve(worker)
    server.send(signal.SIGSTOP)
    if failure == "deadline":
        clock_s += worker.client.settings.retrieve_timeout_ms / 1000
        expected = TransferStatus.TIMED_OUT
    else:
        assert worker.client._link is not None
        worker.client._link.connection.close()
        expected = TransferStatus.SERVER_DIED
    wait_for_layers(worker, retrieve)
    assert retrieve.outcome is expected
    for _ in range(100):
        worker.client.poll()
    assert not retrieve.is_over
    assert worker.client.quarantined == 1
    server.send(signal.SIGKILL)
    worker.wait(lambda: retrieve.is_over)
    worker.wait(lambda: worker.client.quarantined == 0)
    assert retrieve.outcome is expected


def test_a_server_that_goes_on_after_a_deadline_ends_the_quarantine_with_its_reply(
    start_server: StartServer, make_worker: Callable[..., PageWorker]
) -> None:
    clock_s = 0.0
    server = start_server(*SLOW)
    worker = make_worker(clock=lambda: clock_s)
    worker.populate(KEYS, BLOCKS)
    retrieve = begin_retrieve(worker)
    server.send(signal.SIGSTOP)
    clock_s += worker.client.settings.retrieve_timeout_ms / 1000
    wait_for_layers(worker, retrieve)
    assert worker.client.quarantined == 1
    server.send(signal.SIGCONT)
    worker.wait(lambda: retrieve.is_over)
    assert retrieve.outcome is TransferStatus.TIMED_OUT, "a late success is no success"
    assert worker.client.quarantined == 0
    worker.check_hit("r", KEYS, TARGET)


# The server stops and goes on.


def test_a_stopped_server_costs_hits_but_no_hang_and_is_used_again_when_it_goes_on(
    start_server: StartServer, make_worker: Callable[..., PageWorker]
) -> None:
    clock_s = 0.0
    server = start_server()
    worker = make_worker(clock=lambda: clock_s)
    patient = worker.client.settings
    worker.populate(KEYS, BLOCKS)
    server.send(signal.SIGSTOP)
    asked = worker.client.lookup("asked", KEYS)
    assert asked.result is None
    clock_s += patient.lookup_timeout_ms / 1000
    assert asked.result == MISS
    worker.client.settings = msgspec.structs.replace(patient, suspect_after_ms=500)
    worker.wait(lambda: not worker.client.is_usable)
    assert worker.client.lookup("r", KEYS).result == MISS
    assert worker.client.write_ticket().number > 0
    server.send(signal.SIGCONT)
    worker.wait(lambda: worker.client.is_usable)
    worker.client.settings = patient
    observer = connected_client(worker.client.settings.socket)
    worker.check_hit("r", KEYS, TARGET)
    worker.client.end_request("r")

    def leases() -> float:
        worker.client.poll()
        reply = observer.ask(protocol.GetStats)
        assert isinstance(reply, protocol.Stats)
        return reply.values["leases"]

    eventually(lambda: leases() == 0)  # also that of the lookup that was answered too late
    observer.close()


def test_sigterm_answers_what_is_in_flight_and_leaves_no_socket(
    start_server: StartServer, make_worker: Callable[..., PageWorker], socket_path: Path
) -> None:
    server = start_server(*SLOW)
    worker = make_worker()
    worker.populate(KEYS, BLOCKS)
    retrieve = begin_retrieve(worker)
    server.send(signal.SIGTERM)
    worker.wait(lambda: worker.client.lookup("late", KEYS).wait(20) == MISS)
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.OK
    assert retrieve.ended is not None
    worker.expect_chunks(KEYS, TARGET)
    assert server.process.wait(20) == 0
    assert not socket_path.exists()
    worker.wait(lambda: not worker.client.is_usable)
    assert worker.client.quarantined == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_is_graceful_as_soon_as_connections_are_taken(
    start_server: StartServer, socket_path: Path, number: signal.Signals
) -> None:
    assert start_server().stop(number) == 0
    assert not socket_path.exists()


def test_sigint_is_as_graceful_as_sigterm(start_server: StartServer, socket_path: Path) -> None:
    server = start_server()
    client = connected_client(socket_path)
    assert server.stop(signal.SIGINT) == 0
    client.close()
    assert not socket_path.exists()


def test_a_server_answers_long_before_its_arena_is_filled(
    start_server: StartServer, socket_path: Path
) -> None:
    """About a second on an idle machine, whatever the arena's size; stopping is as quick."""
    arena_bytes = min(8 << 30, _available_bytes() // 4)
    started_s = time.monotonic()
    server = start_server("--arena", f"{arena_bytes}B", is_filled=False)
    client = connected_client(socket_path)
    assert isinstance(client.ask(protocol.Ping), protocol.Pong)
    stats = client.ask(protocol.GetStats)
    assert isinstance(stats, protocol.Stats)
    assert stats.values["arena_ready_bytes"] < stats.values["arena_capacity_bytes"]
    assert time.monotonic() - started_s < 5
    client.close()
    assert server.stop() == 0


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")


def test_asking_over_a_lost_connection_says_so_at_once(socket_path: Path) -> None:
    server = ServerProcess(socket_path, "--arena", "1MiB")
    try:
        server.wait_until_serving()
        client = connected_client(socket_path)
        server.stop(signal.SIGKILL)
        with pytest.raises(ServerUnavailableError, match="gave no answer"):
            client.ask(protocol.Ping)
        client.poll()
        with pytest.raises(ServerUnavailableError, match="gave no answer"):
            client.ask(protocol.Ping)
        client.close()
    finally:
        server.stop(signal.SIGKILL)
