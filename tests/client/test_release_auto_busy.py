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


def test_who_is_held_behind_others_is_held_until_a_step_that_waits_for_slices_is_over() -> None:
    """That step would take 20 ms; the lane that it waits for is free in 50."""
    batch = Batch(prefilling=1, prefill_tokens=100, retrieving=1, retrieving_tokens=2000)
    asked, gated = (
        query(14_336, 15_154, lane_busy_s=0.05, batch=batch._replace(gated_s=gated_s))
        for gated_s in (0.0, 0.05)
    )
    early, late = DECIDE(asked), DECIDE(gated)
    assert early.reason is late.reason is Reason.OUTSIDE
    assert late.release_after_slices > early.release_after_slices
    assert early.forecast is not None
    assert late.forecast is not None
    early_s, late_s = (
        each.chosen.first_token_after_s for each in (early.forecast, late.forecast)
    )
    assert late_s == pytest.approx(early_s + 0.05 - 0.02)


@pytest.mark.parametrize(("times", "is_retrieved"), [(1.0, True), (1.17, True), (1.3, False)])
def test_a_hit_is_computed_only_where_that_is_much_sooner_as_measured(
    times: float, is_retrieved: bool
) -> None:
    """All of it or nothing; the link is that many times slower than computing."""
    slow = H200._replace(copy_s_per_token=33e-6 * times)
    asked = query(14_336, 14_400, speed=slow, chunk_tokens=14_336, step_tokens=16_384)
    assert bool(DECIDE(asked).tokens_of(asked)) is is_retrieved


@pytest.mark.parametrize("decoding", [0, 1, 8])
@pytest.mark.parametrize(
    ("engine_busy_s", "reason"), [(0.02, Reason.OUTSIDE), (0.04, Reason.HIDDEN)]
)
def test_a_busy_lane_is_joined_in_step_only_where_the_engine_is_busy_for_longer(
    engine_busy_s: float, reason: Reason, decoding: int
) -> None:
    """The step begins when the lane has come to its slices, so that it waits for none."""
    batch = Batch(decoding=decoding)
    release = DECIDE(
        query(12_288, 15_154, lane_busy_s=0.03, engine_busy_s=engine_busy_s, batch=batch)
    )
    assert release.reason is reason
    assert bool(release.release_after_slices) is (reason is Reason.OUTSIDE)
