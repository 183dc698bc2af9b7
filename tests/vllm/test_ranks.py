"""Several ranks, as far as they go today: a load that failed on one of them failed.

Tensor parallelism is refused; this holds what lifting the refusal alone would break. vLLM's real
scheduler and real `KVOutputAggregator`; the second rank is a copy of the first's report.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from lamina.engines.vllm.messages import TransferState
from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER, MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK

ASKED = prompt(1, 130)


class TwoRanks(Rig):
    """The second rank's load fails before its request runs."""

    def __init__(self, mode: str) -> None:
        self._aggregator = KVOutputAggregator(2)
        super().__init__(mode)
        self.side._ranks = 2

    def _run(self, output: Any) -> tuple[Any, set[int]]:
        first, written = super()._run(output)
        if first.kv_connector_output is None:
            first.kv_connector_output = KVConnectorOutput()
        second = copy.copy(first)
        second.kv_connector_output = kv = copy.copy(first.kv_connector_output)
        if kv.kv_connector_worker_meta is not None:
            report = kv.kv_connector_worker_meta = copy.deepcopy(kv.kv_connector_worker_meta)
            if kv.finished_recving:
                report.states.pop((1, TransferState.FAILED), None)
                report.states[1, TransferState.RECOMPUTED] = 1
        return self._aggregator.aggregate([first, second]), written


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="needs other blocks to compute in")
def test_a_retrieve_that_failed_on_one_rank_is_computed_on_all(mode: str) -> None:
    rig = TwoRanks(mode)
    rig.hold(ASKED, 2)
    rig.add("A", ASKED, release_after_slices=1, layerwise_overlap=3)
    rig.until(lambda: rig.client.retrieves)
    rig.client.retrieves[0].land()
    rig.until(lambda: rig.steps_of("A"))
    first = rig.steps_of("A")[0].requests["A"]
    assert first == len(ASKED), f"{len(ASKED) - first} tokens count that one rank never got"
    assert rig.side.counts.recomputed + rig.counts["recomputed"] == 1
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    assert not rig.side.retrieves.open
    assert len(rig.client.retrieves[0].blocks) * 16 == 2 * CHUNK
    rig.close()
