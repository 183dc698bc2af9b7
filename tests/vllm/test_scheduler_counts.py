"""What the worker's side counts of retrieves, as vLLM's metrics show it."""

from __future__ import annotations

import pytest

from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import BLOCK, CHUNK, LAYERS

ASKED = prompt(1, 100)
TOKEN_BYTES = LAYERS * 2 * 64 * 4
"""Of the tensors that the rig registers: K and V of 64 numbers of 4 bytes in every layer."""


def counted(rig: Rig) -> float:
    """Bytes since this was asked last."""
    stats = rig.worker.get_kv_connector_stats()
    return stats.data.get("retrieved_bytes", 0) if stats is not None else 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_bytes_of_retrieves_that_have_landed_are_counted_once(mode: str, chunks: int) -> None:
    rig = Rig(mode)
    rig.client.is_swift = True
    rig.hold(ASKED, chunks)
    rig.add("A", ASKED)
    rig.run("A")
    rig.catch_up()
    assert chunks * CHUNK % BLOCK == 0
    assert counted(rig) == chunks * CHUNK * TOKEN_BYTES
    rig.close()
    assert counted(rig) == 0


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_a_retrieve_that_failed_are_not_counted(mode: str) -> None:
    rig = Rig(mode)
    rig.hold(ASKED, 2)
    rig.add("A", ASKED)
    rig.until(lambda: rig.client.retrieves)
    rig.client.retrieves[0].fail()
    rig.run("A")
    rig.close()
    assert counted(rig) == 0
