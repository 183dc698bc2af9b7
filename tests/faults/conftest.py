"""Fixtures: a scene that must end clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import Scene


@pytest.fixture
def scene(socket_path: Path) -> Iterator[Scene]:
    """At its end nothing is held, nothing has leaked and no process is left."""
    scene = Scene(socket_path)
    try:
        yield scene
        scene.end()
    finally:
        scene.abandon()
