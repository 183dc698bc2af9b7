"""Speculative decoding under vLLM's real schedulers: only what the model itself says is stored.

vLLM takes the drafts of its `ngram` from the host and schedules synchronously; asynchronously it
counts those of other drafters, which the connector refuses: what is stored is right there too.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import scheduler_guards as guards
from tests.vllm.scheduler_guards import hazard
from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER, MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK

DRAFTS = 3

pytestmark = pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")


def drafted(rig: Rig, accepted: int, rejected: int) -> None:
    """As many drafts at least were accepted and rejected: the test is worth something."""
    assert rig.drafter.seen["accepted"] >= accepted
    assert rig.drafter.seen["rejected"] >= rejected


@pytest.mark.parametrize("shift", range(DRAFTS + 2))
@pytest.mark.parametrize("right", ["none", "some", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_full_chunks_of_committed_tokens(mode: str, right: str, shift: int) -> None:
    """However drafts lie across the ends of chunks; a store is checked when it begins and when it
    ends, while steps go on."""
    rig = Rig(mode, drafts=DRAFTS)
    rights = {"none": lambda _, p: False, "some": lambda _, p: p % 4 > 1, "all": lambda _, p: True}
    rig.drafter.is_right = rights[right]
    rig.add("A", prompt(1, 40 + shift), max_tokens=4 * CHUNK)
    rig.run("A")
    tokens = 40 + shift + 4 * CHUNK
    rig.close()
    drafted(rig, 30 if right != "none" else 0, 30 if right != "all" else 0)
    assert len(rig.client.chunks) in {tokens // CHUNK, (tokens - 1) // CHUNK}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_drafts_is_measured_as_no_prompts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` reckons what a token of a prompt costs by the steps that have one."""
    rig = Rig(mode, drafts=DRAFTS)
    steps, measured = rig.side._prefixes.meters.steps, []
    begin = steps.begin

    def note(number: int, now_s: float, tokens: int, *more: Any) -> None:
        measured.append(tokens)
        begin(number, now_s, tokens, *more)

    monkeypatch.setattr(steps, "begin", note)
    rig.add("A", prompt(1, 40), max_tokens=30)
    rig.run("A")
    rig.close()
    assert measured[0] == 40
    assert set(measured[1:]) == {0}


@hazard(guards.with_last_tokens, "stored", drafts=DRAFTS)
def test_the_kv_of_a_rejected_draft_is_not_stored(rig: Rig) -> None:
    """It lies where the KV of the last token would, which is said instead and never computed."""
    rig.drafter.is_right = lambda name, position: False
    rig.add("A", prompt(1, CHUNK - 2), max_tokens=2)
    rig.run("A")
    drafted(rig, 0, DRAFTS)
    rig.close()
    assert not rig.client.stores


@hazard(guards.with_drafts, "stored", drafts=DRAFTS)
def test_drafts_at_a_chunks_end_are_not_stored_before_they_are_accepted(rig: Rig) -> None:
    """The request is aborted right before that is known."""
    rig.drafter.is_right = lambda name, position: position != CHUNK - 1
    rig.add("A", prompt(1, CHUNK - 3), max_tokens=20)
    rig.until(
        lambda: "A" in rig.ended, abort_if=lambda step: step.output.scheduled_spec_decode_tokens
    )
    drafted(rig, 1, 1)
    rig.close()
    assert not rig.client.stores


@hazard(guards.with_unknown_tokens, "nobody's KV|stored", drafts=DRAFTS)
def test_accepted_drafts_beyond_the_end_are_not_stored(rig: Rig) -> None:
    """The request has all its tokens in the middle of them: what follows is no token of its."""
    rig.drafter.is_right = lambda name, position: True
    rig.add("A", prompt(1, CHUNK - 3), max_tokens=2)
    rig.run("A")
    drafted(rig, 2, 0)
    rig.close()
    assert not rig.client.stores


@hazard(guards.without_holds, "stored", drafts=DRAFTS, blocks=16)
def test_preemption_while_stores_are_under_way(rig: Rig) -> None:
    """The older request drafts into the younger one's blocks."""
    rig.add("Y", prompt(2, 90), max_tokens=140, store=False)
    rig.add("A", prompt(1, 100), max_tokens=60)
    rig.until(lambda: rig.requests["A"].num_preemptions)
    assert any(not store.is_over for store in rig.client.stores)
    for _ in range(120):
        rig.step()
    rig.client.is_swift = True
    rig.run("A", "Y")
    rig.close()
    drafted(rig, 30, 30)


@hazard(guards.without_cap, "writes block", drafts=DRAFTS)
def test_a_full_hit_leaves_a_block_to_compute(rig: Rig) -> None:
    """With one token to compute vLLM would pad the step with drafts."""
    asked = prompt(1, 2 * CHUNK)
    rig.hold(asked, 2)
    rig.add("A", asked, max_tokens=8, release_after_slices=1)
    rig.until(lambda: rig.client.retrieves)
    rig.client.retrieves[0].land(1)
    rig.run("A")
    rig.close()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_padding_is_not_computed_where_a_retrieve_writes(mode: str, after: int) -> None:
    """One token is left: vLLM pads the first step with drafts, in the blocks after the hit's."""
    rig = Rig(mode, drafts=DRAFTS)
    asked = prompt(1, 2 * CHUNK + 1)
    rig.hold(asked, 2)
    rig.add("A", asked, max_tokens=8, release_after_slices=after)
    rig.until(lambda: rig.client.retrieves)
    rig.client.retrieves[0].land(1)
    rig.run("A")
    first = rig.steps_of("A")[0]
    assert first.requests["A"] == 1 + DRAFTS
    assert first.written.isdisjoint(rig.client.retrieves[0].blocks)
    rig.close()
