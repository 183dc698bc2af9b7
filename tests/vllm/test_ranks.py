"""Two ranks whose transfers do not go alike: vLLM's real schedulers and `KVOutputAggregator`.

What a rank's retrieve does is one of a few ends; every pair of them is played in every mode. In
each a request gets right tokens or an error, never a token that any rank computed on missing KV
(`Rig` sees to that), and in the end nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER, MODES, Rig, prompt
from tests.vllm.scripted_client import ScriptedClient, ScriptedRetrieve

pytestmark = pytest.mark.skipif(
    not HANDS_OVER_MANAGER, reason="several ranks are refused: no other blocks to compute in"
)
ASKED = prompt(1, 130)

End = Callable[[ScriptedRetrieve], None]


def _late_failure(retrieve: ScriptedRetrieve) -> None:
    retrieve.land(1)
    retrieve._client.doomed["A"] = True  # when a forward waits for its next slice


def _unacknowledged(retrieve: ScriptedRetrieve) -> None:
    retrieve._client.acknowledges = False
    retrieve.fail(is_over=False)


ENDS: dict[str, End] = {
    "lands": lambda retrieve: retrieve.land(),
    "begins to land": lambda retrieve: retrieve.land(1),
    "fails before": lambda retrieve: retrieve.fail(),
    "fails, pages not free": _unacknowledged,
    "fails after": _late_failure,
    "is slow": lambda retrieve: None,
}
FAILS_BEFORE = {"fails before", "fails, pages not free"}
WAYS: dict[str, dict[str, Any]] = {
    "1-layer": {"layerwise_overlap": 1, "release_after_slices": 1},
    "2-layers": {"layerwise_overlap": 2, "release_after_slices": 1},
    "whole": {"layerwise_overlap": 0},
}


class Apart(Rig):
    """Two ranks, of which neither does as the other; or two pipeline stages."""

    def __init__(self, mode: str, stages: Sequence[range] = ()) -> None:
        super().__init__(mode, ranks=2, stages=stages)
        self.client.leads = False

    def begin(self, **options: Any) -> list[ScriptedRetrieve]:
        """Request A retrieves on both ranks."""
        self.hold(ASKED)
        self.add("A", ASKED, **options)
        self.until(lambda: all(client.retrieves for client in self.clients))
        return [client.retrieves[0] for client in self.clients]

    def finish(self, retrieves: list[ScriptedRetrieve]) -> None:
        """What is slow gets there, what is not acknowledged is, and nothing is left over."""
        for retrieve in retrieves:
            retrieve.land()
        self.run("A")
        for client in self.clients:
            for retrieve in client.open_retrieves:
                retrieve.end()
            client.acknowledges = True
            client.is_swift = True
        self.add("B", ASKED, retrieve=False, store=False)
        self.run("B")
        self.close()


ALIKE: tuple[range, ...] = ()
UNLIKE_STAGES = (range(2), range(2, 3))
"""Of which the second is done with a retrieve after one layer."""


@pytest.mark.parametrize("stages", [ALIKE, UNLIKE_STAGES], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_every_pair_of_ends(
    first: str, second: str, mode: str, way: str, stages: tuple[range, ...]
) -> None:
    rig = Apart(mode, stages)
    retrieves = rig.begin(**WAYS[way])
    for retrieve, end in zip(retrieves, (first, second), strict=True):
        ENDS[end](retrieve)
    for _ in range(4):
        rig.step()
    rig.finish(retrieves)
    if FAILS_BEFORE & {first, second}:
        assert rig.ended["A"] == "LENGTH"
        assert rig.steps_of("A")[0].requests["A"] == len(ASKED), "tokens count that a rank lacks"


STEPS: dict[str, Callable[[ScriptedClient], None]] = {
    "lands": lambda client: None,
    "fails": lambda client: client.doomed.update(A=True),
    "fails, pages not free": lambda client: client.doomed.update(A=False),
    "cannot begin": lambda client: setattr(client, "takes_retrieves", False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", STEPS)
@pytest.mark.parametrize("first", STEPS)
def test_every_pair_of_ends_of_a_synchronous_retrieve(first: str, second: str, mode: str) -> None:
    """Its request runs in the very step: what fails on any rank is an error."""
    rig = Apart(mode)
    rig.hold(ASKED)
    for client, ends in zip(rig.clients, (first, second), strict=True):
        STEPS[ends](client)
    rig.add("A", ASKED, layerwise_overlap=1, release_after_slices=0)
    rig.run("A")
    assert rig.ended["A"] == ("LENGTH" if first == second == "lands" else "ERROR")
    assert bool(rig.tokens["A"]) is (rig.ended["A"] == "LENGTH")
    rig.finish([])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", [0, 1])
def test_what_failed_on_one_rank_is_given_up_on_the_other(mode: str, failing: int) -> None:
    """It need not wait for the rest of a transfer that nobody reads."""
    rig = Apart(mode)
    retrieves = rig.begin(**WAYS["1-layer"])
    retrieves[failing].fail()
    rig.until(lambda: retrieves[1 - failing].outcome)
    assert rig.steps[-1].told.cancelled or any(step.told.cancelled for step in rig.steps)
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    rig.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_that_cannot_begin(mode: str, without: int) -> None:
    """It has no server, or no slot; the other has."""
    rig = Apart(mode)
    rig.clients[without].takes_retrieves = False
    rig.hold(ASKED)
    rig.add("A", ASKED, **WAYS["1-layer"])
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    assert rig.steps_of("A")[0].requests["A"] == len(ASKED)
    rig.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_abort_while_the_ranks_are_at_different_slices(mode: str, rank: int) -> None:
    rig = Apart(mode)
    retrieves = rig.begin(**WAYS["1-layer"])
    retrieves[rank].land(2)
    rig.step()
    rig.abort("A")
    for client in rig.clients:
        client.end_request("A")
    rig.add("B", prompt(2, 60))
    rig.run("B")
    rig.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_stay_held_until_both_ranks_have_stored(mode: str, rank: int) -> None:
    rig = Apart(mode)
    rig.add("A", ASKED)
    rig.run("A")
    rig.until(lambda: all(client.stores for client in rig.clients))
    for store in rig.clients[rank].stores:
        store.end()
    held = rig.free
    for _ in range(3):
        rig.step()
    assert rig.free == held < rig.blocks - 1
    rig.clients[1 - rank].is_swift = True
    rig.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_makes_the_ranks_give_up_their_stores(mode: str) -> None:
    """A server that answers neither must not keep blocks for longer than a step."""
    rig = Apart(mode)
    rig.add("A", ASKED)
    rig.run("A")
    rig.until(lambda: all(client.stores for client in rig.clients))
    assert not rig.scheduler.reset_prefix_cache()
    rig.until(lambda: rig.side.stores.is_idle)
    assert all(store.is_over for client in rig.clients for store in client.stores)
    assert rig.scheduler.reset_prefix_cache()
    rig.close()


def test_all_ranks_give_a_retrieve_up_at_one_time() -> None:
    rig = Apart("async")
    rig.begin(**WAYS["1-layer"])
    (first,), (second,) = (client.deadlines_s for client in rig.clients)
    assert first is not None
    assert first == second
    rig.client.leads = True
    rig.client.is_swift = True
    rig.run("A")
    rig.close()
