"""A full cache, evictions while leases are out, and two engines of which one dies or floods."""

from __future__ import annotations

import signal

from tests.faults.scene import HIT_TOKENS, Scene

CHUNK_BYTES = 4 * 4 * 4096
"""Layers, blocks a chunk, bytes a page of the reference engine of these tests."""


def small_server(scene: Scene, prompts: int) -> None:
    """Replace the server by one whose arena holds so many prompts of four chunks."""
    scene.kill_server()
    scene.start_server(arena_bytes=prompts * 4 * CHUNK_BYTES)
    scene.check_hits(scene.engine)


def test_a_leased_prompt_outlives_every_eviction(scene: Scene) -> None:
    """Rows 16, 25, 26: a hit that waits for its retrieve is not evicted by ten other prompts."""
    small_server(scene, prompts=2)
    scene.engine.call("forget")
    scene.engine.call("add", "hit")
    scene.engine.call("answered", "hit")
    other = scene.start_engine("other")
    for seed in range(10, 20):
        other.call("populate", seed)
    assert scene.server.gauges()["evicted_chunks"] > 0
    assert scene.engine.call("serve", "hit") == HIT_TOKENS


def test_a_retrieve_under_way_outlives_every_eviction(scene: Scene) -> None:
    """Rows 25, 26: the same with its slices at the valve."""
    small_server(scene, prompts=2)
    scene.engine.call("forget")
    scene.server.call("retrieves.close")
    scene.engine.call("add", "hit")
    scene.engine.call("step_until_retrieving", "hit")
    scene.server.call("retrieves.wait_until_held")
    other = scene.start_engine("other")
    for seed in range(10, 20):
        other.call("populate", seed)
    assert scene.server.gauges()["evicted_chunks"] > 0
    scene.open_all()
    assert scene.engine.call("serve", "hit") == HIT_TOKENS


def test_a_full_arena_drops_stores_and_serves_on(scene: Scene) -> None:
    """Rows 16, 60, 61: all is leased, so nothing can be stored; when it ends, something can."""
    small_server(scene, prompts=1)
    scene.engine.call("forget")
    scene.engine.call("add", "hit")
    scene.engine.call("answered", "hit")
    other = scene.start_engine("other")
    dropped = scene.server.totals()["dropped_chunks"]
    other.call("populate", 10)
    assert scene.server.totals()["dropped_chunks"] == dropped + 4
    assert scene.engine.call("serve", "hit") == HIT_TOKENS
    scene.engine.call("finish")
    scene.check_hits(other, 10)


def test_leases_that_run_out_let_their_chunks_go(scene: Scene) -> None:
    """Row 56: a hit that is never retrieved does not stay pinned; its request recomputes."""
    small_server(scene, prompts=1)
    scene.engine.call("forget")
    scene.engine.call("add", "hit")
    scene.engine.call("answered", "hit")
    assert scene.server.call("expire_leases") == 1
    other = scene.start_engine("other")
    scene.check_hits(other, 10)
    scene.engine.call("serve", "hit")


def test_one_engine_dies_in_the_lane_that_another_waits_for(scene: Scene) -> None:
    """Row 53: the dead engine's retrieve is first in the lane; the other's comes through."""
    scene.engine.call("populate")
    victim = scene.start_engine("victim")
    scene.server.call("retrieves.close")
    victim.call("add", "dies")
    victim.call("step_until_retrieving", "dies")
    scene.server.call("retrieves.wait_until_held")
    scene.engine.call("add", "hit")
    scene.engine.call("step_until_retrieving", "hit")
    scene.wait_for_gauges(queued_transfers=2)
    scene.kill_engine(victim)
    scene.open_all()
    assert scene.engine.call("serve", "hit") == HIT_TOKENS


def test_one_engine_stops_in_the_lane_that_another_waits_for(scene: Scene) -> None:
    """Row 48: a stopped engine's memory can be written; its ticket, which never comes, holds
    nobody up."""
    scene.engine.call("populate")
    silent = scene.start_engine("silent")
    silent.call("hold_tickets")
    silent.call("add", "hit")
    silent.call("step_until_retrieving", "hit")
    scene.wait_for_gauges(queued_transfers=1)
    silent.send(signal.SIGSTOP)
    assert scene.engine.call("hit", "hit") == HIT_TOKENS
    silent.send(signal.SIGCONT)
    silent.call("release_tickets")
    assert silent.call("serve", "hit") == HIT_TOKENS


def test_engines_die_one_after_another_and_leave_nothing(scene: Scene) -> None:
    """Rows 34, 53, 58, 60: ten engines die in ten retrieves; memory, pins and leases come back."""
    scene.engine.call("populate")
    free = scene.server.gauges()["arena_free_bytes"]
    files = scene.server.call("open_files")
    for number in range(10):
        scene.server.call("retrieves.close")
        engine = scene.start_engine(f"engine {number}")
        engine.call("add", "hit")
        engine.call("step_until_retrieving", "hit")
        scene.server.call("retrieves.wait_until_held")
        scene.kill_engine(engine)
        scene.server.call("retrieves.open")
        scene.wait_for_gauges(sessions=1, pins=0, leases=0, queued_transfers=0)
    assert scene.server.gauges()["arena_free_bytes"] == free
    assert scene.server.call("open_files") == files
    assert scene.engine.call("hit", "hit") == HIT_TOKENS
