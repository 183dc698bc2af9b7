"""Stores, leases, resets and the end under vLLM's real schedulers, one test per hazard."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lamina.engines.vllm.stats import take
from lamina.errors import SettingsError
from tests.vllm import scheduler_guards as guards
from tests.vllm.scheduler_guards import hazard
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import BLOCK, CHUNK


@hazard(guards.with_steps_in_flight, "stored", lambda mode: mode != "sync")
def test_nothing_of_a_step_that_failed_is_stored(rig: Rig) -> None:
    """The next step is scheduled before that is known."""
    asked = prompt(1, 130)
    rig.hold(asked, 2)
    rig.client.doomed["A"] = True
    rig.add("A", asked, release_after_slices=0)
    rig.run("A")
    assert rig.ended["A"] == "ERROR"
    rig.close()
    assert not rig.client.stores


@pytest.mark.parametrize("mode", MODES)
def test_a_sharer_in_the_same_pass_stores_nothing_that_is_not_computed_yet(mode: str) -> None:
    """B has blocks of A's as a local hit that A computes in this very step."""
    rig = Rig(mode)
    for name in ("A", "B"):
        rig.add(name, prompt(1, 100))
    rig.run("A", "B")
    assert rig.steps_of("B")[0] is rig.steps_of("A")[0]
    rig.close()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_sharer_of_a_failed_retrieve_stores_nothing_of_it(mode: str, after: int) -> None:
    """vLLM does not take B's bad blocks off its count of computed tokens: they are A's too."""
    rig = Rig(mode)
    asked = prompt(1, 100)
    rig.hold(asked, 2)
    rig.client.doomed["A"] = True
    rig.add("A", asked, release_after_slices=after)
    if after:
        rig.until(lambda: rig.client.retrieves)
        rig.client.retrieves[0].land(1)
        rig.until(lambda: "A" in rig.scheduler.finished_recving_kv_req_ids)
    rig.add("B", asked, retrieve=False)
    rig.run("A", "B")
    assert rig.ended == {"A": "ERROR", "B": "ERROR"}
    rig.close()
    assert not rig.client.stores


@pytest.mark.parametrize(
    ("settings", "stored"), [({}, 3), ({"store_decode": False}, 1)], ids=["all", "prompt"]
)
@pytest.mark.parametrize("mode", MODES)
def test_full_chunks_of_known_tokens(mode: str, settings: dict[str, Any], stored: int) -> None:
    """The last token is never computed: its chunk is not full."""
    rig = Rig(mode, settings=settings)
    rig.add("A", prompt(1, 40), max_tokens=4 * CHUNK - 40)
    rig.run("A")
    rig.close()
    assert len(rig.client.chunks) == stored


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_may_not_store(mode: str) -> None:
    """Its `kv_transfer_params` say so."""
    rig = Rig(mode)
    rig.add("A", prompt(1, 100), store=False)
    rig.run("A")
    rig.close()
    assert not rig.client.stores


@hazard(guards.with_steps_in_flight, "more is stored", step_tokens=CHUNK + BLOCK)
def test_abort_in_the_middle_of_a_prompt(rig: Rig) -> None:
    """What its first step completed is stored; nothing of the step under way."""
    rig.add("A", prompt(1, 200))
    rig.until(
        lambda: "A" in rig.ended,
        abort_if=lambda step: step.output.scheduled_cached_reqs.req_ids,
    )
    rig.close()
    assert len(rig.client.chunks) == 1, "more is stored"


@hazard(guards.without_holds, "stored", blocks=16, settings={"held_blocks_share": 1})
def test_end_while_stores_are_unsent_or_under_way(rig: Rig) -> None:
    """Another request that needs the blocks gets them when they are copied."""
    rig.add("A", prompt(1, 5 * CHUNK), max_tokens=2)
    rig.run("A")
    rig.add("B", prompt(2, 200))
    for _ in range(10):
        rig.step()
    assert not rig.steps_of("B")
    rig.client.is_swift = True
    rig.run("B")
    rig.close()


@hazard(guards.without_holds, "stored", blocks=16)
def test_preemption_while_stores_are_under_way(rig: Rig) -> None:
    """An older request takes a younger one's blocks."""
    rig.add("Y", prompt(2, 90), max_tokens=140, store=False)
    rig.add("A", prompt(1, 100), max_tokens=60)
    rig.until(lambda: rig.requests["A"].num_preemptions)
    assert any(not store.is_over for store in rig.client.stores)
    for _ in range(120):
        rig.step()
    rig.client.is_swift = True
    rig.run("A", "Y")
    rig.close()
    assert len(rig.client.chunks) == 159 // CHUNK


@hazard(guards.without_end_lease, "a lease is kept")
def test_a_hit_that_vllm_has_itself(rig: Rig) -> None:
    """The lease goes back when the request starts, not when it ends."""
    rig.hold(prompt(1, 100), 2)
    rig.add("A", prompt(1, 100), retrieve=False)
    rig.run("A")
    rig.add("B", prompt(1, 100))
    assert rig.client.leases
    rig.until(lambda: rig.steps_of("B"))
    assert not rig.client.leases, "a lease is kept"
    assert not rig.client.retrieves
    rig.close()


@hazard(guards.without_pending_work, "it sleeps")
def test_an_idle_engine_steps_on_while_blocks_are_held(rig: Rig) -> None:
    """Without steps nobody would see that stores are over."""
    rig.add("A", prompt(1, 100))
    rig.run("A")
    for _ in range(3):
        rig.step()
    assert rig.free < rig.blocks - 1
    assert rig.scheduler.has_requests(), "it sleeps"
    rig.close()


@hazard(guards.with_any_number_held, "is held", settings={"held_blocks_share": 0.25})
def test_blocks_held_for_requests_that_are_over_are_bounded(rig: Rig) -> None:
    """Each ends with 8 chunks unsent; the second's are dropped, and counted."""
    for seed in (1, 2):
        rig.add(f"A{seed}", prompt(seed, 8 * CHUNK), max_tokens=1)
        rig.run(f"A{seed}")
    assert rig.blocks - 1 - rig.free <= rig.blocks * 0.25, "too much is held"
    assert rig.counts["dropped_chunks"] == 8
    rig.close()
    assert len(rig.client.chunks) == 8
    rig.add("A3", prompt(3, 8 * CHUNK), max_tokens=1)
    rig.run("A3")
    rig.close()
    assert len(rig.client.chunks) == 16


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_copies_nothing_does_not_take_the_engines_memory(mode: str) -> None:
    """What was sent while its request ran is held after its end too."""
    rig = Rig(mode)
    for seed in range(1, 7):
        rig.add(f"A{seed}", prompt(seed, 8 * CHUNK), max_tokens=20)
        rig.run(f"A{seed}")
        rig.catch_up()
        assert rig.blocks - 1 - rig.free <= rig.blocks * 0.25, "too much is held"
    rig.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_name_that_is_used_again(mode: str) -> None:
    """The stores of its first life do not count for ever."""
    rig = Rig(mode)
    for seed in range(1, 7):
        rig.add("A", prompt(seed, 4 * CHUNK), max_tokens=1)
        rig.run("A")
        del rig.ended["A"]
        rig.add("A", prompt(10 + seed, 20), max_tokens=8)
        rig.client.is_swift = True
        rig.run("A")
        rig.client.is_swift = False
        del rig.ended["A"]
    rig.ended["A"] = "LENGTH"
    rig.close()
    assert rig.counts["dropped_chunks"] == 0


@hazard(guards.without_epochs, "of before")
def test_reset_begins_a_new_epoch(rig: Rig) -> None:
    """Nobody finds what was stored before, and who ran across it stores no more."""
    rig.client.is_swift = True
    rig.add("P", prompt(1, 100))
    rig.run("P")
    rig.add("R", prompt(2, 40), max_tokens=60)
    rig.until(lambda: rig.tokens["R"])
    before = set(rig.client.chunks)
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.run("R")
    rig.until(lambda: not rig.scheduler.has_requests())
    assert set(rig.client.chunks) == before, "a request of before stores on"
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.add("Q", prompt(1, 100))
    rig.run("Q")
    assert not rig.client.retrieves, "Q found what is of before"
    rig.close()
    assert len(rig.client.chunks) == len(before) + 100 // CHUNK


@hazard(guards.without_epochs, "of before")
def test_reset_of_running_requests(rig: Rig) -> None:
    """They compute all again, and retrieve nothing of before."""
    rig.client.is_swift = True
    rig.hold(prompt(1, 100), 2)
    rig.add("A", prompt(1, 100), max_tokens=20)
    rig.until(lambda: rig.tokens["A"])
    rig.until(lambda: not rig.side.has_pending_work)
    rig.catch_up()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    retrieves = len(rig.client.retrieves)
    rig.run("A")
    assert len(rig.client.retrieves) == retrieves, "it retrieves what is of before"
    rig.close()


def test_recompute_policy_is_refused() -> None:
    """After a failed retrieve vLLM computes at once in the very blocks that may still be
    written."""
    with pytest.raises(SettingsError):
        Rig("sync", policy="recompute")


@pytest.mark.parametrize("mode", MODES)
def test_a_retrieve_that_fails_after_its_release_is_counted_once(mode: str) -> None:
    """Both sides' counts are summed under one name."""
    rig = Rig(mode)
    asked = prompt(1, 130)
    rig.hold(asked, 2)
    rig.client.doomed["A"] = True
    rig.add("A", asked, release_after_slices=0, layerwise_overlap=1)
    rig.run("A")
    counts = Counter(rig.counts)
    for left in (take(rig.side.counts), rig.worker.get_kv_connector_stats()):
        counts.update(left.data if left is not None else {})
    assert (counts["failed"], counts["recomputed"]) == (1, 0)
    rig.close()
