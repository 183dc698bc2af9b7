"""Fixtures: a client whose server the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.played import World


@pytest.fixture
def world(socket_path: Path) -> Iterator[World]:
    world = World(socket_path)
    yield world
    world.close()
