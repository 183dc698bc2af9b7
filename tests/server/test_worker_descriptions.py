"""An engine's processes find each other at the server: what workers say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import protocol
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import RequestRefusedError
from lamina.server import limits
from lamina.server.listener import MAX_SESSIONS
from lamina.server.sessions import Session
from lamina.settings import ClientSettings
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker

ENGINE = "the engine"
Make = Callable[..., PageWorker]


@pytest.fixture
def scheduler(socket_path: Path) -> Iterator[Client]:
    """Of the same engine; it has no KV memory, and no connection at first."""
    settings = ClientSettings(
        socket=socket_path, suspect_after_ms=5_000, reconnect_every_ms=1, connect_timeout_ms=20_000
    )
    client = Client(settings, HostWorkerDevice(), "scheduler", ENGINE)
    yield client
    client.close()


def descriptions(client: Client, count: int) -> tuple[bytes, ...]:
    found = client.wait_for_workers(count, 20)
    assert found is not None
    return found


def test_workers_are_told_in_order_of_registration(
    server: ServerThread, make_worker: Make, scheduler: Client
) -> None:
    scheduler.connect()
    for number in range(5):
        make_worker(engine=ENGINE, description=b"%d" % number)
    assert descriptions(scheduler, 5) == (b"0", b"1", b"2", b"3", b"4")
    assert scheduler.workers(5) == (b"0", b"1", b"2", b"3", b"4")


def test_a_worker_is_told_of_itself_and_of_one_that_says_nothing(
    server: ServerThread, make_worker: Make
) -> None:
    make_worker(engine=ENGINE)
    worker = make_worker(engine=ENGINE, description=b"w" * limits.MAX_DESCRIPTION_BYTES)
    assert descriptions(worker.client, 2) == (b"", b"w" * limits.MAX_DESCRIPTION_BYTES)


def test_workers_of_other_engines_are_not_told(
    server: ServerThread, make_worker: Make, scheduler: Client
) -> None:
    scheduler.connect()
    make_worker(engine="another", description=b"theirs")
    make_worker(engine=ENGINE, description=b"ours")
    assert descriptions(scheduler, 1) == (b"ours",)
    assert scheduler.wait_for_workers(2, 0.01) is None


def test_workers_that_have_left_are_not_told(
    server: ServerThread, make_worker: Make, scheduler: Client
) -> None:
    make_worker(engine=ENGINE, description=b"left").close()
    eventually(lambda: server.gauges()["sessions"] == 0)
    make_worker(engine=ENGINE, description=b"stays")
    scheduler.connect()
    assert descriptions(scheduler, 1) == (b"stays",)


def test_a_description_that_is_too_long_is_refused(server: ServerThread, make_worker: Make) -> None:
    with pytest.raises(RequestRefusedError, match="description has 4097 bytes; 4096 are allowed"):
        make_worker(description=b"w" * (limits.MAX_DESCRIPTION_BYTES + 1))


def test_as_many_descriptions_as_there_can_be_sessions_fit_into_a_frame() -> None:
    longest = (b"w" * limits.MAX_DESCRIPTION_BYTES,) * MAX_SESSIONS
    protocol.encode(protocol.WorkersKnown(1, longest))


def note_questions(server: ServerThread) -> threading.Event:
    """Set once the server has answered who is there."""
    asked, handlers = threading.Event(), server.server._handlers
    workers = handlers[protocol.Workers]

    def noting(session: Session, request: Any) -> Any:
        asked.set()
        return workers(session, request)

    handlers[protocol.Workers] = noting
    return asked


def test_a_scheduler_can_wait_for_workers_that_come_later(
    server: ServerThread, make_worker: Make, scheduler: Client
) -> None:
    asked = note_questions(server)

    def come_later() -> None:
        assert asked.wait(20)
        make_worker(engine=ENGINE, description=b"late")

    coming = threading.Thread(target=come_later)
    coming.start()
    assert scheduler.wait_for_workers(1, 20) == (b"late",)
    coming.join()


def test_a_scheduler_can_wait_for_a_server_that_comes_later(
    socket_path: Path, scheduler: Client, make_worker: Make
) -> None:
    waited: list[tuple[bytes, ...] | None] = []
    assert scheduler.wait_for_workers(1, 0.0) is None
    waiting = threading.Thread(target=lambda: waited.append(scheduler.wait_for_workers(1, 20)))
    waiting.start()
    server = ServerThread(socket_path)
    make_worker(engine=ENGINE, description=b"late")
    waiting.join()
    assert waited == [(b"late",)]
    server.stop()


def test_workers_of_a_server_that_was_replaced_register_later_than_the_scheduler(
    socket_path: Path, scheduler: Client, make_worker: Make
) -> None:
    first = ServerThread(socket_path)
    scheduler.connect()
    assert scheduler.workers(1) is None
    first.stop()
    second = ServerThread(socket_path)

    def is_back() -> bool:
        scheduler.poll()
        return scheduler.is_usable

    eventually(is_back)
    assert scheduler.wait_for_workers(1, 0.01) is None
    worker = make_worker(engine=ENGINE, description=b"late")
    assert descriptions(scheduler, 1) == (b"late",)
    worker.close()
    second.stop()
    assert scheduler.workers(1) == (b"late",)
