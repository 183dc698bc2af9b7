"""Requests that wait in vLLM's queue while the server that was asked for them goes away."""

from __future__ import annotations

import pytest

from lamina.engines.vllm.messages import Account, StepReport
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK

ASKED = prompt(1, 3 * CHUNK + 4)
in_every_mode = pytest.mark.parametrize("mode", MODES)


def waiting(mode: str) -> Rig:
    """A's hit is known and would retrieve synchronously, but X has the memory."""
    rig = Rig(mode, blocks=12)
    rig.add("X", prompt(2, 90), max_tokens=60, store=False)
    rig.until(lambda: rig.tokens["X"])
    rig.hold(ASKED, 2)
    rig.add("A", ASKED, release_after_slices=0)
    rig.step()
    assert not rig.steps_of("A")
    return rig


def check_computes(rig: Rig) -> None:
    rig.run("A", "X")
    assert rig.ended == {"A": "LENGTH", "X": "LENGTH"}
    assert rig.steps_of("A")[0].requests["A"] == len(ASKED)
    assert not rig.client.retrieves


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "silent"])
@in_every_mode
def test_a_hit_of_a_server_that_is_not_usable_is_computed(mode: str, dies: bool) -> None:
    rig = waiting(mode)
    if dies:
        rig.client.lose_server()
    rig.client.is_usable = False
    check_computes(rig)
    rig.close()


@in_every_mode
def test_a_hit_of_a_server_that_was_replaced_is_asked_for_again(mode: str) -> None:
    """The other server has none of it: what it would have spared is computed, and stored."""
    rig = waiting(mode)
    rig.client.lose_server()
    rig.client.is_usable = True
    check_computes(rig)
    assert not rig.client.stores[0].parent, "not from the first chunk on"
    rig.close()


@in_every_mode
def test_a_miss_without_a_server_is_asked_for_again_once_there_is_one(mode: str) -> None:
    rig = Rig(mode, blocks=12)
    rig.add("X", prompt(2, 90), max_tokens=60, store=False)
    rig.until(lambda: rig.tokens["X"])
    rig.client.is_usable = False
    rig.add("A", ASKED)
    rig.step()
    rig.client.is_usable = rig.client.is_swift = True
    rig.hold(ASKED, 2)
    rig.run("A", "X")
    assert [retrieve.request for retrieve in rig.client.retrieves] == ["A"]
    rig.close()


@in_every_mode
def test_what_a_later_lookup_does_not_find_is_stored(mode: str) -> None:
    """The server evicted it while the request waited for room, longer than its lease lasts."""
    rig = waiting(mode)
    rig.client.leases.clear()
    rig.client.chunks.clear()
    rig.client.lease_ttl_s = 1e-9
    check_computes(rig)
    assert not rig.client.stores[0].parent, "not from the first chunk on"
    rig.close()


@in_every_mode
def test_what_a_request_has_stored_itself_is_not_stored_again(mode: str) -> None:
    """Y takes A's blocks; what A had stored was evicted when A asks anew."""
    rig = Rig(mode, blocks=16, settings={"held_blocks_share": 1})
    rig.client.is_swift = True
    rig.add("Y", prompt(2, 90), max_tokens=140, store=False)
    rig.add("A", prompt(1, 3 * CHUNK + 4), max_tokens=60)
    rig.until(lambda: rig.requests["A"].num_preemptions)
    assert rig.client.stores
    rig.client.chunks.clear()
    rig.run("A", "Y")
    keys = [key for store in rig.client.stores for key in store.keys]
    assert len(keys) == len(set(keys))
    rig.close()


@in_every_mode
def test_what_the_server_tells_of_retrieves_is_not_kept(mode: str) -> None:
    rig = Rig(mode)
    for number in range(1, 4):
        report = StepReport(number, accounts=[Account(number, 1, 0.0, 1.0)])
        rig.side.step_done((), report)
        assert len(report.accounts) == 1, "vLLM's own report was changed"
    assert not rig.side._reports.accounts
    rig.close()
