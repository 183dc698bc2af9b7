"""Whatever happens in whatever order: no hang, no wrong byte, nothing late."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rings.random_order import ACTIONS, RandomOrder
from tests.rings.ring_worker import RingWorker

SEEDS = int(os.environ.get("LAMINA_RING_SEEDS", "12"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_streams_run_one_command_at_a_time(
    socket_path: Path, make_ring_worker: Callable[..., RingWorker], seed: int
) -> None:
    order = RandomOrder(socket_path, seed, make_ring_worker)
    try:
        for _ in range(ACTIONS):
            order.act()
        order.finish()
        order.check(make_ring_worker)
    finally:
        order.server.kill()
