"""A real server and GPU memory: cancels without a late byte, and waits that always end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import Client, Gate, Retrieve, StepGates
from lamina.devices import cuda_driver as driver
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError
from lamina.settings import ClientSettings
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.known.content import POISON, equal_layers
from lamina_lab.known.memory import CudaKvSpace
from lamina_lab.known.worker import KnownWorker
from tests.support.wait import eventually

LAYERS, BLOCKS = 32, 512
GEOMETRY = equal_layers(LAYERS, page_bytes=64 << 10, chunk_tokens=256)
CHUNKS = 8
DOCUMENT_BLOCKS = CHUNKS * GEOMETRY.blocks_per_chunk(0)
TARGET = range(DOCUMENT_BLOCKS, 2 * DOCUMENT_BLOCKS)
OTHER_TARGET = range(2 * DOCUMENT_BLOCKS, 3 * DOCUMENT_BLOCKS)


class GpuWorker(KnownWorker):
    """One document stored from the first blocks of GPU memory; the rest is to retrieve into."""

    def __init__(self, socket: Path, **settings: Any) -> None:
        super().__init__(socket, CudaKvSpace(GEOMETRY, BLOCKS), "gpu test", **settings)
        self.client.connect()
        self.keys = self.store_new(CHUNKS)


@pytest.fixture(scope="module", params=["direct", "ring"])
def worker(request: pytest.FixtureRequest) -> Iterator[GpuWorker]:
    with private_socket() as socket, server_process(socket, "--arena", "1GiB"):
        worker = GpuWorker(socket, data_path=request.param)
        yield worker
        worker.client.close()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 32])
def test_every_width_gives_back_every_byte_of_32_layers(worker: GpuWorker, width: int) -> None:
    worker.check_hit(f"width {width}", worker.keys, TARGET, width)


def cancel_at(worker: GpuWorker, retrieve: Retrieve, slices: int) -> None:
    """Cancel a retrieve once so many slices have landed, and wait for its end."""
    worker.wait(lambda: retrieve.landed_slices >= slices or retrieve.outcome is not None)
    worker.client.cancel(retrieve)
    worker.wait(lambda: retrieve.is_acknowledged)


def test_a_thousand_retrieves_with_random_cancels_leave_no_late_byte(worker: GpuWorker) -> None:
    rng = np.random.default_rng(1)
    cancelled = 0
    for number in range(1000):
        target = (TARGET, OTHER_TARGET)[number % 2]
        width = int(rng.choice([1, 3, 8, 32]))
        retrieve = worker.begin_retrieve(f"r{number}", worker.keys, target, width)
        wanted = int(rng.integers(0, len(retrieve.slices) + 1))
        cancel_at(worker, retrieve, wanted)
        cancelled += retrieve.outcome is TransferStatus.CANCELLED
        worker.poison(target)
        layer = int(rng.integers(0, LAYERS))
        read = worker.space.read(layer, target)
        assert (read == POISON).all(), f"a late byte in round {number}"
    assert cancelled > 200
    for target in (TARGET, OTHER_TARGET):
        worker.expect(target, POISON)


PATHS = pytest.mark.parametrize("data_path", ["direct", "ring"])


@PATHS
def test_waits_end_when_the_server_is_killed_while_the_launching_thread_is_stuck(
    data_path: str,
) -> None:
    """The watchdog makes no CUDA call: it works while this thread is inside one."""
    with private_socket() as socket, server_process(socket, "--arena", "1GiB") as server:
        worker = GpuWorker(socket, data_path=data_path)
        os.kill(server.pid, signal.SIGSTOP)  # nothing will land
        retrieve = worker.begin_leased("stuck", 1, TARGET)
        stream = driver.create_stream()
        gates = StepGates(worker.space.device, [Gate(retrieve, 0)], stream)
        for layer in range(LAYERS):
            gates.before_layer(layer)
        killer = threading.Timer(0.3, lambda: os.kill(server.pid, signal.SIGKILL))
        killer.start()
        driver.synchronize(stream)  # stuck in CUDA until the watchdog has seen the death
        killer.join()
        assert [r.outcome for r in gates.settle()] == [TransferStatus.SERVER_DIED]
        worker.wait(lambda: retrieve.is_over)
        worker.client.close()


@PATHS
def test_waits_end_at_the_deadline_when_the_server_is_stopped(data_path: str) -> None:
    with private_socket() as socket, server_process(socket, "--arena", "1GiB") as server:
        worker = GpuWorker(socket, retrieve_timeout_ms=300, data_path=data_path)
        os.kill(server.pid, signal.SIGSTOP)
        retrieve = worker.begin_leased("stuck", 1, TARGET)
        stream = driver.create_stream()
        gates = StepGates(worker.space.device, [Gate(retrieve, 0)], stream)
        gates.before_all()
        driver.synchronize(stream)
        assert [r.outcome for r in gates.settle()] == [TransferStatus.TIMED_OUT]
        if data_path == "direct":
            assert not retrieve.is_over, "the server may still write: its pages stay quarantined"
            assert worker.client.quarantined == 1
        else:
            worker.wait(lambda: retrieve.is_over)  # only this GPU writes its pages
        os.kill(server.pid, signal.SIGCONT)
        worker.wait(lambda: retrieve.is_acknowledged)
        worker.check_hit("once more", worker.keys, TARGET)
        worker.client.close()


def test_two_engines_share_the_lane_and_both_finish_in_order(worker: GpuWorker) -> None:
    """The second engine's retrieve begins when the first's has ended, not beside it."""
    other = GpuWorker(worker.client.settings.socket)
    first = worker.begin_retrieve("first", worker.keys, TARGET)
    second = other.begin_retrieve("second", other.keys, TARGET)
    order: list[tuple[int, int]] = []
    while second.landed_slices < LAYERS:
        order.append((first.landed_slices, second.landed_slices))
    worker.wait(lambda: first.is_acknowledged)
    other.wait(lambda: second.is_acknowledged)
    assert all(done == LAYERS for done, begun in order if begun), "their slices interleaved"
    for each in (worker, other):
        each.expect_chunks(each.keys, TARGET)
    other.client.close()


def test_a_server_answers_within_two_seconds_while_a_large_arena_still_fills() -> None:
    with private_socket() as socket:
        command = [sys.executable, "-m", "lamina.cli", "serve", "--socket", str(socket)]
        began = time.monotonic()
        server = subprocess.Popen([*command, "--arena", "64GiB"], stderr=subprocess.DEVNULL)
        try:
            client = Client(ClientSettings(socket=socket), HostWorkerDevice(), "impatient")
            eventually(lambda: _connects(client))
            stats = client.ask(protocol.GetStats)
            answered_s = time.monotonic() - began
            assert isinstance(stats, protocol.Stats)
            print(f"\nfirst answer after {answered_s:.2f} s")
            assert answered_s <= 2.0
            assert stats.values["arena_ready_bytes"] < stats.values["arena_capacity_bytes"]
            client.close()
        finally:
            server.terminate()
            server.wait()


def _connects(client: Client) -> bool:
    try:
        client.connect()
    except ServerUnavailableError:
        return False
    return True
