"""The policy `auto`: its answers where the best one is known, and what it may never answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.client import AutoPolicy, Batch, Reason, Release, ReleaseQuery, Speed
from lamina.client.release.auto import LEAST_GAIN, RELEASE_S

H200 = Speed(2.405e-6, 33e-6, 20e-3, 6e-3)
"""An 8B model; 128 KiB of KV per token."""
DECIDE = AutoPolicy().decide


def query(hit: int = 14_336, prompt: int = 15_154, **changes: Any) -> ReleaseQuery:
    asked = ReleaseQuery(32, hit, prompt - hit, speed=H200)
    return asked._replace(**changes)


def promised_s(asked: ReleaseQuery) -> float:
    """Until the first token."""
    forecast = DECIDE(asked).forecast
    assert forecast is not None
    return forecast.chosen.first_token_after_s


speeds = st.builds(
    Speed,
    st.floats(1e-8, 1e-3),
    st.none() | st.floats(1e-7, 1e-2),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.just(0.0) | st.floats(1e-7, 1.0),
    st.none() | st.floats(0, 0.1),
)
batches = st.builds(
    Batch,
    decoding=st.integers(0, 300),
    prefilling=st.integers(0, 8),
    prefill_tokens=st.integers(0, 8192),
    retrieving=st.integers(0, 16),
    retrieving_tokens=st.integers(0, 100_000),
    waiting=st.integers(0, 100),
)
queries = st.builds(
    ReleaseQuery,
    st.integers(1, 128),
    st.integers(1, 130_000),
    st.integers(1, 130_000),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([64, 2048, 8192]),
    batches,
    st.none() | speeds,
    st.just(0.0) | st.floats(0, 10),
    st.floats(0, 1),
)
thorough = settings(derandomize=True, deadline=None, max_examples=300)


@thorough
@given(queries)
def test_every_question_has_an_answer_that_can_be_carried_out(asked: ReleaseQuery) -> None:
    release = DECIDE(asked)
    tokens = release.tokens_of(asked)
    slices = -(-asked.layers // release.layers_per_slice)
    assert 1 <= release.layers_per_slice <= asked.layers
    assert 0 <= release.release_after_slices <= slices
    assert 0 <= tokens <= asked.retrieve_tokens
    assert tokens == 0 or (asked.retrieve_tokens - tokens) % asked.chunk_tokens == 0
    assert (release.reason is Reason.RECOMPUTED) == (tokens == 0)
    assert release == DECIDE(asked)


@thorough
@given(queries)
def test_who_is_retrieving_is_not_overtaken(asked: ReleaseQuery) -> None:
    busy = asked._replace(batch=asked.batch._replace(retrieving=1), lane_busy_s=0.01)
    release = DECIDE(busy)
    assert release.release_after_slices > 0 or release.retrieve_tokens == 0


@thorough
@given(queries)
def test_alone_on_an_idle_lane_nobody_is_held(asked: ReleaseQuery) -> None:
    """Only the request itself waits, and in the step it waits for less."""
    alone = asked._replace(batch=Batch(), lane_busy_s=0.0, engine_busy_s=0.0)
    assert DECIDE(alone).release_after_slices == 0


@thorough
@given(queries, st.floats(1, 10))
def test_a_slower_link_never_promises_an_earlier_token(asked: ReleaseQuery, times: float) -> None:
    """But for the gain below which it does not bother to shorten a retrieve. Where steps are all as
    fast as they seem: else a slow link may be reason enough to trust them, and a quick one not."""
    alone = asked._replace(batch=Batch(), lane_busy_s=0.0)
    if alone.speed is None or alone.speed.compute_s_per_token is None:
        return
    sure = alone.speed._replace(slowest_compute_s_per_token=0.0)
    slow = sure._replace(copy_s_per_token=sure.copy_s_per_token * times)
    fast_s = promised_s(alone._replace(speed=sure))
    slow_s = promised_s(alone._replace(speed=slow))
    assert slow_s >= fast_s * (1 - LEAST_GAIN) - 1e-9


@thorough
@given(queries)
def test_retrieving_is_never_promised_to_take_longer_than_computing_all(
    asked: ReleaseQuery,
) -> None:
    """At the pace of the slowest step of late. Nobody else is delayed here."""
    alone = asked._replace(batch=Batch(), lane_busy_s=0.0, engine_busy_s=0.0)
    if alone.speed is None or alone.speed.compute_s_per_token is None:
        return
    tokens = alone.retrieve_tokens * 1.1 + alone.compute_tokens
    token_s = max(alone.speed.compute_s_per_token, alone.speed.slowest_compute_s_per_token)
    all_s = max(alone.speed.least_prefill_s, tokens * token_s)
    assert promised_s(alone) <= all_s / (1 - LEAST_GAIN) + alone.speed.least_prefill_s + 1e-9


@pytest.mark.parametrize("release_s", [None, 0.0, 5e-3])
@pytest.mark.parametrize("hit", [14_336, 12_288, 8_192, 2_048])
def test_a_held_request_finds_every_layer_there_and_is_not_held_longer(
    hit: int, release_s: float | None
) -> None:
    """Layer l is read at kτ + d + lc and must have landed at (l+1)τ: design.md, section 6."""
    speed = H200._replace(release_s=release_s)
    asked = query(hit, batch=Batch(decoding=8), engine_busy_s=0.0, speed=speed)
    release = DECIDE(asked._replace(lane_busy_s=0.03))
    assert release.reason is Reason.OUTSIDE
    assert release.layers_per_slice == 1
    layer_copy_s = hit * H200.copy_s_per_token / 32
    step_s = max(H200.least_prefill_s, min(2048, 15_154 - hit) * 33e-6)
    delay_s = (RELEASE_S if release_s is None else release_s) + 3 * H200.decode_s

    def stall_s(k: int) -> float:
        return max(
            (layer + 1) * layer_copy_s - (k * layer_copy_s + delay_s + layer * step_s / 32)
            for layer in range(32)
        )

    k = release.release_after_slices
    assert stall_s(k) <= 1e-9
    assert k == 1 or stall_s(k - 1) > 0


@pytest.mark.parametrize(
    ("asked", "reason", "retrieved", "after"),
    [
        (query(12_288), Reason.HIDDEN, 12_288, 0),
        (query(14_336), Reason.ALONE, 14_336, 0),
        (query(15_104), Reason.ALONE, 15_104, 0),
        (query(12_288, batch=Batch(decoding=8)), Reason.HIDDEN, 12_288, 0),
        (query(14_336, batch=Batch(retrieving=1), lane_busy_s=0.03), Reason.OUTSIDE, 14_336, 6),
    ],
)
def test_on_an_h200(asked: ReleaseQuery, reason: Reason, retrieved: int, after: int) -> None:
    """Compute-bound, balanced, link-bound; beside streams; behind another retrieve."""
    release = DECIDE(asked)
    assert (release.reason, release.tokens_of(asked)) == (reason, retrieved)
    if release.reason is not Reason.OUTSIDE:
        assert release.release_after_slices == after


def test_streams_do_not_wait_for_a_long_hit() -> None:
    """A step that waits is paid by every stream; the request itself hardly loses by being held."""
    few_tokens = query(15_104, batch=Batch(decoding=8))
    assert DECIDE(few_tokens).reason is Reason.OUTSIDE


def test_a_link_slower_than_computing_is_not_used() -> None:
    slow = H200._replace(copy_s_per_token=100e-6)
    release = DECIDE(query(14_336, speed=slow, lane_busy_s=1.0))
    assert release.reason is Reason.RECOMPUTED
    assert release.retrieve_tokens == 0


def test_a_link_about_as_slow_as_computing_is_shared_with_it() -> None:
    """Both begin at once and meet: the end of the hit is computed while its beginning arrives."""
    slow = H200._replace(copy_s_per_token=33e-6)
    asked = query(14_336, 14_400, speed=slow, step_tokens=16_384)
    release = DECIDE(asked)
    assert 6_000 < release.tokens_of(asked) < 9_000
    assert promised_s(asked) == pytest.approx(14_400 * 33e-6 / 2, rel=0.1)


def test_others_who_could_compute_make_it_retrieve_more() -> None:
    """The GPU is theirs as well."""
    slow = H200._replace(copy_s_per_token=10e-6)
    alone, crowded = (query(15_104, speed=slow, batch=Batch(waiting=n)) for n in (0, 4))
    assert DECIDE(crowded).tokens_of(crowded) > DECIDE(alone).tokens_of(alone)


def test_a_hit_is_not_shortened_on_the_word_of_steps_that_seemed_too_fast() -> None:
    """A retrieve that is too short costs more than one that is too long."""
    sure = H200._replace(copy_s_per_token=10e-6)
    wrong = sure._replace(compute_s_per_token=4e-6, slowest_compute_s_per_token=33e-6)
    asked, misled = (query(15_104, speed=speed) for speed in (sure, wrong))
    assert DECIDE(asked).tokens_of(asked) < 15_104
    assert DECIDE(misled).tokens_of(misled) == 15_104


@pytest.mark.parametrize(
    ("tokens", "width"), [(14_336, 1), (1_024, 2), (256, 6), (16, 32), (1, 32)]
)
def test_slices_are_as_narrow_as_is_worth_announcing(tokens: int, width: int) -> None:
    assert DECIDE(query(tokens, tokens + 1)).layers_per_slice == width


@pytest.mark.parametrize("speed", [None, Speed(2.4e-6)])
@pytest.mark.parametrize(
    ("changes", "after"),
    [({}, 0), ({"batch": Batch(decoding=1)}, 26), ({"lane_busy_s": 0.01}, 26)],
)
def test_before_anything_is_measured(
    speed: Speed | None, changes: dict[str, Any], after: int
) -> None:
    release = DECIDE(query(speed=speed, **changes))
    assert release == Release(1, after, None, Reason.UNMEASURED)
