"""Fixtures: a server with one prompt in it, and engines on it that give everything back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina_lab.reference.config import ReferenceConfig
from tests.lab.reference.engines import (
    PROMPT,
    SMALL,
    Engine,
    assert_everything_is_given_back,
    new_client,
    populate,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def cache_server() -> Iterator[ServerThread]:
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        server = ServerThread(Path(directory) / "run" / "s", arena_bytes=8 << 20)
        yield server
        server.stop()


@pytest.fixture
def cache(cache_server: ServerThread) -> Iterator[ServerThread]:
    """The module's server; nothing of the test before is left in it but its chunks."""
    yield cache_server
    cache_server.device.retrieves.open()
    cache_server.device.stores.open()


@pytest.fixture
def make_engine(cache: ServerThread) -> Iterator[Callable[..., Engine]]:
    """Engines on the module's server; at the end each must have got everything back."""
    engines: list[Engine] = []

    def make(
        config: ReferenceConfig = SMALL,
        num_blocks: int = 64,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> Engine:
        client = new_client(cache.settings.socket, clock=clock)
        engines.append(Engine(config, num_blocks, client=client, **options))
        client.connect()
        return engines[-1]

    yield make
    cache.device.retrieves.open()
    cache.device.stores.open()
    try:
        for engine in engines:
            assert_everything_is_given_back(engine)
    finally:
        for engine in engines:
            engine.close()
    eventually(lambda: cache.gauges()["pins"] == cache.gauges()["leases"] == 0)
    assert cache.gauges()["queued_transfers"] == 0


@pytest.fixture
def populated(cache: ServerThread, make_engine: Callable[..., Engine]) -> ServerThread:
    """The server holds the chunks of `PROMPT`."""
    populate(make_engine(), PROMPT)
    return cache
