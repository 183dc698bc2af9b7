"""A server that is stopped costs an engine no block for longer than its stores may take.

The engine gives the store up, uses its pages for something else, and the server goes on: nothing
wrong is ever found. The engine here is a client in this process; the server is real.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_server import FaultServer
from tests.support.giving_up import (
    CHUNKS,
    STAGES,
    WAYS,
    Scene,
    at_its_deadline,
    queued,
    with_all_others,
)

Stage = Callable[[Scene], None]
Way = Callable[[Scene], None]


@pytest.fixture
def server(socket_path: Path) -> Iterator[FaultServer]:
    server = FaultServer(socket_path)
    yield server
    server.kill()


@pytest.fixture
def scene(socket_path: Path, server: FaultServer) -> Iterator[Scene]:
    scene = Scene(socket_path, server)
    yield scene
    scene.close()


def sent_and_not_read(scene: Scene) -> None:
    """The server learns of the store only when it goes on."""
    stop(scene)
    scene.begin()


def stop(scene: Scene) -> None:
    assert isinstance(scene.server, FaultServer)
    scene.server.send(signal.SIGSTOP)


def go_on(scene: Scene) -> None:
    assert isinstance(scene.server, FaultServer)
    scene.server.send(signal.SIGCONT)


@pytest.mark.parametrize("give_up", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("reach", [sent_and_not_read, *STAGES], ids=lambda stage: stage.__name__)
def test_the_server_stops_until_the_store_is_given_up(
    scene: Scene, reach: Stage, give_up: Way
) -> None:
    """Row 49: an engine's blocks must not depend on a process that is stopped."""
    reach(scene)
    stop(scene)
    give_up(scene)
    scene.use_pages()
    assert scene.worker.client.transfers_in_flight == 0
    go_on(scene)
    scene.let_all_pass()
    assert scene.found() == 0
    assert scene.found(scene.keys_ahead) == (CHUNKS if reach is queued else 0)
    scene.check_store_again()


@pytest.mark.parametrize("give_up", WAYS, ids=lambda way: way.__name__)
def test_the_server_stops_with_a_store_that_is_stored_and_not_answered(
    scene: Scene, server: FaultServer, give_up: Way
) -> None:
    """All its bytes were in: it stays found, and its answer comes late."""
    server.call("replies.hold", "Stored")
    scene.begin()
    server.call("replies.wait_until_held", "Stored")
    stop(scene)
    give_up(scene)
    scene.use_pages()
    go_on(scene)
    server.call("replies.release", "Stored")
    assert scene.found() == CHUNKS
    assert server.totals()["stores_void"] == 0
    if give_up in (at_its_deadline, with_all_others):
        scene.worker.wait(lambda: scene.store.ended is not None)
        assert scene.store.given_up
