"""The fence: pages are the engine's again when the server says so or is dead, and not before.

The engine here is a client in this process, so that it can be looked into; the server is real.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.client import Client, Gate, Retrieve, StepGates
from lamina.client.connection import Connection
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError
from lamina.settings import ClientSettings
from lamina_lab.known.content import POISON, random_keys
from tests.support.fault_server import FaultServer
from tests.support.wait import eventually
from tests.support.worker import PageWorker

CHUNKS = 2
SOURCE = range(8)
TARGET = range(8, 16)


class Scene:
    """A server that holds two chunks, and a worker whose clock the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self.servers = [FaultServer(path)]
        self.worker = PageWorker(path, clock=lambda: self.now_s, reconnect_every_ms=1)
        self.keys = self.worker.store_new(CHUNKS)

    @property
    def server(self) -> FaultServer:
        return self.servers[-1]

    @property
    def client(self) -> Client:
        return self.worker.client

    def begin_held(self) -> Retrieve:
        """A retrieve whose third slice waits at the valve."""
        self.server.call("retrieves.close")
        self.server.call("retrieves.let_pass", 2)
        retrieve = self.worker.begin_retrieve("held", self.keys, TARGET)
        self.server.call("retrieves.wait_until_held")
        eventually(lambda: retrieve.landed_slices == 2)
        return retrieve

    def poll_often(self) -> None:
        for _ in range(50):
            self.now_s += 0.01
            self.client.poll()

    def reconnect(self) -> None:
        """Until the worker has another connection."""

        def is_back() -> bool:
            self.now_s += 0.01
            self.client.poll()
            return self.client.is_usable

        eventually(is_back)

    def let_server_answer(self) -> None:
        """Until it has answered, over a connection that stands, all that it will answer now."""
        self.reconnect()
        for number in range(3):
            self.client.lookup(f"until {number}", self.keys).wait(20)
            self.client.end_request(f"until {number}")

    def lose_connection(self) -> None:
        """The server lives, and hangs up."""
        self.server.call("hang_up")
        self.worker.wait(lambda: not self.client.is_usable)

    def check_hit(self) -> None:
        self.worker.check_hit("after", self.keys, TARGET)

    def wait_until_nothing_is_held(self) -> None:
        eventually(
            lambda: all(
                self.server.gauges()[name] == 0 for name in ("pins", "leases", "queued_transfers")
            )
        )

    def restart(self) -> None:
        self.server.kill()
        self.servers.append(FaultServer(self.path))

    def end(self) -> None:
        self.worker.close()
        for server in self.servers:
            if server.process.is_alive():
                server.kill()


@pytest.fixture
def scene(socket_path: Path) -> Iterator[Scene]:
    scene = Scene(socket_path)
    try:
        yield scene
    finally:
        scene.end()


def cancel(scene: Scene, retrieve: Retrieve) -> None:
    scene.client.cancel(retrieve)


def end_request(scene: Scene, retrieve: Retrieve) -> None:
    scene.client.end_request(retrieve.request)


def time_out(scene: Scene, retrieve: Retrieve) -> None:
    scene.now_s += 60
    eventually(lambda: retrieve.outcome is TransferStatus.TIMED_OUT)


def lose_connection(scene: Scene, retrieve: Retrieve) -> None:
    scene.lose_connection()
    assert retrieve.outcome is TransferStatus.SERVER_DIED


def time_out_and_lose_connection(scene: Scene, retrieve: Retrieve) -> None:
    time_out(scene, retrieve)
    scene.lose_connection()


WAYS_TO_GIVE_UP = [cancel, end_request, time_out, lose_connection, time_out_and_lose_connection]
GiveUp = Callable[[Scene, Retrieve], None]


@pytest.fixture(params=WAYS_TO_GIVE_UP, ids=lambda way: way.__name__)
def give_up(request: pytest.FixtureRequest) -> GiveUp:
    way: GiveUp = request.param
    return way


def test_pages_given_up_are_free_when_the_server_agrees(scene: Scene, give_up: GiveUp) -> None:
    """Rows 10, 49: however it was given up, a copy that is on its way still has its pages; a lost
    connection's end is learnt over the next one."""
    retrieve = scene.begin_held()
    give_up(scene, retrieve)
    scene.let_server_answer()
    assert not retrieve.is_over, "the copy at the valve may still write"
    scene.server.call("retrieves.open")

    def is_over() -> bool:
        scene.poll_often()
        return retrieve.is_over

    eventually(is_over)
    scene.worker.poison(TARGET)
    scene.wait_until_nothing_is_held()
    assert scene.client.quarantined == 0
    scene.worker.expect(TARGET, POISON, "a page was written after the acknowledgement")
    scene.reconnect()
    scene.check_hit()


def test_pages_given_up_are_free_when_the_server_is_dead(scene: Scene, give_up: GiveUp) -> None:
    """Row 49: the other proof is the server's pidfd, whether or not it was stopped before."""
    retrieve = scene.begin_held()
    give_up(scene, retrieve)
    scene.server.send(signal.SIGSTOP)
    scene.poll_often()
    assert not retrieve.is_over
    scene.server.kill()

    def is_over() -> bool:
        scene.poll_often()
        return retrieve.is_over

    eventually(is_over)
    assert scene.client.quarantined == 0


def test_a_store_on_a_lost_connection_is_over_when_the_server_agrees(scene: Scene) -> None:
    """Rows 2, 10: a late read of pages that are the engine's again would store another's bytes."""
    scene.server.call("stores.close")
    keys = random_keys(CHUNKS)
    scene.worker.compute(keys, SOURCE)
    store = scene.worker.begin_store(keys, SOURCE)
    scene.server.call("stores.wait_until_held")
    scene.lose_connection()
    scene.let_server_answer()
    assert not store.is_over
    scene.server.call("stores.open")
    scene.worker.wait(lambda: store.is_over)
    scene.wait_until_nothing_is_held()
    scene.keys = keys
    scene.check_hit()


def test_another_server_cannot_end_the_session_of_one_that_is_stopped(
    scene: Scene, socket_path: Path
) -> None:
    """Row 49: the old server was replaced by hand while it was stopped; it may go on and write."""
    retrieve = scene.begin_held()
    scene.server.send(signal.SIGSTOP)
    assert scene.client._link is not None
    scene.client._link.connection.close()
    os.unlink(socket_path)
    os.unlink(f"{socket_path}.lock")
    stopped = scene.server
    scene.servers.append(FaultServer(socket_path))
    scene.reconnect()
    eventually(lambda: scene.server.call("refused", "bad_request") == 1)
    scene.poll_often()
    assert not retrieve.is_over
    assert scene.client.quarantined == 1
    stopped.kill()
    scene.worker.wait(lambda: retrieve.is_over)


def test_a_lease_of_the_former_server_is_none_of_its_successors(scene: Scene) -> None:
    """Row 8: the numbers of a server that was replaced between lookup and retrieve must not name
    another prompt's chunks."""
    lease = scene.worker.find("old", scene.keys)
    scene.restart()
    scene.worker.wait(lambda: not scene.client.is_usable)
    scene.reconnect()
    others = scene.worker.store_new(CHUNKS)
    for number in range(8):
        scene.client.lookup(f"new {number}", others).wait(20)
    scene.worker.poison(TARGET)
    retrieve = scene.worker.begin_leased("old", lease, TARGET)
    scene.worker.wait(lambda: retrieve.is_over)
    assert retrieve.outcome is TransferStatus.REFUSED
    scene.worker.expect(TARGET, POISON)


def test_only_an_engine_itself_ends_its_former_sessions(scene: Scene) -> None:
    """A stranger that guesses the number of a session is refused, and so is a session's own."""
    assert scene.client._link is not None
    number = scene.client._link.session
    stranger = Client(ClientSettings(socket=scene.path), HostWorkerDevice(), "stranger")
    stranger.connect()
    assert stranger._link is not None
    replies: list[protocol.Reply | None] = []
    for client in (stranger, scene.client):
        assert client._link is not None
        client._link.connection.call(lambda n: protocol.EndSession(n, number), replies.append)

    def both_answered() -> bool:
        stranger.poll()
        return len(replies) == 2

    scene.worker.wait(both_answered)
    assert all(isinstance(reply, protocol.ErrorReply) for reply in replies)
    stranger.close()
    scene.check_hit()


@pytest.mark.parametrize("outcome", [TransferStatus.OK, TransferStatus.SERVER_DIED])
def test_a_retrieve_outlives_its_board(scene: Scene, outcome: TransferStatus) -> None:
    """Row 34: a step that was armed before the server died can still wait, settle and look."""
    retrieve = scene.begin_held()
    gate = Gate(retrieve, 1)
    gates = StepGates(scene.client.device, [gate])
    if outcome is TransferStatus.OK:
        scene.server.call("retrieves.open")
        scene.worker.wait(lambda: retrieve.is_acknowledged)
    scene.server.kill()
    scene.worker.wait(lambda: retrieve.is_over and not scene.client._lost)
    with pytest.raises(ValueError, match="released"):
        retrieve.board.landed(retrieve.slot)
    assert retrieve.outcome is outcome
    assert retrieve.landed_slices == (0 if outcome else len(retrieve.slices))
    for layer in range(len(scene.worker.geometry.layers)):
        gates.before_layer(layer)
    assert gates.settle() == ([retrieve] if outcome else [])
    assert gate.is_released


def test_quarantined_pages_raise_an_alarm_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 49: a stopped server is said to be silent, its pages are counted and alarmed."""
    caplog.set_level(logging.INFO, "lamina.client")
    retrieve = scene.begin_held()
    scene.server.send(signal.SIGSTOP)
    time_out(scene, retrieve)
    for _ in range(5):
        scene.now_s += 1
        scene.poll_often()
    assert scene.client.quarantined == 1
    alarms = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(alarms) == 1
    assert "until it answers or its process ends" in alarms[0].getMessage()
    scene.server.send(signal.SIGCONT)
    scene.server.call("retrieves.open")
    scene.worker.wait(lambda: retrieve.is_over)
    scene.client.poll()
    assert "has its quarantined pages back" in caplog.text


def test_a_stopped_server_with_a_full_backlog_does_not_block_a_connect(socket_path: Path) -> None:
    """Row 50: there is no wait without an end in the engine's thread."""
    socket_path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listening:  # nobody accepts
        listening.bind(os.fspath(socket_path))
        listening.listen(1)
        board = Board.create(0)
        connections: list[Connection] = []
        with pytest.raises(ServerUnavailableError):
            connections.extend(Connection(socket_path, board) for _ in range(8))
        for connection in connections:
            connection.close()
            connection.server.close()
        board.close()
