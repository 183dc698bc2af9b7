"""Preempted requests whose token is still to come: vLLM 0.26 delivers it, later versions do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.client import Prefixes
from lamina.engines.vllm.messages import TransferState
from lamina.engines.vllm.retrieves import HeldRetrieve, Retrieves
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import HeldBlocks, Tracked


def tracked(name: str, **counts: int) -> Tracked:
    return Tracked(SimpleNamespace(request_id=name, **counts), prefix=None)  # type: ignore[arg-type]


def retrieves_of(*readers: Tracked) -> Retrieves:
    """One under way that these requests read."""
    prefixes = Prefixes(None, 32, 16, 512)  # type: ignore[arg-type]
    retrieves = Retrieves(prefixes, HeldBlocks(), SchedulerCounts(), {}, timeout_s=10.0)
    by_name = {reader.name: reader for reader in readers}
    state = TransferState.RELEASED
    retrieves.open[1] = HeldRetrieve(readers[0], 0, [5, 6], by_name, state)
    return retrieves


@pytest.mark.parametrize("under_way", [0, 1, 2])
def test_tokens_of_steps_that_read_a_retrieve_are_discarded(under_way: int) -> None:
    """As vLLM discards those of a request that it resets: the retrieve may yet fail."""
    counts = {"num_output_placeholders": under_way, "async_tokens_to_discard": 1}
    reader, other = tracked("A", **counts), tracked("B", **counts)
    retrieves_of(reader, other).note_preempted(["A", "unknown"])
    assert vars(reader.request) == {
        "request_id": "A",
        "num_output_placeholders": 0,
        "async_tokens_to_discard": 1 + under_way,
    }
    assert vars(other.request) == {"request_id": "B", **counts}


def test_a_preempted_request_reads_nothing_any_more() -> None:
    """Also where vLLM has nothing to discard."""
    preempted: Any = tracked("A", num_output_placeholders=1)
    retrieves = retrieves_of(preempted, tracked("B"))
    retrieves.note_preempted(["A"])
    assert list(retrieves.open[1].readers) == ["B"]
    assert preempted.request.num_output_placeholders == 1
    assert not retrieves.gates(["A"])
    assert retrieves.gates(["B"]) == [1]
