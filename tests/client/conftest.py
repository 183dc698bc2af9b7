"""Fixtures: a client whose server the test plays, and one whose real server holds `KEYS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.misused import BLOCKS, KEYS
from tests.support.played import World
from tests.support.server import ServerThread
from tests.support.worker import PageWorker


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    world = World(socket_path)
    yield world
    world.close()


@pytest.fixture
def worker(server: ServerThread) -> Iterator[PageWorker]:
    """One whose server holds `KEYS`."""
    worker = PageWorker(server.settings.socket)
    worker.populate(KEYS, BLOCKS)
    yield worker
    worker.close()


@pytest.fixture
def is_unharmed(server: ServerThread, worker: PageWorker) -> Callable[[], bool]:
    """Whether the server keeps nothing, and the client has its connection."""

    def unharmed() -> bool:
        gauges = server.after_reading(server.server.gauges)
        assert (gauges["leases"], gauges["pins"]) == (0, 0)
        worker.client.poll()
        return worker.client.is_usable and not server.totals()["stores_failed"]

    return unharmed
