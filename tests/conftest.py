"""Fixtures: a private socket path, a server in a thread, and a worker connected to it; and
`--share 1/2`, which runs the first half of the test files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ServerThread
from tests.support.worker import PageWorker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="K/N: every N-th test file from the K-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        number, of = map(int, share.split("/"))
        if not 1 <= number <= of:
            raise pytest.UsageError(f"--share {share}: K of K/N is from 1 to N")
        files = sorted({item.path for item in items})[number - 1 :: of]
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path for a server's socket; short, whatever pytest's own directory is called."""
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        yield Path(directory) / "run" / "lamina.sock"


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path)
    yield thread
    thread.stop()


@pytest.fixture
def make_worker(socket_path: Path) -> Iterator[Callable[..., PageWorker]]:
    """Makes workers connected to the server at `socket_path`, closed at the end."""
    workers: list[PageWorker] = []

    def make(**options: Any) -> PageWorker:
        workers.append(PageWorker(socket_path, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(server: ServerThread, make_worker: Callable[..., PageWorker]) -> PageWorker:
    return make_worker()
