"""How much one peer may ask for at a time, and that what exceeds it costs nobody else anything."""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import protocol
from lamina.errors import ErrorCode
from lamina.server import limits, listener, rpc
from lamina.server.sessions import Session
from lamina_lab.known.content import ids, random_keys
from tests.e2e.strangers import (
    GEOMETRY,
    SLOTS,
    Bystander,
    Pages,
    Stranger,
    assert_refused,
    lease_of,
    open_fds,
    retrieve,
)
from tests.support.server import ServerProcess, connected_client
from tests.support.wait import eventually

NEVER = 1
"""A ticket that nobody writes."""


def greeted(connect: Callable[[], Stranger], name: str) -> Stranger:
    stranger = connect()
    stranger.greet()
    assert isinstance(stranger.ask(protocol.Hello(1, name, name)), protocol.Welcome)
    return stranger


def store(number: int, ticket: int = 0, chunks: int = 1) -> protocol.Store:
    """A store of new chunks, from the first blocks on."""
    blocks = protocol.pack_block_ids(ids(range(4 * chunks)))
    return protocol.Store(number, number, b"", tuple(random_keys(chunks)), (blocks,), ticket)


# Turns.


def test_a_flood_is_handled_a_turn_at_a_time(
    bystander: Bystander, guest: Stranger, connect: Callable[[], Stranger]
) -> None:
    """Everything is there before the server looks: the other's turn comes after one of the flood's,
    or before."""
    server, order, go_on = bystander.server.server, [], threading.Event()
    other = greeted(connect, "other")
    ping = server._handlers[protocol.Ping]

    def noting(session: Session, request: Any) -> Any:
        order.append(session.label)
        return ping(session, request)

    server._handlers[protocol.Ping] = noting
    bystander.server._loop.call_soon_threadsafe(go_on.wait, 20)
    guest.send(*(protocol.Ping(number) for number in range(3000)))
    other.send(protocol.Ping(7))
    go_on.set()
    assert other.receive() == protocol.Pong(7)
    for number in range(3000):
        assert guest.receive() == protocol.Pong(number)
    assert len(order) == 3001
    assert order.index("other") <= rpc.REQUESTS_PER_TURN


def test_a_large_request_is_a_turn_of_its_own(
    bystander: Bystander, guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "BYTES_PER_TURN", 1)
    guest.send(*(protocol.Ping(number) for number in range(50)))
    assert [guest.receive() for _ in range(50)] == [protocol.Pong(n) for n in range(50)]


def test_what_came_before_a_giant_frame_is_answered(guest: Stranger) -> None:
    guest.send_bytes(
        protocol.encode(protocol.Ping(7)) + protocol.encode(protocol.Ping(8)) + b"\xff" * 4
    )
    assert guest.receive() == protocol.Pong(7)
    assert guest.receive() == protocol.Pong(8)
    assert_refused(guest.receive(), ErrorCode.MALFORMED, "a frame of")
    assert guest.receive() is None


def test_requests_without_an_answer_are_bounded(
    bystander: Bystander, worker_guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of cancels for one transfer that cannot end yet waits in the sender's socket."""
    monkeypatch.setattr(rpc, "MAX_UNANSWERED", 10)
    lease = lease_of(worker_guest, bystander)
    bystander.server.device.retrieves.close()
    worker_guest.send(retrieve(lease))
    bystander.server.device.retrieves.wait_until_held()
    worker_guest.send(*(protocol.Cancel(100 + number, 1020) for number in range(50)))
    (connection,) = (
        transport.get_protocol()
        for session, transport in bystander.server.server._transports.items()
        if session.label == "guest"
    )
    assert isinstance(connection, rpc.Connection)
    eventually(lambda: bystander.server.after_reading(lambda: len(connection._tasks)) == 10)
    assert bystander.server.after_reading(lambda: len(connection._tasks)) == 10
    bystander.server.device.retrieves.open()
    replies = [worker_guest.receive() for _ in range(51)]
    assert {reply.id for reply in replies if reply} == {20, *range(100, 150)}


# Leases, retrieves, stores.


def test_leases_of_one_session_are_bounded_and_the_rest_are_misses(
    bystander: Bystander, guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES", 3)
    keys = tuple(bystander.keys)
    found = [guest.ask(protocol.Lookup(n, f"r{n}", keys)) for n in range(5)]
    assert [reply.chunks for reply in found if isinstance(reply, protocol.Found)] == [2, 2, 2, 0, 0]
    again = guest.ask(protocol.Lookup(9, "r0", keys))  # replaces its own
    assert isinstance(again, protocol.Found)
    assert again.chunks == 2
    assert bystander.server.totals()["leases_refused"] == 2
    bystander.check()
    guest.close()
    eventually(lambda: bystander.server.gauges()["leases"] == 0)


def test_chunks_under_lease_are_bounded(
    bystander: Bystander, guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LEASED_CHUNKS", 3)
    keys = tuple(bystander.keys)
    found = [guest.ask(protocol.Lookup(n, f"r{n}", keys)) for n in range(2)]
    assert [reply.chunks for reply in found if isinstance(reply, protocol.Found)] == [2, 0]


@pytest.mark.parametrize(("name", "most"), [("MAX_RETRIEVES", 1), ("MAX_RETRIEVED_BLOCKS", 15)])
def test_one_retrieve_too_many_is_refused_as_busy(
    bystander: Bystander,
    worker_guest: Stranger,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    most: int,
) -> None:
    monkeypatch.setattr(limits, name, most)
    lease = lease_of(worker_guest, bystander)
    bystander.server.device.retrieves.close()
    worker_guest.send(retrieve(lease, id=20, slot=0))
    reply = worker_guest.ask(retrieve(lease, id=21, slot=1))
    assert_refused(reply, ErrorCode.BUSY, "retrieves of 8 blocks", "recompute")
    bystander.server.device.retrieves.open()
    done = worker_guest.receive()
    assert isinstance(done, protocol.Retrieved)
    assert isinstance(worker_guest.ask(retrieve(lease_of(worker_guest, bystander))), type(done))


def test_stores_on_their_way_take_half_of_the_arena_and_no_more(
    bystander: Bystander, worker_guest: Stranger
) -> None:
    """Their tickets never come: what they have reserved would be lost to everybody."""
    capacity = bystander.server.gauges()["arena_capacity_bytes"]
    wanted = int(capacity // GEOMETRY.chunk_bytes)
    worker_guest.send(*(store(100 + number, NEVER) for number in range(wanted)))
    eventually(lambda: bystander.server.totals()["dropped_chunks"] > 0)
    reserved = bystander.server.gauges()["arena_reserved_bytes"]
    assert 0 < reserved <= capacity / 2
    bystander.check()
    bystander.worker.store_new(4)
    worker_guest.close()
    eventually(lambda: bystander.server.gauges()["arena_reserved_bytes"] == 0)


def test_retrieves_in_flight_drop_no_store(bystander: Bystander, worker_guest: Stranger) -> None:
    """They are counted apart."""
    lease = lease_of(worker_guest, bystander)
    for slot in range(SLOTS):
        worker_guest.send(retrieve(lease, id=20 + slot, slot=slot, ticket=NEVER))
    session = next(s for s in bystander.server.server.sessions if s.label == "guest")
    eventually(lambda: len(session.slots) == SLOTS)
    assert session.stores == 0
    stored = worker_guest.ask(store(90))
    assert isinstance(stored, protocol.Stored)
    assert stored.stored == 1


def test_stores_in_flight_are_bounded_and_one_that_ends_makes_room_for_another(
    bystander: Bystander, worker_guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STORES", 2)
    session = next(s for s in bystander.server.server.sessions if s.label == "guest")
    worker_guest.send(store(30, NEVER), store(31, NEVER))
    dropped = worker_guest.ask(store(32))
    assert isinstance(dropped, protocol.Stored)
    assert (dropped.stored, dropped.dropped) == (0, 1)
    assert (session.stores, session.reserved_bytes) == (2, 2 * GEOMETRY.chunk_bytes)
    worker_guest.board.ticket = NEVER
    ended = [worker_guest.receive(), worker_guest.receive()]
    assert {reply.id for reply in ended if reply} == {30, 31}
    assert (session.stores, session.reserved_bytes) == (0, 0)
    for number in (33, 34, 35):
        stored = worker_guest.ask(store(number))
        assert isinstance(stored, protocol.Stored)
        assert stored.stored == 1


def test_transfers_whose_ticket_never_comes_are_cancelled_in_the_end(
    bystander: Bystander, worker_guest: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_of(worker_guest, bystander)
    worker_guest.send(store(30, NEVER), retrieve(lease, id=31, ticket=NEVER))
    eventually(lambda: bystander.server.gauges()["queued_transfers"] == 2)
    bystander.server.clock_s += limits.TRANSFER_TTL_S + 1
    ended = [worker_guest.receive(), worker_guest.receive()]
    assert {reply.status for reply in ended if reply} == {1}  # type: ignore[union-attr]
    assert bystander.server.totals()["overdue_transfers"] == 2


# Sizes.


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (protocol.Lookup(5, "r" * 1025, (b"k" * 32,)), "1025 characters"),
        (
            protocol.Lookup(5, "r", tuple(n.to_bytes(32, "big") for n in range(2**16 + 1))),
            "65537 keys",
        ),
        (
            protocol.Register(5, "host", GEOMETRY, Pages().page_map, Pages().regions * 1025),
            "1025 regions",
        ),
        (
            protocol.Register(5, "host", GEOMETRY, Pages().page_map, Pages().regions, b"d" * 4097),
            "4097 bytes",
        ),
    ],
    ids=["name", "keys", "regions", "description"],
)
def test_what_is_too_large_is_refused(
    guest: Stranger, message: protocol.Message, word: str
) -> None:
    assert_refused(guest.ask(message), ErrorCode.BAD_REQUEST, word)


def test_an_error_does_not_send_back_all_that_it_was_sent(guest: Stranger) -> None:
    register = protocol.Register(5, "d" * (1 << 20), GEOMETRY, Pages().page_map, Pages().regions)
    reply = guest.ask(register)
    assert isinstance(reply, protocol.ErrorReply)
    assert len(reply.cause) <= 1000


def test_a_label_cannot_write_lines_into_the_log(stranger: Stranger) -> None:
    stranger.greet()
    reply = stranger.ask(protocol.Hello(5, "e", "x\nERROR all is lost"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "cannot be printed")


# Connections.


def test_who_says_nothing_is_told_why_it_is_turned_away(
    connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.01)
    stranger = connect()
    assert_refused(stranger.receive(), ErrorCode.MALFORMED, "no greeting came within 0.01 s")
    assert stranger.is_closed()


def test_silent_connections_are_bounded_and_the_oldest_go_first(
    bystander: Bystander, connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_GREETINGS", 4)
    silent = [connect() for _ in range(20)]
    for stranger in silent[:10]:
        assert stranger.is_closed()
    greeted(connect, "late")
    bystander.check()


def test_one_session_too_many_is_turned_away_as_busy(
    bystander: Bystander, connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.server.main.MAX_SESSIONS", 2)
    first, second = greeted(connect, "first"), connect()
    second.greet()
    assert_refused(second.receive(), ErrorCode.BUSY, "connections are served already")
    first.close()
    eventually(lambda: bystander.server.gauges()["sessions"] == 1)
    greeted(connect, "third")


def test_a_server_without_descriptors_left_serves_on_and_takes_connections_again(
    socket_path: Path,
) -> None:
    server = ServerProcess(socket_path, "--arena", "1MiB")
    server.wait_until_serving()
    pid = server.process.pid
    before = connected_client(socket_path)
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limit[1]))
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for peer in waiting:
        peer.connect(os.fspath(socket_path))
    for _ in range(2):  # with the second answer it has tried to take them
        assert isinstance(before.ask(protocol.Ping), protocol.Pong)
    for peer in waiting:
        peer.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    connected_client(socket_path).close()
    before.close()
    server.stop()
    assert "cannot take a connection: Too many open files" in server.said


def test_descriptors_that_come_with_later_messages_are_not_kept(
    bystander: Bystander, guest: Stranger
) -> None:
    before = open_fds()
    for number in range(20):
        socket.send_fds(
            guest.socket, [protocol.encode(protocol.Ping(number))], [guest.board.fd] * 10
        )
        assert guest.receive() == protocol.Pong(number)
    assert open_fds() == before


# Others' things.


def test_nobody_cancels_what_is_anothers(bystander: Bystander, worker_guest: Stranger) -> None:
    """Neither by its number nor by its request's name."""
    worker = bystander.worker
    bystander.server.device.retrieves.close()
    theirs = worker.begin_retrieve("r", bystander.keys, range(8, 16))
    bystander.server.device.retrieves.wait_until_held()
    for number in range(200, 230):
        cancelled = worker_guest.ask(protocol.Cancel(number, number - 200))
        assert cancelled == protocol.Cancelled(number)
    assert isinstance(worker_guest.ask(protocol.EndRequest(7, "r")), protocol.Done)
    assert isinstance(worker_guest.ask(protocol.EndLease(8, theirs.number)), protocol.Done)
    bystander.server.device.retrieves.open()
    worker.wait(lambda: theirs.is_acknowledged)
    assert theirs.outcome == 0


def test_logs_and_metrics_name_no_prompt_and_no_key(
    bystander: Bystander,
    worker_guest: Stranger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "a prompt's name"
    keys = tuple(bystander.keys)
    found = worker_guest.ask(protocol.Lookup(3, secret, keys))
    assert isinstance(found, protocol.Found)
    worker_guest.ask(retrieve(found.lease))
    worker_guest.ask(retrieve(found.lease))  # refused
    worker_guest.ask(protocol.Lookup(3, secret, keys + keys))  # refused
    worker_guest.send_bytes(b"\xff" * 8)
    worker_guest.is_closed()
    server = bystander.server
    said = caplog.text + str(server.totals()) + str(server.gauges())
    for key in keys:
        assert key.hex() not in said
        assert repr(key) not in said
    assert secret not in said
    assert not np.any([secret in str(name) for name in server.server.counters.refused])
