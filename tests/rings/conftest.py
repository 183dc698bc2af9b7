"""Fixtures: small rings, and workers that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import records
from tests.rings.ring_worker import RETRIEVE_RING_BYTES, STORE_RING_BYTES, RingWorker
from tests.support.fault_server import FaultServer
from tests.support.server import ServerThread


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that are used again and again; a server learns their sizes from its workers."""
    monkeypatch.setattr(records, "RETRIEVE_RING_BYTES", RETRIEVE_RING_BYTES)
    monkeypatch.setattr(records, "STORE_RING_BYTES", STORE_RING_BYTES)


@pytest.fixture
def make_ring_worker(socket_path: Path, small_rings: None) -> Iterator[Callable[..., RingWorker]]:
    """Makes workers connected to the server at `socket_path`, closed at the end."""
    workers: list[RingWorker] = []

    def make(**options: Any) -> RingWorker:
        workers.append(RingWorker(socket_path, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(
    server: ServerThread, make_ring_worker: Callable[..., RingWorker]
) -> Iterator[RingWorker]:
    """One at a server in a thread, whose valves are open when it is closed."""
    yield make_ring_worker()
    server.device.retrieves.open()
    server.device.stores.open()


@pytest.fixture
def fault_server(socket_path: Path) -> Iterator[FaultServer]:
    """A server in a process of its own."""
    server = FaultServer(socket_path)
    yield server
    server.kill()
