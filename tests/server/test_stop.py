"""A server that stops while something of an engine that has gone is still on its way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker


def test_memory_of_an_engine_that_left_in_the_middle_of_a_retrieve_is_given_back(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last copy ends after the server was told to stop, and its memory is closed then."""
    server = ServerThread(socket_path)
    worker = PageWorker(socket_path)
    keys = worker.store_new(2)
    server.device.retrieves.hold_ends()
    worker.begin_retrieve("r", keys, range(32, 32 + 2 * BLOCKS_PER_CHUNK))
    server.device.retrieves.wait_until_ending()
    (session,) = server.on_loop(lambda: list(server.server.sessions))
    worker.client.close()
    eventually(lambda: not server.gauges()["sessions"])
    assert not session.over.is_set()
    with caplog.at_level(logging.ERROR):
        server._loop.call_soon_threadsafe(server.server.stop)
        eventually(lambda: server.server._is_stopping())
        server.device.retrieves.let_end()
        server._thread.join(20)
    assert not server._thread.is_alive()
    assert session.over.is_set()
    assert not caplog.records
