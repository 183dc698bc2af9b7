"""The engine on the page serves the same tokens however it gets its KV."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lamina.client import TransferStatus
from tests.engines_page.toy import CHUNKS, PROMPT, Toy
from tests.support.server import ServerThread
from tests.support.wait import eventually


def test_a_prompt_that_it_has_forgotten_is_a_hit_layer_by_layer(
    server: ServerThread, engine: Toy, toy: ModuleType, cold: list[int]
) -> None:
    assert engine.tokens() == cold
    (retrieve,) = engine.retrieves
    assert retrieve is not None
    assert retrieve.outcome is TransferStatus.OK
    assert len(retrieve.slices) == toy.LAYERS > 1
    engine.settle()
    totals = server.totals()
    assert (totals["hit_chunks"], totals["retrieves"]) == (CHUNKS, 1)
    assert totals["retrieved_bytes"] == totals["stored_bytes"] > 0
    gauges = server.gauges()
    assert gauges["leases"] == gauges["pins"] == 0


@pytest.mark.parametrize("settings", [{}, {"release_after_slices": 0}, {"layerwise_overlap": 4}])
def test_the_tokens_are_the_same_however_a_hit_is_retrieved(
    server: ServerThread, engine: Toy, make: Callable[..., Toy], settings: Any, cold: list[int]
) -> None:
    """By an engine that has never seen it; by `auto` first, which has no settings."""
    another = make(**{"layerwise_overlap": "auto", **settings})
    another.forget()
    assert another.tokens() == cold
    assert another.outcomes == [TransferStatus.OK]


def test_it_computes_what_a_hit_lacks_and_stores_it(
    server: ServerThread, engine: Toy, make: Callable[..., Toy], tmp_path: Path
) -> None:
    longer = [*PROMPT, *range(200)]
    tokens = engine.tokens(longer)
    assert engine.outcomes == [TransferStatus.OK]
    assert tokens == make(tmp_path / "nobody.sock").tokens(longer)
    engine.settle()
    assert server.totals()["stored_chunks"] == len(longer) // 64
    engine.forget()
    assert engine.tokens(longer) == tokens
    assert server.totals()["hit_chunks"] == CHUNKS + len(longer) // 64


def test_a_layer_stands_still_until_its_slice_is_there(
    server: ServerThread, engine: Toy, toy: ModuleType, cold: list[int]
) -> None:
    """It is released by the first slice, computes that layer, and waits before the next ones."""
    retrieves = server.device.retrieves
    retrieves.close()
    turns, forwards = engine.count("turn"), engine.count("forward")
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(engine.tokens)
        try:
            retrieves.wait_until_held()
            before = len(turns)
            eventually(lambda: len(turns) > before + 3)
            assert not forwards
            for landed in range(1, toy.LAYERS):
                retrieves.let_pass(1)
                eventually(partial(engine.stands_at.__contains__, landed + 1))
                assert engine.retrieves[0] is not None
                assert engine.retrieves[0].landed_slices == landed
                assert not serving.done()
        finally:
            retrieves.open()
        assert serving.result(20) == cold


def test_a_flipped_byte_of_any_page_changes_the_tokens(
    server: ServerThread, engine: Toy, toy: ModuleType, cold: list[int]
) -> None:
    """So the tests here notice a page that is wrong, missing or read too early."""
    prefix = engine.engine.prefixes.begin("r", engine.engine.namespace, None)
    keys = prefix.sent(PROMPT, range(CHUNKS)).keys
    rng = np.random.default_rng(0)
    pages = toy.LAYERS * toy.PER_CHUNK
    for key in keys:
        chunk = server.on_loop(partial(server.server.index.get, key))
        assert chunk is not None
        page_bytes = chunk.layout.chunk_bytes // pages
        for page in range(pages):
            at = chunk.address + page * page_bytes + int(rng.integers(page_bytes))
            byte, bit = ctypes.c_uint8.from_address(at), 1 << int(rng.integers(8))
            byte.value ^= bit
            assert engine.tokens() != cold, f"page {page}"
            byte.value ^= bit
    engine.forget()
    assert engine.tokens() == cold
    assert set(engine.outcomes) == {TransferStatus.OK}
    assert len(engine.retrieves) == CHUNKS * pages + 1
