"""A transfer alone: what it announces, how it ends, and who hears of that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.copies import CopyList, CopyPlan
from lamina.devices.base import EngineMemory
from lamina.errors import DeviceError
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina.server.routes import DirectRoute
from lamina.server.transfer import Slot, Transfer
from lamina_lab.known.content import ids, random_keys
from tests.e2e.strangers import Pages, Stranger
from tests.support.lane import NoMemory, ScriptedStream
from tests.support.server import ServerThread

LAYERS, PAGE_BYTES, BLOCKS = 4, 8, 2
GEOMETRY = Geometry(16, (Group(16),), tuple(Layer(str(i), 0, 1, PAGE_BYTES) for i in range(LAYERS)))
PAGE_MAP = PageMap((BLOCKS,), tuple((PlanePages(i, 0, PAGE_BYTES),) for i in range(LAYERS)))
BASE = 70
FAULT = DeviceError("the link broke", "Mend it")


class NotingStream(ScriptedStream):
    """Notes what it copies and announces, in order."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self.noted: list[str] = []

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        self.noted.append(f"{copies.nbytes} bytes")

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        self._board.announce(slot, count)
        self.noted.append(f"count {count}")


@pytest.fixture
def stream(board: Board) -> NotingStream:
    return NotingStream(board)


def make(board: Board, width: int = LAYERS, **options: Any) -> Transfer:
    """A store unless it gets a slot."""
    blocks = [np.arange(BLOCKS, dtype=np.int32)]
    regions = [layer << 20 for layer in range(LAYERS)]
    chunks = [number * GEOMETRY.chunk_bytes for number in range(BLOCKS)]
    plan = CopyPlan(GEOMETRY, PAGE_MAP, regions, chunks, 0, blocks)
    ticket, slot = 1, options.pop("slot", None)
    route = DirectRoute(plan, GEOMETRY.slices(width), board, ticket, *(slot or ()))
    options = {"on_loop": lambda call: call(), **options}
    return Transfer(17, NoMemory(), board, ticket, route, begun_s=0.0, slot=slot, **options)


def retrieve(board: Board, width: int = 1, **options: Any) -> Transfer:
    board.reset(0)
    board.announce(0, BASE)
    return make(board, width, slot=Slot(0, BASE), **options)


def steps(transfer: Transfer, stream: NotingStream, most: int = 1000) -> Iterator[None]:
    """Those of a lane that stops after some batches."""
    for number, _ in enumerate(transfer.run(stream)):
        if number == most:
            return
        yield


def run(transfer: Transfer, stream: NotingStream, most: int = 1000) -> None:
    for _ in steps(transfer, stream, most):
        pass


def test_a_retrieve_announces_each_slice_after_its_bytes(
    board: Board, stream: NotingStream
) -> None:
    transfer = retrieve(board, width=3)
    run(transfer, stream)
    three, one = (layers * BLOCKS * PAGE_BYTES for layers in (3, 1))
    assert stream.noted == [f"{three} bytes", "count 71", f"{one} bytes", "count 72"]
    assert not transfer.ended.is_set()
    transfer.end(None)
    assert transfer.ended.is_set()
    assert (transfer.status, transfer.error, transfer.nbytes) == (0, None, three + one)
    assert (board.landed(0), board.status(0)) == (BASE + 2, 0)


def test_a_store_is_one_slice_that_nobody_announces(board: Board, stream: NotingStream) -> None:
    transfer = make(board)
    run(transfer, stream)
    transfer.end(None)
    assert stream.noted == [f"{LAYERS * BLOCKS * PAGE_BYTES} bytes"]
    assert transfer.status is TransferStatus.OK
    assert (board.landed(0), board.status(0)) == (0, 0), "it has no slot"


@pytest.mark.parametrize("kind", [retrieve, make])
@pytest.mark.parametrize(
    ("error", "cancelled_as", "status"),
    [
        (FAULT, None, TransferStatus.COPY_FAILED),
        (FAULT, TransferStatus.STOPPED, TransferStatus.STOPPED),
        (None, TransferStatus.CANCELLED, TransferStatus.CANCELLED),
    ],
)
def test_one_that_is_cut_short_says_why(
    board: Board,
    stream: NotingStream,
    kind: Callable[..., Transfer],
    error: DeviceError | None,
    cancelled_as: TransferStatus | None,
    status: TransferStatus,
) -> None:
    transfer = kind(board)
    run(transfer, stream, most=0)
    if cancelled_as is not None:
        transfer.cancel(cancelled_as)
    transfer.end(error)
    assert (transfer.status, transfer.error, transfer.nbytes) == (status, error, 0)
    if transfer.slot is not None:
        assert (board.landed(0), board.status(0)) == (BASE + LAYERS, status), "a wait goes on"


@pytest.mark.parametrize("kind", [retrieve, make])
def test_a_cancel_that_comes_after_the_last_byte_changes_nothing(
    board: Board, stream: NotingStream, kind: Callable[..., Transfer]
) -> None:
    transfer = kind(board)
    run(transfer, stream)
    transfer.cancel()
    transfer.end(None)
    assert transfer.status is TransferStatus.OK


def test_a_store_that_its_engine_voids_is_cancelled_by_that_and_a_retrieve_is_not(
    board: Board,
) -> None:
    store, other = make(board), retrieve(board)
    assert not store.is_ready()
    board.void_stores(1)
    assert store.is_void
    assert [t.cancelled_as for t in (store, other)] == [TransferStatus.CANCELLED, None]
    assert store.is_ready(), "nobody needs its ticket"
    assert not other.is_void
    assert not other.is_ready()
    store.cancel(TransferStatus.STOPPED)
    assert store.cancelled_as == TransferStatus.STOPPED


def test_transfers_are_named_by_kind_and_number(board: Board) -> None:
    assert [str(retrieve(board)), str(make(board))] == ["retrieve 17", "store 17"]


def test_all_who_wait_hear_of_an_end_on_the_loop_and_of_one_that_has_been(board: Board) -> None:
    async def wait() -> list[str]:
        heard: list[str] = []
        loop = asyncio.get_running_loop()
        transfer = make(board, on_loop=loop.call_soon_threadsafe)

        async def hear(who: str) -> None:
            await transfer.ended.wait()
            heard.append(who)

        waiting = [asyncio.create_task(hear(who)) for who in ("reply", "cancel", "left", "stop")]
        await asyncio.sleep(0)
        waiting[2].cancel()  # whoever goes ends nothing for the others
        lane = threading.Thread(target=transfer.end, args=(None,))
        lane.start()
        await asyncio.gather(*waiting, return_exceptions=True)
        lane.join()
        await hear("late")
        return heard

    assert asyncio.run(wait()) == ["reply", "cancel", "stop", "late"]


@pytest.mark.parametrize("kind", ["retrieve", "store"])
def test_a_transfers_reply_and_its_cancels_come_of_one_end(server: ServerThread, kind: str) -> None:
    stranger, pages = Stranger(server.settings.socket), Pages()
    stranger.greet()
    stranger.ask(protocol.Hello(1, "engine", "stranger"))
    stranger.ask(pages.register(2))
    blocks, keys = (protocol.pack_block_ids(ids(range(4))),), tuple(random_keys(1))
    valve = server.device.stores
    request: protocol.Message = protocol.Store(5, 900, b"", keys, blocks, 0)
    if kind == "retrieve":
        stranger.ask(request)
        found = stranger.ask(protocol.Lookup(6, "r", keys))
        assert isinstance(found, protocol.Found)
        valve = server.device.retrieves
        request = protocol.Retrieve(5, 900, found.lease, 0, blocks, 0, 0, 1)
    valve.close()
    stranger.send(request, protocol.Cancel(7, 5), protocol.Ping(8))
    assert [stranger.receive(), stranger.receive()] == [protocol.Pong(8), protocol.Cancelled(7)], (
        "5 is the request's id and nobody's number"
    )
    valve.wait_until_held()
    stranger.send(protocol.Cancel(9, 900), protocol.Cancel(10, 900), protocol.Ping(11))
    assert stranger.receive() == protocol.Pong(11), "the others wait for its end"
    valve.open()
    ended = stranger.receive()
    assert isinstance(ended, (protocol.Retrieved, protocol.Stored))
    status = TransferStatus.OK if kind == "store" else TransferStatus.CANCELLED
    assert (ended.id, ended.status) == (5, status), "a store of one batch, and that had begun"
    assert [stranger.receive() for _ in range(2)] == [protocol.Cancelled(9), protocol.Cancelled(10)]
    assert stranger.ask(protocol.Cancel(12, 900)) == protocol.Cancelled(12), "it is over"
    assert server.gauges()["arena_reserved_bytes"] == server.gauges()["pins"] == 0
    stranger.close()
