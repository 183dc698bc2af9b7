"""Two rank processes on one GPU, as `tests/faults/test_rank_processes.py` has them on a host.

Pages of 8 KiB are those of a rank of eight of a model with eight KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.settings import DataPath
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.known.content import equal_layers
from tests.support.rank_scenes import check_killed, check_together, ranks_of

GEOMETRY = equal_layers(32, 8 << 10, chunk_tokens=256)


@pytest.fixture
def socket() -> Iterator[Path]:
    with private_socket() as socket, server_process(socket, "--arena", "2GiB"):
        yield socket


@pytest.mark.parametrize("path", ["direct", "ring"])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (1, 2)])
def test_ranks_store_and_retrieve_together(
    socket: Path, shards: int, replicas: int, path: DataPath
) -> None:
    ranks = ranks_of(socket, GEOMETRY, shards, replicas, on_gpu=True, path=path)
    check_together(ranks, GEOMETRY, seed=10 * shards + replicas)


@pytest.mark.parametrize("path", ["direct", "ring"])
def test_a_rank_that_is_killed(socket: Path, path: DataPath) -> None:
    ranks = ranks_of(socket, GEOMETRY, 2, 1, on_gpu=True, path=path)
    check_killed(ranks, GEOMETRY, socket)
