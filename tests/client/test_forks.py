"""A child that an engine forks once it is connected holds nothing open, and disturbs nothing."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import UsageError
from lamina_lab.known.content import random_keys
from tests.support.server import ServerProcess, connected_client
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

KEYS = random_keys(2)
BLOCKS = range(2 * BLOCKS_PER_CHUNK)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Child:
    """A forked child that does `work`, says what came of it, and lives on until `end`."""

    def __init__(self, work: Callable[[], str]) -> None:
        said, saying = os.pipe()
        waiting, self._ending = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._ending)
                try:
                    answer = work()
                except BaseException as error:
                    answer = repr(error)
                os.write(saying, answer.encode() or b"-")
                os.read(waiting, 1)
            finally:
                os._exit(0)
        os.close(saying)
        os.close(waiting)
        self.said = os.read(said, 1 << 16).decode()
        os.close(said)

    def end(self) -> None:
        os.close(self._ending)
        os.waitpid(self._pid, 0)


def open_things() -> dict[int, str]:
    """What this process's descriptors are."""
    names = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names[number] = os.readlink(f"/proc/self/fd/{number}")
    return names


def things_of_clients() -> str:
    """Boards, pidfds and sockets that this process has open or mapped."""
    found = [name for name in open_things().values() if name.startswith("socket:")]
    found += [name for name in open_things().values() if "lamina" in name or "pidfd" in name]
    found += [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "lamina-" in line
    ]
    return " ".join(sorted(found))


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(socket_path, "--arena", "16MiB", "--chunk-tokens", "64")
    process.wait_until_filled()
    yield process
    process.stop()


def sessions(server: ServerProcess) -> float:
    """How many connections the server has besides the one that asks."""
    client = connected_client(server.socket)
    try:
        stats = client.ask(protocol.GetStats)
    finally:
        client.close()
    assert isinstance(stats, protocol.Stats)
    return stats.values["sessions"]


def test_the_server_sees_the_parent_leave_while_a_child_lives_on(server: ServerProcess) -> None:
    gc.collect()  # what tests before this one left
    before = things_of_clients()
    worker = PageWorker(server.socket)
    assert things_of_clients() != before
    assert sessions(server) == 1
    child = Child(things_of_clients)
    assert child.said == (before or "-")
    assert sessions(server) == 1, "the child has ended its parent's connection"
    worker.close()
    try:
        eventually(lambda: sessions(server) == 0)
    finally:
        child.end()


def test_a_lost_connections_board_is_not_kept_either(server: ServerProcess) -> None:
    gc.collect()  # what tests before this one left
    before = things_of_clients()
    worker = PageWorker(server.socket)
    worker.populate(KEYS, BLOCKS)
    worker.begin_retrieve("r", KEYS, BLOCKS)
    assert worker.client._link is not None
    worker.client._link.connection.close()
    worker.client.poll()
    assert worker.client._lost
    child = Child(things_of_clients)
    child.end()
    assert child.said == (before or "-")
    worker.close()


def test_the_parent_goes_on_whatever_its_child_does_with_the_client(server: ServerProcess) -> None:
    worker = PageWorker(server.socket)
    worker.populate(KEYS, BLOCKS)
    client = worker.client
    lookup = client.lookup("r", KEYS)

    def misuse() -> str:
        assert not client.is_usable
        assert not lookup.result or not lookup.result.chunks
        client.end_request("r")
        for call in (client.poll, client.connect, lambda: client.lookup("q", KEYS)):
            with pytest.raises(UsageError, match="belongs to the process that has made it"):
                call()
        client.close()
        return "done"

    child = Child(misuse)
    child.end()
    assert child.said == "done"
    result = lookup.wait(20)
    assert result is not None
    assert result.chunks == len(KEYS)
    assert worker.retrieve("r", KEYS, BLOCKS).outcome is TransferStatus.OK
    assert sessions(server) == 1
    worker.close()


def test_what_is_executed_inherits_nothing(server: ServerProcess) -> None:
    before = open_things()
    worker = PageWorker(server.socket)
    opened = open_things().keys() - before.keys()
    assert len(opened) >= 4, "a socket, a pidfd, a board and its mapping"
    assert not [number for number in opened if os.get_inheritable(number)]
    worker.close()
