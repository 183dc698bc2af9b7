"""Every fault at every stage of a retrieve: bit-identical logits, and nothing is held afterwards.

Rows of the incident list that would show here: 1, 4, 5, 10, 14, 20, 25, 26, 38, 49, 53, 56, 62.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.faults.scene import HIT_TOKENS, Scene

LAYERS = 4


# Stages: each brings the request "hit" of the engine to a point and holds it there.


def looked_up(scene: Scene) -> None:
    scene.engine.call("add", "hit")
    scene.engine.call("answered", "hit")
    scene.wait_for_gauges(leases=1)


def ticket_awaited(scene: Scene) -> None:
    """The engine's earlier work on the pages is not done yet."""
    scene.engine.call("hold_tickets")
    scene.engine.call("add", "hit")
    scene.engine.call("step_until_retrieving", "hit")
    scene.wait_for_gauges(queued_transfers=1)


def before_the_first_slice(scene: Scene) -> None:
    _begin_held(scene, release_after=1)


def between_slices(scene: Scene) -> None:
    """Two slices are in, a third is wanted before the request may run."""
    _begin_held(scene, release_after=3)
    _pass(scene, 2)


def released_and_draining(scene: Scene) -> None:
    _begin_held(scene, release_after=1)
    _pass(scene, 1)
    scene.engine.call("step_until", "hit", "running")


def waiting_for_a_layer(scene: Scene) -> None:
    """The engine is in the middle of a step and waits for the second layer's slice."""
    released_and_draining(scene)
    scene.engine.begin("serve", "hit")
    assert scene.engine.is_waiting.wait(20)


def landed_but_not_answered(scene: Scene) -> None:
    scene.hold_replies("Retrieved")
    scene.engine.call("add", "hit", 1, LAYERS + 1)
    scene.engine.call("step_until_retrieving", "hit")
    scene.server.call("replies.wait_until_held", "Retrieved")


def _begin_held(scene: Scene, release_after: int) -> None:
    scene.server.call("retrieves.close")
    scene.engine.call("add", "hit", 1, release_after)
    scene.engine.call("step_until_retrieving", "hit")
    scene.server.call("retrieves.wait_until_held")


def _pass(scene: Scene, slices: int) -> None:
    scene.server.call("retrieves.let_pass", slices)
    scene.engine.call("wait_until_landed", "hit", slices)
    scene.server.call("retrieves.wait_until_held")


class Stage(NamedTuple):
    reach: Callable[[Scene], None]
    is_in_step: bool = False
    """Whether the engine is in a step already, serving the request."""
    is_at_valve: bool = False
    """Whether a copy is held that would write to the pages."""


STAGES = [
    Stage(looked_up),
    Stage(ticket_awaited),
    Stage(before_the_first_slice, is_at_valve=True),
    Stage(between_slices, is_at_valve=True),
    Stage(released_and_draining, is_at_valve=True),
    Stage(waiting_for_a_layer, is_in_step=True, is_at_valve=True),
    Stage(landed_but_not_answered),
]


@pytest.fixture(params=STAGES, ids=lambda stage: stage.reach.__name__)
def stage(scene: Scene, request: pytest.FixtureRequest) -> Stage:
    """The scene has come to a stage of a retrieve."""
    scene.engine.call("populate")
    stage: Stage = request.param
    stage.reach(scene)
    return stage


def begin_to_serve(scene: Scene, stage: Stage) -> None:
    if not stage.is_in_step:
        scene.engine.begin("serve", "hit")


def serve(scene: Scene, stage: Stage) -> int:
    """The request ends, and is bit for bit what it is without a cache."""
    begin_to_serve(scene, stage)
    retrieved: int = scene.engine.result()
    return retrieved


def test_the_server_is_killed(scene: Scene, stage: Stage) -> None:
    """Rows 1, 4, 5, 46, 49: the engine goes on without it and hits again when one is back."""
    scene.kill_server()
    serve(scene, stage)
    assert scene.engine.call("quarantined") == 0
    assert not scene.engine.call("is_usable")
    scene.engine.call("hit", "uncached")
    scene.start_server()
    scene.check_hits(scene.engine)


def test_the_server_is_replaced_faster_than_a_heartbeat(scene: Scene, stage: Stage) -> None:
    """Rows 8, 46: the successor knows nothing of sessions, leases and slots of the one before."""
    scene.engine.send(signal.SIGSTOP)
    scene.kill_server()
    scene.start_server()
    scene.engine.send(signal.SIGCONT)
    serve(scene, stage)
    scene.check_hits(scene.engine)


def test_the_server_stops_and_goes_on(scene: Scene, stage: Stage) -> None:
    """Row 49: what it had begun ends well, if late."""
    scene.server.send(signal.SIGSTOP)
    if stage.reach is ticket_awaited:
        scene.engine.call("release_tickets")
    begin_to_serve(scene, stage)
    scene.server.send(signal.SIGCONT)
    scene.open_all()
    assert scene.engine.result() == HIT_TOKENS
    scene.check_hits(scene.engine)


def test_the_server_stops_past_the_deadline_and_is_killed(scene: Scene, stage: Stage) -> None:
    """Row 49: the wait ends at the deadline; the pages come back with the server's death only."""
    scene.server.send(signal.SIGSTOP)
    if stage.reach is looked_up:
        scene.engine.call("step_until_retrieving", "hit")
    begin_to_serve(scene, stage)
    scene.engine.pass_deadlines()
    scene.engine.result()
    if stage.reach is not landed_but_not_answered:
        assert scene.engine.call("quarantined") == 1
        assert scene.engine.call("held_blocks") >= HIT_TOKENS // 16
    scene.kill_server()
    scene.start_server()
    scene.check_hits(scene.engine)


def test_the_engine_is_killed(scene: Scene, stage: Stage) -> None:
    """Rows 48, 53, 56: what it held is free at once, and another engine notices nothing."""
    other = scene.start_engine("other")
    scene.kill_engine(scene.engine)
    scene.open_all()
    scene.wait_for_gauges(sessions=1, pins=0, leases=0, queued_transfers=0)
    assert other.call("hit", "hit") == HIT_TOKENS
    scene.engine = scene.start_engine("successor")
    assert scene.engine.call("hit", "hit") == HIT_TOKENS


def test_the_engine_stops_and_goes_on(scene: Scene, stage: Stage) -> None:
    """Row 48: a live engine that is silent loses nothing; others are served meanwhile."""
    other = scene.start_engine("other")
    scene.engine.send(signal.SIGSTOP)
    scene.open_all()
    assert other.call("hit", "hit") == HIT_TOKENS
    scene.engine.send(signal.SIGCONT)
    if stage.reach is ticket_awaited:
        scene.engine.call("release_tickets")
    assert serve(scene, stage) == HIT_TOKENS


def test_the_deadline_passes(scene: Scene, stage: Stage) -> None:
    """Rows 4, 49: a time-out alone frees nothing: the pages are held until the server answers."""
    scene.engine.pass_deadlines()
    serve(scene, stage)
    if stage.is_at_valve:
        assert scene.engine.call("quarantined") == 1
        assert scene.engine.call("held_blocks") >= HIT_TOKENS // 16
    scene.open_all()
    scene.check_hits(scene.engine)


BETWEEN_STEPS = [stage for stage in STAGES if not stage.is_in_step]


@pytest.mark.parametrize("stage", BETWEEN_STEPS, ids=lambda s: s.reach.__name__, indirect=True)
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_the_request_is_taken_away(scene: Scene, stage: Stage, how: str) -> None:
    """Rows 10, 14, 56: its pages are not used again before the server has agreed."""
    scene.engine.call(how, "hit")
    if stage.is_at_valve:
        assert not scene.engine.call("is_over", "hit"), "the copy at the valve may still write"
        assert scene.engine.call("held_blocks") >= HIT_TOKENS // 16
    scene.open_all()
    scene.engine.call("release_tickets")
    serve(scene, stage)
    scene.check_hits(scene.engine)


@pytest.mark.parametrize("slices", range(LAYERS))
def test_the_copy_of_a_slice_fails(scene: Scene, slices: int) -> None:
    """Rows 22, 38: the request recomputes, and the lane goes on."""
    scene.engine.call("populate")
    _begin_held(scene, release_after=1)
    if slices:
        _pass(scene, slices)
    scene.server.call("break_retrieves")
    scene.open_all()
    scene.engine.call("serve", "hit")
    assert scene.server.totals()["retrieves_failed"] == 1
    scene.check_hits(scene.engine)
