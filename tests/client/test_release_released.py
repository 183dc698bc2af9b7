"""How long a release takes: measured where the engine had nothing else to do."""

from __future__ import annotations

import math

import pytest

from lamina.client import Batch, Meters
from lamina.client.release.jobs import ENOUGH, MOST_JOBS
from lamina.client.release.released import ReleaseMeter


def told(meter: ReleaseMeter, idle_since_s: float, landed_first: bool = False) -> None:
    """Often enough: a retrieve of a second whose request is released half way, at 0.5, and is
    scheduled at 0.7; all has landed at 1.0."""
    for number in range(ENOUGH):
        meter.begin(number, 0.5)
        if landed_first:
            meter.landed(number, 1.0, 1.0)
        meter.scheduled(number, 0.7, idle_since_s)
        meter.scheduled(number, 0.9, idle_since_s)  # the rest of its prompt
        meter.landed(number, 1.0, 1.0)


@pytest.mark.parametrize("landed_first", [False, True])
def test_a_release_takes_from_its_slices_landing_to_the_requests_first_step(
    landed_first: bool,
) -> None:
    meter = ReleaseMeter()
    assert meter.release_s is None
    told(meter, 0.4, landed_first)
    assert meter.release_s == pytest.approx(0.2)


@pytest.mark.parametrize("idle_since_s", [0.6, math.inf])
def test_an_engine_that_is_busy_says_nothing_about_it(idle_since_s: float) -> None:
    """A step ended, or was under way, after the slices had landed."""
    meter = ReleaseMeter()
    told(meter, idle_since_s)
    assert meter.release_s is None


def test_who_is_scheduled_before_its_slices_have_landed_says_nothing() -> None:
    """It has failed, and computes."""
    meter = ReleaseMeter()
    for number in range(ENOUGH):
        meter.begin(number, 0.5)
        meter.scheduled(number, 0.1, 0.0)
        meter.landed(number, 1.0, 1.0)
    assert meter.release_s is None


def test_requests_that_are_never_scheduled_are_forgotten() -> None:
    meter = ReleaseMeter()
    for number in range(2 * MOST_JOBS):
        meter.begin(number, 0.5)
    assert len(meter._awaited) == MOST_JOBS
    meter.scheduled(0, 0.7, 0.4)
    meter.landed(0, 1.0, 1.0)
    assert len(meter._awaited) == MOST_JOBS


def test_the_policy_is_told() -> None:
    meters = Meters(1, 1, 16, 64)
    told(meters.releases, 0.4)
    speed = meters.query(2.0, 0, 16, 16, Batch()).speed
    assert speed is not None
    assert speed.release_s == pytest.approx(0.2)
