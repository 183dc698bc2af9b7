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

import numpy as np
import pytest

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import Client, Gate, Retrieve, StepGates
from lamina.devices import cuda_driver as driver
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina.settings import ClientSettings
from lamina_lab import gpu_memory
from lamina_lab.bench.memory import POISON, CudaKvSpace
from lamina_lab.bench.processes import private_socket, server_process
from tests.support.wait import eventually

LAYERS, PAGE_BYTES, BLOCKS = 32, 64 << 10, 512
CHUNKS, BLOCKS_PER_CHUNK = 8, 16
DOCUMENT_BLOCKS = CHUNKS * BLOCKS_PER_CHUNK


class GpuWorker:
    """One document stored from the first blocks of GPU memory; the rest is to retrieve into."""

    def __init__(self, socket: Path, **settings: int) -> None:
        self.space = CudaKvSpace(LAYERS, BLOCKS * PAGE_BYTES)
        settings = {"suspect_after_ms": 5_000, **settings}
        self.client = Client(
            ClientSettings(socket=socket, **settings),
            self.space.device,
            "gpu test",
        )
        geometry = Geometry(
            256, (Group(16),), tuple(Layer(f"{i}", 0, 1, PAGE_BYTES) for i in range(LAYERS))
        )
        planes = tuple((PlanePages(i, 0, PAGE_BYTES),) for i in range(LAYERS))
        regions = [self.space.device.export(a, BLOCKS * PAGE_BYTES) for a in self.space.addresses]
        self.client.register(geometry, PageMap((BLOCKS,), planes), regions)
        self.client.connect()
        rng = np.random.default_rng(0)
        self.known = [
            rng.integers(0, 256, DOCUMENT_BLOCKS * PAGE_BYTES, np.uint8) for _ in range(LAYERS)
        ]
        for address, data in zip(self.space.addresses, self.known, strict=True):
            self.space.write(address, data)
        self.keys = [os.urandom(32) for _ in range(CHUNKS)]
        source = np.arange(DOCUMENT_BLOCKS, dtype=np.int32)
        store = self.client.store(b"", self.keys, [source], self.client.write_ticket())
        assert store is not None
        self.wait(lambda: store.is_over)
        assert store.ended is not None
        assert store.ended.stored == CHUNKS

    def retrieve(self, name: str, first_block: int, width: int) -> Retrieve:
        found = self.client.lookup(name, self.keys).wait(5.0)
        assert found is not None
        assert found.chunks == CHUNKS
        target = np.arange(first_block, first_block + DOCUMENT_BLOCKS, dtype=np.int32)
        retrieve = self.client.retrieve(name, found.lease, 0, [target], width)
        assert retrieve is not None
        return retrieve

    def poison(self, first_block: int) -> None:
        for address in self.space.addresses:
            start = address + first_block * PAGE_BYTES
            gpu_memory.fill(start, POISON, DOCUMENT_BLOCKS * PAGE_BYTES)

    def read(self, layer: int, first_block: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = self.space.addresses[layer] + first_block * PAGE_BYTES
        return self.space.read(start, DOCUMENT_BLOCKS * PAGE_BYTES)

    def wait(self, condition: object) -> None:
        assert callable(condition)

        def polled() -> object:
            self.client.poll()
            return condition()

        eventually(polled)


@pytest.fixture(scope="module")
def worker() -> Iterator[GpuWorker]:
    with private_socket() as socket, server_process(socket, "--arena", "1GiB"):
        worker = GpuWorker(socket)
        yield worker
        worker.client.close()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 32])
def test_every_width_gives_back_every_byte_of_32_layers(worker: GpuWorker, width: int) -> None:
    worker.poison(DOCUMENT_BLOCKS)
    retrieve = worker.retrieve(f"width {width}", DOCUMENT_BLOCKS, width)
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is TransferStatus.OK
    for layer in range(LAYERS):
        assert np.array_equal(worker.read(layer, DOCUMENT_BLOCKS), worker.known[layer])


def test_a_thousand_retrieves_with_random_cancels_leave_no_late_byte(worker: GpuWorker) -> None:
    rng = np.random.default_rng(1)
    cancelled = 0
    for number in range(1000):
        target = DOCUMENT_BLOCKS * (1 + number % 2)
        retrieve = worker.retrieve(f"r{number}", target, int(rng.choice([1, 3, 8, 32])))
        wanted = int(rng.integers(0, len(retrieve.slices) + 1))
        worker.wait(lambda r=retrieve, n=wanted: r.landed_slices >= n or r.outcome is not None)
        worker.client.cancel(retrieve)
        worker.wait(lambda r=retrieve: r.is_acknowledged)
        cancelled += retrieve.outcome is TransferStatus.CANCELLED
        worker.poison(target)
        layer = int(rng.integers(0, LAYERS))
        assert (worker.read(layer, target) == POISON).all(), f"a late byte in round {number}"
    assert cancelled > 200
    for target in (DOCUMENT_BLOCKS, 2 * DOCUMENT_BLOCKS):
        for layer in range(LAYERS):
            assert (worker.read(layer, target) == POISON).all()


def test_waits_end_when_the_server_is_killed_while_the_launching_thread_is_stuck() -> None:
    """The watchdog makes no CUDA call: it works while this thread is inside one."""
    with private_socket() as socket, server_process(socket, "--arena", "1GiB") as server:
        worker = GpuWorker(socket)
        os.kill(server.pid, signal.SIGSTOP)  # nothing will land
        target = np.arange(DOCUMENT_BLOCKS, 2 * DOCUMENT_BLOCKS, dtype=np.int32)
        retrieve = worker.client.retrieve("stuck", 1, 0, [target], 1)
        assert retrieve is not None
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


def test_waits_end_at_the_deadline_when_the_server_is_stopped() -> None:
    with private_socket() as socket, server_process(socket, "--arena", "1GiB") as server:
        worker = GpuWorker(socket, retrieve_timeout_ms=300)
        os.kill(server.pid, signal.SIGSTOP)
        target = np.arange(DOCUMENT_BLOCKS, 2 * DOCUMENT_BLOCKS, dtype=np.int32)
        retrieve = worker.client.retrieve("stuck", 1, 0, [target], 1)
        assert retrieve is not None
        stream = driver.create_stream()
        gates = StepGates(worker.space.device, [Gate(retrieve, 0)], stream)
        gates.before_all()
        driver.synchronize(stream)
        assert [r.outcome for r in gates.settle()] == [TransferStatus.TIMED_OUT]
        assert not retrieve.is_over, "the server may still write: its pages stay quarantined"
        assert worker.client.quarantined == 1
        os.kill(server.pid, signal.SIGCONT)
        worker.wait(lambda: retrieve.is_over)
        worker.client.close()


def test_two_engines_share_the_lane_and_both_finish_in_order(worker: GpuWorker) -> None:
    """The second engine's retrieve begins when the first's has ended, not beside it."""
    other = GpuWorker(worker.client.settings.socket)
    first = worker.retrieve("first", DOCUMENT_BLOCKS, 1)
    second = other.retrieve("second", DOCUMENT_BLOCKS, 1)
    order: list[tuple[int, int]] = []
    while second.landed_slices < LAYERS:
        order.append((first.landed_slices, second.landed_slices))
    worker.wait(lambda: first.is_acknowledged)
    other.wait(lambda: second.is_acknowledged)
    assert all(done == LAYERS for done, begun in order if begun), "their slices interleaved"
    for each in (worker, other):
        for layer in range(LAYERS):
            assert np.array_equal(each.read(layer, DOCUMENT_BLOCKS), each.known[layer])
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
