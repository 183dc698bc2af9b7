"""What `auto` says of its choice: each candidate that it compared, and why it took one."""

from __future__ import annotations

import pytest
from hypothesis import given

from lamina.client import AutoPolicy, Batch, ReleaseQuery, Speed
from lamina.client.release import Forecast, Why
from lamina.client.release.auto import LEAST_GAIN
from tests.client.test_release_auto import H200, queries, query, thorough

SLOW = H200._replace(copy_s_per_token=10e-6)


def forecast(asked: ReleaseQuery) -> Forecast:
    said = AutoPolicy().decide(asked).forecast
    assert said is not None
    return said


@thorough
@given(queries)
def test_the_choice_is_among_those_compared_and_is_what_is_released(asked: ReleaseQuery) -> None:
    release = AutoPolicy().decide(asked)
    said = release.forecast
    if said is None:
        assert asked.speed is None or asked.speed.compute_s_per_token is None
        return
    assert said.chosen in said.candidates
    assert said.chosen.retrieve_tokens == release.retrieve_tokens
    assert bool(said.chosen.layers_before) == bool(release.release_after_slices)
    assert (said.lane_busy_s, said.engine_busy_s) == (asked.lane_busy_s, asked.engine_busy_s)
    least_s = min(candidate.cost_s for candidate in said.candidates)
    if said.why is Why.LEAST:
        assert said.chosen.cost_s == least_s
    else:
        assert said.chosen.retrieve_tokens == asked.retrieve_tokens
        assert said.chosen.cost_s > least_s
    if said.why is Why.NO_GAIN:
        assert least_s >= said.chosen.cost_s * (1 - LEAST_GAIN)


@pytest.mark.parametrize(
    ("speed", "why", "is_whole"),
    [
        (H200, Why.NO_GAIN, True),
        (SLOW, Why.LEAST, False),
        (SLOW._replace(slowest_compute_s_per_token=330e-6), Why.UNSURE, True),
    ],
)
def test_why_a_hit_of_15104_is_shortened_or_not(speed: Speed, why: Why, is_whole: bool) -> None:
    said = forecast(query(15_104, speed=speed))
    assert said.why is why
    assert (said.chosen.retrieve_tokens == 15_104) is is_whole


def test_what_it_says_can_be_read_in_one_line() -> None:
    said = forecast(query(14_336, batch=Batch(decoding=8), lane_busy_s=0.03, engine_busy_s=0.004))
    assert str(said) == (
        "ms: lane busy 30.0, engine 4.0, release 2.0; "
        "retrieve 14336 outside: ready 31.1 after 1 layers, link 34.5, computing 27.0, "
        "first token 78.1, others 0.0 (delays everybody least); "
        "retrieve 14336 in step: stall 34.3, link 34.5, computing 27.0, "
        "first token 65.3, others 274.6; "
        "compute all, link 0.0, computing 547.4, first token 551.4, others 4163.2"
    )
