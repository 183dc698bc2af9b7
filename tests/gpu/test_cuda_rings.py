"""Rings in GPU memory: every width of the kernels, every way to cut a transfer, byte for byte."""

from __future__ import annotations

import random

import pytest

from lamina import records
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.known.content import equal_layers
from lamina_lab.known.memory import CudaKvSpace
from lamina_lab.known.worker import KnownWorker

BLOCKS = 1024


@pytest.mark.parametrize(
    ("page_bytes", "planes"),
    [(64 << 10, 1), (8 << 10, 2), (4 << 10, 1), (1000, 2), (1004, 1), (1002, 3), (1001, 1)],
)
def test_what_was_stored_comes_back_byte_for_byte(
    page_bytes: int, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered blocks, other lengths and widths, records of the ring used many times over."""
    geometry = equal_layers(12, page_bytes, planes, chunk_tokens=256)
    chunk_layer_bytes = 16 * page_bytes * planes
    monkeypatch.setattr(records, "RETRIEVE_RING_BYTES", 12 * chunk_layer_bytes)
    monkeypatch.setattr(records, "STORE_RING_BYTES", 9 * chunk_layer_bytes)
    rng = random.Random(page_bytes)
    with private_socket() as socket, server_process(socket, "--arena", "1GiB"):
        space = CudaKvSpace(geometry, BLOCKS)
        with_rings = KnownWorker(socket, space, "gpu test", data_path="ring")
        with_rings.client.connect()
        for number in range(12):
            chunks = rng.randint(1, 16)
            blocks = rng.sample(range(BLOCKS), 32 * chunks)
            source, target = blocks[: 16 * chunks], blocks[16 * chunks :]
            keys = [rng.randbytes(32) for _ in range(chunks)]
            with_rings.poison(range(BLOCKS))
            with_rings.populate(keys, source)
            with_rings.check_hit(f"r{number}", keys, target, rng.choice([1, 2, 5, 12]))
            with_rings.expect_chunks(keys, source)
        with_rings.close()
