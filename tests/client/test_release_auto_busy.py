"""The policy `auto` where others are in the way, and where computing is nearly as good."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.client import AutoPolicy, Batch, Reason, ReleaseQuery, Speed

H200 = Speed(2.405e-6, 33e-6, 20e-3, 6e-3)
"""An 8B model; 128 KiB of KV per token."""
DECIDE = AutoPolicy().decide


def query(hit: int, prompt: int, **changes: Any) -> ReleaseQuery:
    asked = ReleaseQuery(32, hit, prompt - hit, speed=H200)
    return asked._replace(**changes)


@pytest.mark.parametrize(("times", "is_retrieved"), [(1.0, True), (1.17, True), (1.3, False)])
def test_a_hit_is_computed_only_where_that_is_much_sooner_as_measured(
    times: float, is_retrieved: bool
) -> None:
    """All of it or nothing; the link is that many times slower than computing."""
    slow = H200._replace(copy_s_per_token=33e-6 * times)
    asked = query(14_336, 14_400, speed=slow, chunk_tokens=14_336, step_tokens=16_384)
    assert bool(DECIDE(asked).tokens_of(asked)) is is_retrieved


@pytest.mark.parametrize(
    ("engine_busy_s", "decoding", "reason"),
    [
        (0.04, 0, Reason.HIDDEN),
        (0.04, 8, Reason.HIDDEN),
        (0.02, 0, Reason.ALONE),
        (0.02, 1, Reason.CHEAPER),
        (0.02, 8, Reason.OUTSIDE),
    ],
)
def test_a_busy_lane_is_joined_in_step_where_that_delays_all_together_least(
    engine_busy_s: float, decoding: int, reason: Reason
) -> None:
    """The lane is free in 30 ms: a step that begins after 40 waits for nothing, one that begins
    after 20 makes each stream wait."""
    batch = Batch(decoding=decoding)
    asked = query(12_288, 15_154, lane_busy_s=0.03, engine_busy_s=engine_busy_s, batch=batch)
    release = DECIDE(asked)
    assert release.reason is reason
    assert bool(release.release_after_slices) is (reason is Reason.OUTSIDE)
