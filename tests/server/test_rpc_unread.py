"""Replies that a client does not read: the server makes no more of them until it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import protocol
from lamina.server import rpc
from lamina.server.sessions import Session
from tests.e2e.strangers import Stranger
from tests.support.server import ServerThread
from tests.support.wait import eventually

REQUESTS = 5000
"""Their replies are several megabytes, more than a socket holds."""
MOST_UNSENT_BYTES = 1 << 20


@pytest.fixture
def stranger(server: ServerThread, socket_path: Path) -> Iterator[Stranger]:
    stranger = Stranger(socket_path)
    stranger.greet()
    assert isinstance(stranger.ask(protocol.Hello(1, "stranger", "stranger")), protocol.Welcome)
    yield stranger
    stranger.close()


def test_no_request_is_handled_while_replies_lie_unread(
    server: ServerThread, stranger: Stranger
) -> None:
    (transport,) = server.server._transports.values()
    assert isinstance(transport, asyncio.Transport)
    connection = transport.get_protocol()
    assert isinstance(connection, rpc.Connection)
    handled, go_on = [], threading.Event()
    get_stats = server.server._handlers[protocol.GetStats]

    def noting(session: Session, request: Any) -> Any:
        handled.append(request.id)
        return get_stats(session, request)

    server.server._handlers[protocol.GetStats] = noting
    server._loop.call_soon_threadsafe(go_on.wait, 20)
    stranger.send(*(protocol.GetStats(number) for number in range(REQUESTS)))
    go_on.set()
    eventually(lambda: server.on_loop(lambda: handled and not connection._is_turn_due))
    assert len(handled) < REQUESTS
    assert server.on_loop(transport.get_write_buffer_size) < MOST_UNSENT_BYTES
    replies = [stranger.receive() for _ in range(REQUESTS)]
    assert [reply.id for reply in replies if reply] == list(range(REQUESTS))
    assert handled == list(range(REQUESTS))
