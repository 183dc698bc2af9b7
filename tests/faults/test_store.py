"""Every fault at every stage of a store: what can be found afterwards is whole and right.

Rows of the incident list that would show here: 2, 10, 13, 16, 25, 38, 53, 57, 60, 61, 62.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.engine import NUM_BLOCKS
from tests.faults.scene import HIT_TOKENS, Scene
from tests.support.wait import eventually

SEED, AHEAD = 5, 6
"""Of the prompt whose store is followed, and of one before it in the lane's queue."""

Stage = Callable[[Scene], None]


# Stages: each brings the store of the request "save" to a point and holds it there. The request
# itself goes on to generate.


def queued(scene: Scene) -> None:
    """Behind another store, which is on the wire."""
    scene.server.call("stores.close")
    scene.engine.call("add", "ahead", AHEAD, 1, 8, True)
    scene.engine.call("step_until_storing")
    scene.server.call("stores.wait_until_held")
    _add(scene)
    scene.engine.call("step_until_storing", 2)
    scene.wait_for_gauges(queued_transfers=2)


def ticket_awaited(scene: Scene) -> None:
    """The engine has not computed what is to be stored yet."""
    scene.engine.call("hold_tickets")
    _add(scene)
    scene.engine.call("step_until_storing")
    scene.wait_for_gauges(queued_transfers=1)


def copying(scene: Scene) -> None:
    scene.server.call("stores.close")
    _add(scene)
    scene.engine.call("step_until_storing")
    scene.server.call("stores.wait_until_held")


def copied_but_not_committed(scene: Scene) -> None:
    scene.server.call("stores.hold_ends")
    _add(scene)
    scene.engine.call("step_until_storing")
    scene.server.call("stores.wait_until_ending")


def committed_but_not_answered(scene: Scene) -> None:
    scene.hold_replies("Stored")
    _add(scene)
    scene.engine.call("step_until_storing")
    scene.server.call("replies.wait_until_held", "Stored")


def _add(scene: Scene) -> None:
    scene.engine.call("add", "save", SEED, 1, 8, True)


STAGES = [queued, ticket_awaited, copying, copied_but_not_committed, committed_but_not_answered]


@pytest.fixture(params=STAGES, ids=lambda stage: stage.__name__)
def stage(scene: Scene, request: pytest.FixtureRequest) -> Stage:
    """The scene has come to a stage of a store."""
    stage: Stage = request.param
    stage(scene)
    return stage


def held_blocks(scene: Scene) -> int:
    blocks: int = scene.engine.call("held_blocks")
    return blocks


def test_the_server_is_killed(scene: Scene, stage: Stage) -> None:
    """Rows 2, 46: the request goes on, its blocks come back, and it is stored anew later."""
    scene.kill_server()
    scene.engine.call("serve", "save")
    scene.start_server()
    scene.check_hits(scene.engine, SEED)


def test_the_server_stops_and_goes_on(scene: Scene, stage: Stage) -> None:
    """Row 49: a request never waits for its store; the blocks do, until its deadline."""
    scene.server.send(signal.SIGSTOP)
    scene.engine.call("serve", "save")
    assert held_blocks(scene) >= HIT_TOKENS // 16
    scene.server.send(signal.SIGCONT)
    scene.open_all()
    scene.check_hits(scene.engine, SEED)
    assert scene.server.totals()["stores_failed"] == 0


def test_the_engine_is_killed(scene: Scene, stage: Stage) -> None:
    """Rows 48, 53, 61: chunks are found if all their bytes came before, and else never."""
    other = scene.start_engine("other")
    scene.kill_engine(scene.engine)
    scene.open_all()
    scene.wait_for_gauges(sessions=1, pins=0, leases=0, queued_transfers=0)
    found = other.call("hit", "hit", SEED)
    is_whole = stage in (copied_but_not_committed, committed_but_not_answered)
    assert found == (HIT_TOKENS if is_whole else 0)
    scene.check_hits(other, SEED)
    scene.engine = other


def test_the_engine_stops_and_goes_on(scene: Scene, stage: Stage) -> None:
    """Row 48: others are served meanwhile; nothing of it is lost."""
    other = scene.start_engine("other")
    scene.engine.send(signal.SIGSTOP)
    scene.open_all()
    scene.check_hits(other, 7)
    scene.engine.send(signal.SIGCONT)
    scene.engine.call("serve", "save")
    scene.check_hits(scene.engine, SEED)
    assert scene.server.totals()["stores_failed"] == 0


@pytest.mark.parametrize("reach", STAGES, ids=lambda stage: stage.__name__)
def test_the_server_stops_past_the_stores_deadline(scene: Scene, reach: Stage) -> None:
    """Row 49: the engine has its blocks back and fills all of them with other prompts; what it can
    find when the server goes on was stored before, or anew, and is right."""
    scene.engine = engine = scene.start_engine("impatient", suspect_after_ms=50)
    reach(scene)
    scene.server.send(signal.SIGSTOP)
    for name in ("save", "ahead") if reach is queued else ("save",):
        engine.call("serve", name)
    assert held_blocks(scene) >= HIT_TOKENS // 16
    engine.pass_deadlines()
    engine.call("step")
    assert held_blocks(scene) == 0
    eventually(lambda: not engine.call("is_usable"))
    for seed in range(20, 20 + NUM_BLOCKS * 16 // HIT_TOKENS):
        assert engine.call("hit", f"uncached {seed}", seed) == 0
    assert str(engine.call("lines")).count("has given up") == 1
    scene.server.send(signal.SIGCONT)
    scene.open_all()
    scene.wait_for_gauges(queued_transfers=0, arena_reserved_bytes=0)
    eventually(lambda: engine.call("is_usable"))
    found = engine.call("hit", "hit", SEED)
    assert found in ((0, HIT_TOKENS) if reach is committed_but_not_answered else (0,))
    scene.check_hits(engine, SEED)


@pytest.mark.parametrize("how", ["abort", "preempt", "serve"])
def test_the_request_ends(scene: Scene, stage: Stage, how: str) -> None:
    """Rows 10, 57: aborted, preempted or finished, its blocks are read before they are reused."""
    scene.engine.call(how, "save")
    assert held_blocks(scene) >= HIT_TOKENS // 16
    scene.engine.call("release_tickets")
    scene.open_all()
    scene.engine.call("serve", "save")
    scene.check_hits(scene.engine, SEED)
    assert scene.server.totals()["stores_failed"] == 0


@pytest.mark.parametrize("stage", [queued, copying], ids=lambda s: s.__name__, indirect=True)
def test_the_copy_fails(scene: Scene, stage: Stage) -> None:
    """Rows 22, 38: nothing of it is found; the lane goes on."""
    scene.server.call("break_stores")
    scene.open_all()
    scene.engine.call("serve", "save")
    scene.engine.call("finish")
    assert scene.server.totals()["stores_failed"] == 1
    assert scene.engine.call("hit", "hit", AHEAD if stage is queued else SEED) == 0
    scene.check_hits(scene.engine, SEED)
