"""Retrieves under vLLM's real schedulers, one test per hazard; each fails without what guards
it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lamina.engines.vllm import worker
from lamina.keys import chunk_keys
from tests.vllm import scheduler_guards as guards
from tests.vllm.scheduler_config import NAMES
from tests.vllm.scheduler_guards import hazard
from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER, HAS_SYNC_FLAG, MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK, ScriptedRetrieve, Text

SMALL = 16
ASKED = prompt(1, 100)


def retrieving(rig: Rig, chunks: int = 2, **options: Any) -> ScriptedRetrieve:
    """Request A, of ASKED, has begun to retrieve."""
    rig.hold(ASKED, chunks)
    rig.add("A", ASKED, **options)
    rig.until(lambda: rig.client.retrieves)
    return rig.client.retrieves[0]


def released(rig: Rig) -> ScriptedRetrieve:
    """A's first slice is in, and vLLM knows: the next pass promotes A."""
    retrieve = retrieving(rig)
    retrieve.land(1)
    rig.until(lambda: "A" in rig.scheduler.finished_recving_kv_req_ids)
    return retrieve


def promoted(rig: Rig) -> ScriptedRetrieve:
    """A was released and promoted but not scheduled: its tail does not fit beside five others."""
    for index in range(5):
        rig.add(f"X{index}", prompt(50 + index, 15), max_tokens=16)
    retrieve = retrieving(rig)
    rig.until(lambda: rig.free < 3)
    retrieve.land(1)
    rig.until(lambda: rig.status("A") == "WAITING")
    assert not rig.steps_of("A")
    return retrieve


def crowd_out(rig: Rig) -> None:
    """A request that needs the blocks of A's retrieve does not get them before that is over."""
    rig.add("C", prompt(2, 180))
    for _ in range(40):
        rig.step()
    assert not rig.steps_of("C")
    rig.client.is_swift = True
    rig.run("C")
    rig.close()


@hazard(guards.without_gates, "wrong KV")
def test_a_sharer_in_the_promoting_pass_reads_blocks_that_drain(rig: Rig) -> None:
    """B finds A's blocks in the prefix cache in the very pass that promotes A."""
    retrieve = released(rig)
    rig.add("B", ASKED)
    rig.run("A", "B")
    first = rig.steps_of("B")[0]
    assert first is rig.steps_of("A")[0]
    assert first.told.gates
    assert rig.client.retrieves == [retrieve]
    rig.close()


@hazard(guards.without_sharers, "wrong KV", blocks=SMALL)
def test_a_sharer_in_a_later_pass_reads_blocks_of_an_aborted_owner(rig: Rig) -> None:
    """A was aborted before it ran; its blocks drain on, and can be found."""
    retrieve = promoted(rig)
    rig.abort("A")
    rig.add("B", ASKED, retrieve=False)
    rig.run("B")
    assert rig.steps_of("B")[0].requests["B"] == len(ASKED) - 2 * CHUNK
    assert retrieve.is_over
    rig.close()


@hazard(guards.without_end_request, "a lease is left over")
def test_abort_before_the_lookup_is_answered(rig: Rig) -> None:
    """The server has granted a lease that nobody will use."""
    rig.client.answers = False
    rig.hold(ASKED)
    rig.add("A", ASKED)
    for _ in range(5):
        rig.step()
    assert not rig.client.retrieves
    rig.abort("A")
    rig.client.answers = True
    rig.close()


@hazard(guards.without_holds, "still retrieved", blocks=SMALL)
def test_abort_of_a_waiting_request_whose_retrieve_is_not_over(rig: Rig) -> None:
    """The server has not acknowledged that it will write no more."""
    rig.client.acknowledges = False
    retrieving(rig)
    rig.abort("A")
    with mock.patch.object(worker, "ACKNOWLEDGE_S", 0.0):
        crowd_out(rig)


@hazard(guards.without_holds, "still retrieved", blocks=SMALL)
def test_abort_in_the_output_that_releases(rig: Rig) -> None:
    """vLLM frees the blocks at once: it believes that the retrieve is done."""
    rig.client.acknowledges = False
    retrieving(rig).land(1)
    rig.until(lambda: "A" in rig.ended, abort_if=lambda step: step.released)
    assert not rig.scheduler.requests
    crowd_out(rig)


@hazard(guards.without_holds, "still retrieved", blocks=SMALL)
def test_abort_of_a_promoted_request_that_has_not_run(rig: Rig) -> None:
    """vLLM frees the blocks at once, and they are in its prefix cache."""
    promoted(rig)
    rig.abort("A")
    crowd_out(rig)


@pytest.mark.parametrize("aborts", [False, True])
@hazard(guards.without_holds, "still retrieved", blocks=SMALL)
def test_end_of_a_running_request_whose_retrieve_is_not_over(rig: Rig, aborts: bool) -> None:
    """Its retrieve failed, which ends it, or it is aborted; the server may still write."""
    rig.client.doomed["A"] = False
    retrieving(rig).land(1)
    rig.until(
        lambda: "A" in rig.ended,
        abort_if=lambda step: ["A"] if aborts and "A" in step.requests else [],
    )
    assert rig.tokens["A"] == []
    crowd_out(rig)


@hazard(guards.with_blocks_of_before, "stored", lambda mode: mode != "async-v2", blocks=SMALL)
def test_preemption_after_a_retrieve(rig: Rig) -> None:
    """A gives its blocks to an older request, asks again, retrieves again, and stores on."""
    rig.add("Y", prompt(2, 90), max_tokens=140)
    retrieve = retrieving(rig, max_tokens=80)
    rig.client.is_swift = True
    rig.run("A", "Y")
    assert rig.requests["A"].num_preemptions
    retrieves = [other for other in rig.client.retrieves if other.request == "A"]
    assert retrieve in retrieves
    assert len(retrieves) > 1
    assert rig.releases("A") == len(retrieves)
    computed = rig.texts["A"].tokens(len(ASKED) + 79)
    assert rig.side._namespace is not None
    missing = set(chunk_keys(rig.side._namespace, CHUNK, computed)) - set(rig.client.chunks)
    assert not missing, "not all of it is stored"
    rig.close()


@pytest.mark.parametrize("mode", MODES)
def test_preemption_while_the_step_that_read_a_failed_retrieve_is_under_way(mode: str) -> None:
    """vLLM 0.26 preempts a request with a step under way, and gives its token out later."""
    rig = Rig(mode, blocks=9)
    rig.add("X", prompt(2, 14), max_tokens=10)
    rig.step()
    rig.client.doomed["A"] = True
    rig.hold(ASKED, 2)
    rig.add("A", ASKED, release_after_slices=0)
    rig.run("A", "X")
    rig.close()


@hazard(guards.without_cap, "writes block")
def test_a_full_hit_leaves_something_to_compute(rig: Rig) -> None:
    """vLLM computes a last token all the same: where a retrieve still writes."""
    for seed, length in enumerate((3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1), start=1):
        asked = prompt(seed, length)
        rig.hold(asked)
        rig.add(f"A{seed}", asked)
        rig.until(lambda: rig.client.open_retrieves)
        rig.client.retrieves[-1].land(1)
        rig.run(f"A{seed}")
    computed = [rig.steps_of(f"A{seed}")[0].requests[f"A{seed}"] for seed in (1, 2, 3)]
    assert computed == [CHUNK - 1, CHUNK // 2, 1]
    rig.close()


@hazard(guards.with_two_releases, "")
def test_a_request_is_released_once(rig: Rig) -> None:
    """A second `finished_recving` of a request ends the engine by an assertion of vLLM's."""
    retrieving(rig).land(1)
    rig.run("A")
    assert rig.releases("A") == 1
    rig.close()


@hazard(guards.without_gates, "wrong KV")
def test_a_synchronous_retrieve_is_waited_for_in_its_own_step(rig: Rig) -> None:
    """It is announced, begun, waited for and read in one step."""
    retrieving(rig, release_after_slices=0)
    rig.run("A")
    first = rig.steps_of("A")[0]
    assert first.requests == {"A": len(ASKED) - 2 * CHUNK}
    assert first.told.gates == [retrieve.number for retrieve in first.told.retrieves]
    assert getattr(first.output, "has_sync_kv_loads", True)
    assert rig.releases("A") == 0
    rig.close()


@hazard(guards.without_sync_flag, "wrong KV", lambda mode: HAS_SYNC_FLAG)
def test_full_graph_after_an_asynchronous_release(rig: Rig) -> None:
    """Without `has_sync_kv_loads` vLLM tells of the forward only when it is over."""
    released(rig)
    rig.full_graph = True
    rig.run("A")
    assert getattr(rig.steps_of("A")[0].output, "has_sync_kv_loads", True)
    assert not getattr(rig.steps_of("A")[-1].output, "has_sync_kv_loads", False)
    rig.close()


@pytest.mark.parametrize("local", [0, CHUNK])
@hazard(guards.without_recomputing, "wrong KV")
def test_retrieve_failed_before_release(rig: Rig, local: int) -> None:
    """The request computes all but what vLLM itself has, and nobody sees an error."""
    if local:
        rig.add("P", ASKED[: local + 1], max_tokens=1, retrieve=False, store=False)
        rig.run("P")
    retrieving(rig).fail()
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    assert rig.steps_of("A")[0].requests["A"] == len(ASKED) - local
    rig.close()


@hazard(guards.with_careless_recomputing, "")
def test_retrieve_failed_when_the_prefix_had_become_a_local_hit(rig: Rig) -> None:
    """vLLM would let A adopt blocks beside those that it has, and dies of it."""
    retrieve = retrieving(rig)
    rig.add("B", ASKED, retrieve=False)
    rig.run("B")
    retrieve.fail()
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    rig.close()


@hazard(guards.without_holds, "still retrieved", lambda mode: HANDS_OVER_MANAGER)
def test_retrieve_failed_before_release_and_is_not_over(rig: Rig) -> None:
    """The request computes in other blocks, or not before the server has acknowledged."""
    retrieve = retrieving(rig)
    retrieve.fail(is_over=False)
    for _ in range(5):
        rig.step()
    retrieve.end()
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    rig.close()


@pytest.mark.parametrize(("after", "end"), [(0, "ERROR"), (1, "LENGTH")])
@hazard(guards.without_failures, "wrong KV")
def test_retrieve_refused_when_the_hit_was_told(rig: Rig, after: int, end: str) -> None:
    """An asynchronous retrieve is computed instead; a synchronous one has no time for that."""
    rig.client.takes_retrieves = False
    rig.hold(ASKED, 2)
    rig.add("A", ASKED, release_after_slices=after)
    rig.run("A")
    assert rig.ended["A"] == end
    rig.close()


@hazard(guards.without_reports, "wrong KV")
def test_retrieve_failed_after_release(rig: Rig) -> None:
    """All who read its blocks end in an error, in that step; others do not."""
    rig.add("Z", prompt(3, 50))
    retrieve = released(rig)
    rig.client.doomed["A"] = True
    rig.add("B", ASKED + prompt(4, 30))
    rig.run("A", "B", "Z")
    assert rig.ended == {"A": "ERROR", "B": "ERROR", "Z": "LENGTH"}
    assert rig.tokens["A"] == rig.tokens["B"] == []
    told = rig.steps_of("A")[0].result.kv_connector_output
    assert set(retrieve.blocks) <= told.invalid_block_ids
    assert not rig.cached(retrieve.blocks)
    rig.close()


@hazard(guards.without_reports, "wrong KV")
def test_retrieve_failed_after_release_while_a_sharer_retrieves_more(rig: Rig) -> None:
    """C has A's blocks, waits for its own retrieve, and must not compute on A's."""
    longer = ASKED[: 2 * CHUNK] + prompt(4, 60)
    rig.hold(longer, 3)
    released(rig)
    rig.client.doomed["A"] = True
    rig.add("C", longer)
    rig.until(lambda: len(rig.client.retrieves) == 2)
    rig.client.retrieves[1].land(1)
    rig.run("A", "C")
    assert rig.ended == {"A": "ERROR", "C": "ERROR"}
    rig.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_sharers_computed_on_bad_blocks_is_not_found(mode: str) -> None:
    """vLLM takes out of its prefix cache what one of them computed, and leaves the others'."""
    rig = Rig(mode)
    longer = ASKED[: 2 * CHUNK] + prompt(4, 60)
    released(rig)
    rig.client.doomed["A"] = True
    rig.add("B", longer, retrieve=False)
    rig.run("A", "B")
    rig.add("C", ASKED[: 2 * CHUNK + 1], retrieve=False)
    rig.run("C")
    rig.add("D", longer, retrieve=False)
    rig.run("D")
    rig.close()


@hazard(guards.without_eviction, "", blocks=SMALL)
def test_bad_blocks_are_not_found_in_the_prefix_cache(rig: Rig) -> None:
    """They leave it before they are given back; here their owner has not run yet."""
    retrieve = promoted(rig)
    retrieve.fail()
    for _ in range(3):
        rig.step()
    rig.abort("A")
    rig.add("B", ASKED, retrieve=False)
    rig.run("B")
    assert rig.ended["B"] == "LENGTH", "B found bad blocks"
    rig.close()


@hazard(guards.without_second_report, "wrong KV", blocks=SMALL)
def test_retrieve_failed_when_its_request_was_promoted_but_had_not_run(rig: Rig) -> None:
    """vLLM overlooks the report: A is neither waiting for its retrieve nor running."""
    promoted(rig).fail()
    rig.run("A")
    assert rig.ended["A"] == ("LENGTH" if HANDS_OVER_MANAGER else "ERROR")
    rig.close()


@hazard(guards.with_readers_forgotten, "wrong KV", blocks=SMALL)
def test_bad_blocks_are_reported_until_their_readers_are_gone(rig: Rig) -> None:
    """As in vLLM 0.26, where no other blocks can be had: A waits long after its retrieve is
    over."""
    rig.side.retrieves.bind_manager(None)
    promoted(rig).fail()
    for _ in range(6):
        rig.step()
    assert not rig.steps_of("A"), "it did not wait"
    rig.run("A")
    assert rig.ended["A"] == "ERROR"
    rig.close()


@hazard(guards.with_hooks_skipped, "wrong KV", blocks=SMALL)
def test_a_forward_that_does_not_wait_for_a_layer(rig: Rig) -> None:
    """A hook that does not fire: what the forward read is not known, so its requests fail."""
    wait = rig.worker.wait_for_layer_load

    def skip(layer_name: str) -> None:
        if layer_name != NAMES[1]:
            wait(layer_name)

    rig.worker.wait_for_layer_load = skip  # type: ignore[method-assign]
    retrieve = released(rig)
    rig.run("A")
    assert retrieve.is_over
    assert rig.ended["A"] == "ERROR"
    rig.close()


@hazard(guards.with_first_offer, "", blocks=8)
def test_no_room_after_the_hit_was_told(rig: Rig) -> None:
    """vLLM asks again and again, each time with more tokens of its own: the last answer counts."""
    text = Text(rig.model, prompt(1, 40))
    rig.add("X", text.tokens(40), max_tokens=20)
    rig.until(lambda: rig.tokens["X"])
    asked = text.tokens(59) + prompt(2, 41)
    rig.hold(asked, 3)
    rig.add("A", asked)
    rig.until(lambda: rig.client.retrieves)
    (retrieve,) = (retrieve for step in rig.steps for retrieve in step.told.retrieves)
    assert retrieve.start_tokens == 48
    rig.client.is_swift = True
    rig.run("A", "X")
    rig.close()
