"""Fixtures: toy engines, with a server in a thread or in a process that can be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engines_page.toy import CHUNKS, Toy, module_at
from tests.support.fault_server import FaultServer
from tests.support.server import ServerThread


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The engine on the page, as a module."""
    return module_at(tmp_path_factory.mktemp("engines_page") / "toy_engine.py")


@pytest.fixture
def make(toy: ModuleType, socket_path: Path) -> Iterator[Callable[..., Toy]]:
    """Makes engines; every server of the test has ended before they are closed."""
    toys: list[Toy] = []

    def make(socket: Path = socket_path, **settings: Any) -> Toy:
        toys.append(Toy(toy, socket, **settings))
        return toys[-1]

    yield make
    for made in toys:
        made.engine.close()
        assert not made.engine.client.transfers_in_flight


@pytest.fixture
def cold(make: Callable[..., Toy], tmp_path: Path) -> list[int]:
    """What an engine without a server makes of the prompt."""
    alone = make(tmp_path / "nobody.sock")
    tokens = alone.tokens()
    assert alone.tokens() == tokens
    assert not alone.retrieves
    return tokens


@pytest.fixture
def engine(server: ServerThread, make: Callable[..., Toy], cold: list[int]) -> Iterator[Toy]:
    """One that has served and stored the prompt, and has nothing of it any more."""
    engine = make()
    assert engine.tokens() == cold
    engine.forget()
    assert server.totals()["stored_chunks"] == CHUNKS
    yield engine
    server.stop()


@pytest.fixture
def failing(
    socket_path: Path, make: Callable[..., Toy], cold: list[int]
) -> Iterator[tuple[FaultServer, Callable[..., Toy]]]:
    """A server that can be stopped and killed, and engines like those of `engine`."""
    server = FaultServer(socket_path)

    def make_stored(**settings: Any) -> Toy:
        engine = make(**settings)
        assert engine.tokens() == cold
        engine.forget()
        return engine

    yield server, make_stored
    server.kill()
