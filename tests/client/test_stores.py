"""Stores that the client gives up: their pages are free at once, and the server can know it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.client import Store
from lamina.errors import ErrorCode
from lamina_lab.known.content import ids
from tests.support.played import STORE_TIMEOUT_S, Greeted, World
from tests.support.worker import BLOCKS_PER_CHUNK


@pytest.fixture
def server(world: World) -> Greeted:
    return world.serve()


@pytest.fixture
def board(server: Greeted) -> Iterator[Board]:
    """The server's view of the first connection's board, also once that is closed."""
    board = Board.attach(os.dup(server.board.fd))
    yield board
    board.close()


def answer(world: World, server: Greeted, number: int | None = None, status: int = 0) -> None:
    """Say that the next store, or the one of `number`, has ended, and let the client read it."""
    number = server.expect(protocol.Store) if number is None else number
    server.reply(protocol.Stored(number, status, 0 if status else 1, 0, int(bool(status))))
    world.client.poll()


def pass_deadlines(world: World) -> None:
    world.now_s += STORE_TIMEOUT_S
    world.client.poll()


def assert_given_up(store: Store, board: Board) -> None:
    assert store.is_over
    assert store.given_up
    assert board.is_void(store.ticket)


def assert_in_flight(store: Store, board: Board) -> None:
    assert not store.is_over
    assert not store.given_up
    assert not board.is_void(store.ticket)


def test_a_store_is_given_up_at_its_deadline_and_not_before(
    world: World, server: Greeted, board: Board
) -> None:
    store = world.store()
    assert world.client.transfers_in_flight == 1
    world.now_s += STORE_TIMEOUT_S - 0.1
    world.client.poll()
    assert_in_flight(store, board)
    world.now_s += 0.1
    world.client.poll()
    assert_given_up(store, board)
    assert store.ended is None
    assert world.client.transfers_in_flight == 0


def test_a_store_that_is_answered_in_time_is_not_void(
    world: World, server: Greeted, board: Board
) -> None:
    store = world.store()
    world.now_s += STORE_TIMEOUT_S - 0.1
    answer(world, server)
    pass_deadlines(world)
    assert store.is_over
    assert not store.given_up
    assert store.ended is not None
    assert not board.is_void(store.ticket)


def test_an_answer_that_waits_to_be_read_is_in_time(
    world: World, server: Greeted, board: Board
) -> None:
    """An engine that was stopped itself has not lost what the server did meanwhile."""
    store = world.store()
    world.now_s += 2 * STORE_TIMEOUT_S
    answer(world, server)
    assert store.is_over
    assert not store.given_up
    assert not board.is_void(store.ticket)


@pytest.mark.parametrize("status", [TransferStatus.OK, TransferStatus.CANCELLED])
def test_a_late_answer_changes_nothing(
    world: World, server: Greeted, board: Board, status: TransferStatus
) -> None:
    store = world.store()
    number = server.expect(protocol.Store)
    pass_deadlines(world)
    other = world.store()
    answer(world, server, number, status)
    assert_given_up(store, board)
    assert store.ended is not None
    assert store.ended.status == status
    assert_in_flight(other, board)
    assert world.client.transfers_in_flight == 1


def test_a_late_refusal_changes_nothing(world: World, server: Greeted, board: Board) -> None:
    store = world.store()
    number = server.expect(protocol.Store)
    pass_deadlines(world)
    server.refuse(number, ErrorCode.BAD_REQUEST)
    world.client.poll()
    assert_given_up(store, board)
    assert store.ended is None


def test_a_store_that_began_later_is_given_up_later(
    world: World, server: Greeted, board: Board
) -> None:
    early = world.store()
    world.now_s += 1
    late = world.store()
    world.now_s += STORE_TIMEOUT_S - 1
    world.client.poll()
    assert_given_up(early, board)
    assert_in_flight(late, board)
    world.now_s += 1
    world.client.poll()
    assert_given_up(late, board)


def test_a_store_with_an_earlier_ticket_is_given_up_with_one_that_began_before(
    world: World, server: Greeted, board: Board
) -> None:
    """The board voids it, so the engine must not believe that it may still be stored."""
    earlier = world.client.write_ticket()
    overdue = world.store()
    world.now_s += 1
    blocks = [ids(range(BLOCKS_PER_CHUNK))]
    store = world.client.store(b"", [bytes(32)], blocks, earlier)
    assert store is not None
    world.now_s += STORE_TIMEOUT_S - 1
    world.client.poll()
    assert_given_up(overdue, board)
    assert_given_up(store, board)


def test_all_stores_can_be_given_up_at_once(
    world: World, server: Greeted, board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    """As an engine does that resets its caches: no deadline has passed, and nothing is wrong."""
    stores = [world.store() for _ in range(3)]
    assert world.client.give_up_stores() == 3
    for store in stores:
        assert_given_up(store, board)
    assert world.client.transfers_in_flight == 0
    assert world.client.give_up_stores() == 0
    assert_in_flight(world.store(), board)
    world.client.poll()
    assert not caplog.records


def lose(world: World, server: Greeted) -> None:
    server.close()
    world.client.poll()
    assert not world.client.is_usable


@pytest.mark.parametrize("by_deadline", [True, False])
def test_stores_of_a_lost_connection_are_given_up_on_its_own_board(
    world: World, server: Greeted, board: Board, by_deadline: bool
) -> None:
    """The server may be stopped, and go on with them later."""
    store = world.store()
    lose(world, server)
    second = world.serve()
    number = second.expect(protocol.EndSession)
    other = world.store()
    assert_in_flight(store, board)
    if by_deadline:
        pass_deadlines(world)
    else:
        assert world.client.give_up_stores() == 2
        world.client.poll()
    assert_given_up(store, board)
    assert_given_up(other, second.board)
    assert world.client.transfers_in_flight == 0
    assert len(world.device.attached) == 1, "the lost connection's board is still pinned"
    second.reply(protocol.Done(number))
    world.client.poll()
    assert_in_flight(world.store(), second.board)


def test_without_any_server_a_lost_connection_is_over_with_its_last_store(
    world: World, server: Greeted, board: Board
) -> None:
    store = world.store()
    lose(world, server)
    assert len(world.device.attached) == 1
    pass_deadlines(world)
    assert_given_up(store, board)
    assert not world.device.attached


def test_a_retrieve_keeps_a_lost_connection_when_its_stores_are_given_up(
    world: World, server: Greeted, board: Board
) -> None:
    """A server that goes on may still write to its pages."""
    retrieve = world.client.retrieve("r", 3, 0, [ids(range(BLOCKS_PER_CHUNK))], 1)
    assert retrieve is not None
    store = world.store()
    lose(world, server)
    pass_deadlines(world)
    assert_given_up(store, board)
    assert not retrieve.is_over
    assert world.client.transfers_in_flight == 1
    assert len(world.device.attached) == 1


def test_a_client_that_closes_gives_up_its_stores(
    world: World, server: Greeted, board: Board
) -> None:
    """Nobody will say any more when the pages are free."""
    store = world.store()
    world.client.close()
    assert_given_up(store, board)


def test_that_stores_run_out_of_time_is_said_once_until_one_succeeds(
    world: World, server: Greeted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        world.store(), world.store()
        pass_deadlines(world)
    lose(world, server)
    server = world.serve()
    world.store()
    pass_deadlines(world)
    answer(world, server)  # of that one, late
    world.store()
    answer(world, server, status=TransferStatus.COPY_FAILED)
    world.store()
    pass_deadlines(world)
    late = [record for record in caplog.records if "has given up" in record.getMessage()]
    assert len(late) == 1
    assert late[0].levelno == logging.WARNING
    assert "2 stores that were not done in 4000 ms" in late[0].getMessage()
    assert "stopped or starved" in late[0].getMessage()
    assert "lamina.store_timeout_ms" in late[0].getMessage()
    server.expect(protocol.Store)
    world.store()
    answer(world, server)
    world.store()
    pass_deadlines(world)
    assert caplog.text.count("has given up") == 2
