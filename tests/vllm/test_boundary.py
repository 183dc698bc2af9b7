"""A fault of our own costs an engine its cache, and no request its answer or a wrong one."""

from __future__ import annotations

import logging

import pytest

from lamina.engines.vllm.scheduler import SchedulerSide
from tests.vllm.scheduler_harness import MODES, Rig, prompt

LOOKUPS = ["new_request", "matched_tokens"]
IDLE_CALLS = [*LOOKUPS, "build_step", "allocated"]


def break_call(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """From now on the side's method raises; what is returned grows with every call."""
    calls = []

    def broken(*_: object, **__: object) -> None:
        calls.append(name)
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(SchedulerSide, name, broken)
    return calls


@pytest.mark.parametrize("name", IDLE_CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_holds_nothing_goes_on_without_the_cache(
    mode: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(mode)
    asked = prompt(1, 130)
    if name in LOOKUPS:
        rig.hold(asked, 2)
    calls = break_call(monkeypatch, name)
    with caplog.at_level(logging.ERROR):
        for request in ("A", "B"):
            rig.add(request, asked)
            rig.run(request)
    assert rig.ended == {"A": "LENGTH", "B": "LENGTH"}
    assert len(calls) == 1, "it was called again"
    assert not rig.client.retrieves
    said = [record for record in caplog.records if "goes on without its cache" in record.message]
    assert len(said) == 1
    assert said[0].exc_info
    assert rig.counts["faults"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_lookup_that_fails_beside_a_retrieve_leaves_the_retrieve_gated(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B reads A's blocks before they have landed; it was known when its lookup failed."""
    rig = Rig(mode)
    asked = prompt(1, 130)
    rig.hold(asked, 2)
    rig.add("A", asked, release_after_slices=1)
    rig.until(lambda: rig.client.retrieves)
    rig.add("B", asked)
    break_call(monkeypatch, "matched_tokens")
    rig.client.is_swift = True
    rig.run("A", "B")
    assert rig.ended == {"A": "LENGTH", "B": "LENGTH"}
    rig.close()


@pytest.mark.parametrize("name", ["build_step", "step_done", "allocated"])
@pytest.mark.parametrize("mode", MODES)
def test_with_blocks_held_the_engine_ends_rather_than_guess(
    mode: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(mode)
    asked = prompt(1, 130)
    rig.hold(asked, 2)
    rig.add("A", asked, release_after_slices=1)
    if name != "allocated":  # which is where a retrieve begins
        rig.until(lambda: rig.client.retrieves)
    break_call(monkeypatch, name)
    rig.client.is_swift = True
    with pytest.raises(ZeroDivisionError):
        rig.run("A")


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_cannot_be_tracked_beside_a_retrieve_ends_the_engine(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would gate what it reads."""
    rig = Rig(mode)
    asked = prompt(1, 130)
    rig.hold(asked, 2)
    rig.add("A", asked, release_after_slices=1)
    rig.until(lambda: rig.client.retrieves)
    break_call(monkeypatch, "_track")

    def serve() -> None:
        rig.add("B", asked)
        rig.run("B")

    with pytest.raises(ZeroDivisionError):
        serve()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_whose_end_fails_still_ends(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(mode)
    calls = break_call(monkeypatch, "finished")
    rig.add("A", prompt(1, 130))
    rig.run("A")
    assert rig.ended == {"A": "LENGTH"}
    assert calls
