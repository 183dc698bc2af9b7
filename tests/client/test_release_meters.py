"""What the policy `auto` is told: times of work without queueing, and nothing wild."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.client import Batch, Meters
from lamina.client.release.jobs import ENOUGH, KEPT, MOST_JOBS, JobQueue, Recent
from lamina.client.release.meters import (
    LEAST_COPY_BYTES,
    MOST_SKIPPED,
    PRIOR_LINK_GBPS,
    CopyMeter,
    StepMeter,
)

TOKEN_BYTES = 128 << 10
PRIOR_S = TOKEN_BYTES / PRIOR_LINK_GBPS * 1e-9


def test_a_value_is_known_after_enough_samples_and_follows_a_change() -> None:
    recent = Recent()
    for _ in range(ENOUGH - 1):
        recent.add(1.0)
        assert recent.value is None
    recent.add(1.0)
    assert recent.value == 1.0
    for _ in range(KEPT):
        recent.add(3.0)
    assert recent.value == 3.0


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(1e3, 1e9), max_size=4), st.lists(st.floats(1, 2), min_size=5, max_size=5))
def test_no_few_outliers_move_it_out_of_the_others(wild: list[float], tame: list[float]) -> None:
    recent = Recent()
    for sample in [*tame, *wild]:
        recent.add(sample)
    assert recent.value is not None
    assert 1 <= recent.value <= 2


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 3)), min_size=1, max_size=20))
def test_a_queue_tells_work_from_waiting(jobs: list[tuple[float, float]]) -> None:
    """Against a server that works in order: (pause before the job comes, work)."""
    queue = JobQueue()
    now_s = free_s = 0.0
    ends: dict[int, float] = {}

    def let_end(until_s: float) -> None:
        for number in [n for n, end_s in ends.items() if end_s <= until_s]:
            assert queue.end(number, ends.pop(number)) == pytest.approx(jobs[number][1])

    for number, (pause_s, work_s) in enumerate(jobs):
        now_s += pause_s
        let_end(now_s)
        queue.begin(number, now_s, work_s)
        ends[number] = free_s = max(free_s, now_s) + work_s
        assert queue.busy_s(now_s) == pytest.approx(free_s - now_s)
    let_end(free_s)
    assert queue.busy_s(free_s) == 0
    assert queue.end("unknown", free_s) is None


def test_a_job_that_takes_longer_than_predicted_delays_those_behind() -> None:
    queue = JobQueue()
    queue.begin("late", 0.0, 1.0)
    queue.begin("next", 0.0, 1.0)
    assert queue.busy_s(5.0) == pytest.approx(1.0)


def test_jobs_whose_end_never_comes_are_forgotten() -> None:
    queue = JobQueue()
    for number in range(3 * MOST_JOBS):
        queue.begin(number, float(number), 0.1)
    assert len(queue) == MOST_JOBS


def test_the_links_speed_is_learned_from_the_first_retrieve_without_its_queueing() -> None:
    copies = CopyMeter(TOKEN_BYTES)
    assert copies.s_per_token == pytest.approx(PRIOR_S)
    copies.begin(1, 8192, 0.0)
    copies.begin(2, 8192, 0.0)
    copies.end(1, 0.020, 1 << 30)
    assert copies.s_per_token == pytest.approx(0.020 / 8192)
    copies.end(2, 0.040, 1 << 30, begun_s=0.001)
    assert copies.s_per_token == pytest.approx(0.020 / 8192)


@pytest.mark.parametrize("nbytes", [0, LEAST_COPY_BYTES - 1])
def test_failed_and_tiny_retrieves_say_nothing_about_the_link(nbytes: int) -> None:
    copies = CopyMeter(TOKEN_BYTES)
    copies.begin(1, 8192, 0.0)
    copies.end(1, 5.0, nbytes)
    assert copies.s_per_token == pytest.approx(PRIOR_S)
    assert copies.queue.busy_s(5.0) == 0


def test_a_link_that_seemed_too_slow_is_tried_again() -> None:
    """Nothing is retrieved, so nothing is measured: without this one slow retrieve would be the
    last."""
    copies = CopyMeter(TOKEN_BYTES)
    copies.begin(1, 8192, 0.0)
    copies.end(1, 60.0, 1 << 30)
    for _ in range(MOST_SKIPPED):
        copies.skipped()
        assert copies.s_per_token > 1e-3
    copies.skipped()
    assert copies.s_per_token == pytest.approx(PRIOR_S)


numbers = itertools.count(1)


def steps(meter: StepMeter, count: int, tokens: int, context: int, took_s: float) -> None:
    """As many steps, one after another."""
    for number in itertools.islice(numbers, count):
        meter.begin(number, 1000.0 * number, tokens, context, False)
        meter.end(number, 1000.0 * number + took_s)


def test_computing_is_learned_by_length_of_context() -> None:
    meter = StepMeter()
    assert meter.s_per_token(8000) is None
    steps(meter, ENOUGH, 2048, 0, 0.041)
    assert meter.s_per_token(8000) == pytest.approx(20e-6, rel=0.01), "the nearest"
    steps(meter, ENOUGH, 2048, 14_000, 0.070)
    assert meter.s_per_token(14_336) == pytest.approx(34e-6, rel=0.01)
    assert meter.s_per_token(100) == pytest.approx(20e-6, rel=0.01)


def test_computing_is_known_before_any_length_is() -> None:
    meter = StepMeter()
    for context in (0, 2_000, 10_000):
        steps(meter, 1, 2048, context, 0.041)
    assert meter.s_per_token(14_336) == pytest.approx(20e-6, rel=0.01)


def test_small_steps_are_measured_apart() -> None:
    meter = StepMeter()
    steps(meter, ENOUGH, 0, 0, 0.006)
    assert (meter.decode_s, meter.least_prefill_s) == pytest.approx((0.006, 0.006))
    steps(meter, ENOUGH, 50, 15_000, 0.020)
    assert (meter.decode_s, meter.least_prefill_s) == pytest.approx((0.006, 0.020))
    assert meter.s_per_token(15_000) is None


def test_pipelined_steps_do_not_count_their_waiting() -> None:
    """With asynchronous scheduling a step is begun while another one is under way."""
    meter = StepMeter()
    meter.begin(1, 0.0, 2048, 0, False)
    for number in range(2, 8):
        meter.begin(number, (number - 2) * 0.05 + 0.001, 2048, 0, False)
        meter.end(number - 1, (number - 1) * 0.05)
    assert meter.s_per_token(0) == pytest.approx(0.05 / 2048)


def test_steps_that_wait_for_slices_and_those_whose_end_they_hide_are_no_samples() -> None:
    meter = StepMeter()
    for number in range(1, 40, 2):
        meter.begin(number, float(number), 2048, 0, False)
        meter.begin(number + 1, float(number), 2048, 0, True)
        meter.end(number, number + 0.5)
        meter.end(number + 1, number + 0.9)
    assert meter.s_per_token(0) is None


def test_steps_of_which_no_end_was_told_are_no_samples() -> None:
    meter = StepMeter()
    for number in range(1, 30, 3):
        for index in range(3):
            meter.begin(number + index, float(number), 2048, 0, False)
        meter.end(number + 2, number + 0.5)
    assert meter.queue.busy_s(100.0) == 0
    meter.end(1, 100.0)


def test_a_question_has_what_was_measured() -> None:
    meters = Meters(32, TOKEN_BYTES, 256, 2048)
    steps(meters.steps, ENOUGH, 2048, 12_000, 0.070)
    meters.copies.begin(1, 8192, 9e6)
    asked = meters.query(9e6, 512, 14_336 - 512, 818, Batch(decoding=3))
    assert (asked.layers, asked.retrieve_tokens, asked.compute_tokens) == (32, 13_824, 818)
    assert asked.batch == Batch(decoding=3)
    assert asked.lane_busy_s == pytest.approx(8192 * PRIOR_S)
    assert asked.speed is not None
    assert asked.speed.compute_s_per_token == pytest.approx(0.070 / 2048)
