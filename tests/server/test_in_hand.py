"""A request that is in hand for some turns: order, engines that leave, a server that stops; and an
engine's memory, which is opened and closed beside the loop meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina import protocol
from lamina.board import Board
from lamina.devices.base import EngineMemory
from lamina.devices.host import HostMemory, HostServerDevice
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.server.index import Chunk, Index
from lamina.server.leases import Lease, LeaseTable
from lamina.server.turns import CHUNKS_PER_TURN, Turns
from lamina_lab.known.content import ids, random_keys
from tests.e2e.strangers import Pages, Stranger, open_fds
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path)
    yield thread
    thread.stop()


def greeted(server: ServerThread) -> Stranger:
    stranger = Stranger(server.settings.socket)
    stranger.greet()
    stranger.ask(protocol.Hello(1, "engine", "stranger"))
    return stranger


def pass_turns(server: ServerThread) -> None:
    """As many as a server needs to stop that waits for nobody."""
    for _ in range(10):
        server.after_reading(lambda: None)


class HeldDevice(HostServerDevice):
    """A host device that closes memory when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_close = threading.Event()
        self.is_closing = threading.Event()
        self.done: list[str] = []

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        self.done.append("opened")
        return _HeldMemory(self, peer, board, regions)


class _HeldMemory(HostMemory):
    def __init__(
        self, device: HeldDevice, peer: Peer, board: Board, regions: Sequence[Region]
    ) -> None:
        super().__init__(peer, board, regions)
        self._device = device

    def close(self) -> None:
        self._device.is_closing.set()
        assert self._device.may_close.wait(20)
        assert not self.board._map.closed, "the board goes after the memory"
        self._device.done.append("closed")


def test_memory_is_closed_beside_the_loop_and_before_it_is_opened_anew(socket_path: Path) -> None:
    files = open_fds()
    device = HeldDevice()
    server = ServerThread(socket_path, device)
    leaving, pages = greeted(server), Pages()
    leaving.ask(pages.register(2))
    leaving.close()
    assert device.is_closing.wait(20)
    other = greeted(server)
    assert isinstance(other.ask(protocol.Ping(2)), protocol.Pong), "the loop is held up"
    other.send(pages.register(3), protocol.Workers(4))
    eventually(lambda: server.on_loop(lambda: any(s.in_hand for s in server.server.sessions)))
    assert device.done == ["opened"]
    device.may_close.set()
    assert isinstance(other.receive(), protocol.Registered)
    known = other.receive()
    assert isinstance(known, protocol.WorkersKnown), "the order of the requests"
    assert len(known.descriptions) == 1
    assert device.done == ["opened", "closed", "opened"]
    device.is_closing.clear()
    device.may_close.clear()
    other.close()
    assert device.is_closing.wait(20)
    server.on_loop(server.server.stop)
    pass_turns(server)
    device.may_close.set()
    server.stop()
    assert device.done == ["opened", "closed", "opened", "closed"]
    assert open_fds() == files


class Hold:
    """Keeps what finds chunks, or clears, taking turns until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go_on = False
        for name in ("find_and_pin", "clear", "make_room"):
            monkeypatch.setattr(Index, name, self._held(getattr(Index, name)))

    def _held(self, inner: Callable[..., Turns[Any]]) -> Callable[..., Turns[Any]]:
        def held(*arguments: Any) -> Turns[Any]:
            result = yield from inner(*arguments)
            while not self._may_go_on:
                yield None
            return result

        return held

    def wait(self, server: ServerThread) -> None:
        eventually(lambda: server.on_loop(lambda: any(s.in_hand for s in server.server.sessions)))

    def release(self) -> None:
        self._may_go_on = True


def test_requests_of_a_connection_are_taken_up_in_order_and_others_go_on(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = worker.store_new(4)
    stranger, other = greeted(server), greeted(server)
    hold = Hold(monkeypatch)
    stranger.send(
        protocol.Lookup(2, "r", tuple(keys)), protocol.EndRequest(3, "r"), protocol.Ping(4)
    )
    hold.wait(server)
    assert isinstance(other.ask(protocol.Ping(2)), protocol.Pong)
    assert server.gauges()["pins"] == 4
    hold.release()
    replies = [stranger.receive() for _ in range(3)]
    assert [reply and reply.id for reply in replies] == [2, 3, 4]
    assert isinstance(replies[0], protocol.Found)
    assert replies[0].chunks == 4
    assert server.gauges()["leases"] == server.gauges()["pins"] == 0
    stranger.close()
    other.close()


def store_request(keys: Sequence[bytes]) -> protocol.Store:
    blocks = protocol.pack_block_ids(ids(range(len(keys) * BLOCKS_PER_CHUNK)))
    return protocol.Store(3, 3, b"", tuple(keys), (blocks,), 0)


@pytest.mark.parametrize("what", ["lookup", "store", "clear"])
def test_an_engine_that_leaves_in_the_middle_of_its_request_leaves_nothing_held(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    keys = worker.store_new(2)
    stranger, pages = greeted(server), Pages()
    assert isinstance(stranger.ask(pages.register(2)), protocol.Registered)
    hold = Hold(monkeypatch)
    requests: dict[str, protocol.Message] = {
        "lookup": protocol.Lookup(3, "r", tuple(keys)),
        "store": store_request(random_keys(2)),
        "clear": protocol.Clear(3),
    }
    stranger.send(requests[what])
    hold.wait(server)

    def lose() -> None:
        for session in server.server.sessions:
            if session.in_hand:
                session.hang_up()

    server.on_loop(lose)
    assert stranger.is_closed()
    assert server.gauges()["sessions"] == 2, "its request is still in hand"
    hold.release()
    eventually(lambda: server.gauges()["sessions"] == 1)
    stranger.close()
    held = ("pins", "leases", "arena_reserved_bytes", "queued_transfers")
    eventually(lambda: not any(server.gauges()[name] for name in held))


def test_a_server_that_stops_in_the_middle_of_a_clear_still_answers_it(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.store_new(2)
    stranger = greeted(server)
    hold = Hold(monkeypatch)
    stranger.send(protocol.Clear(2))
    hold.wait(server)
    server.on_loop(server.server.stop)
    pass_turns(server)
    hold.release()
    cleared = stranger.receive()
    assert isinstance(cleared, protocol.Cleared)
    assert cleared.chunks == 2
    assert stranger.is_closed()
    stranger.close()


def test_a_retrieve_whose_lease_ends_while_it_is_prepared_is_refused(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = worker.store_new(2)
    drop = LeaseTable.end_request

    def pin(index: Index, chunks: Sequence[Chunk]) -> None:
        """The last part is pinned, and then another's turn ends the request."""
        inner(index, chunks)
        if server.server.leases._leases:
            drop(server.server.leases, worker.client.engine, "r")

    inner = Index.pin
    lease = worker.find("r", keys)
    monkeypatch.setattr(Index, "pin", pin)
    retrieve = worker.begin_leased("r", lease, range(2 * BLOCKS_PER_CHUNK))
    worker.wait(lambda: retrieve.is_acknowledged)
    assert retrieve.outcome is not None
    assert retrieve.outcome.name == "REFUSED"
    monkeypatch.undo()
    assert server.gauges()["pins"] == 0


def test_a_lease_that_ended_otherwise_is_not_ended_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the turns of an owner's end."""
    kept: list[Turns[None]] = []
    index = Index.__new__(Index)
    monkeypatch.setattr(Index, "unpin", lambda *_: None)
    table = LeaseTable(index, 10.0, lambda: 0.0, kept.append)
    leases: list[Lease] = [table.grant("e", "s", str(n), []) for n in range(3 * CHUNKS_PER_TURN)]
    table.end_owner("s")
    next(kept[0])
    assert 0 < len(table) < len(leases)
    table.end("e", leases[-1].number)
    table.end_owner("s")
    for work in kept:
        assert list(work) is not None
    assert len(table) == 0
    assert table.count_of("s") == (0, 0)
