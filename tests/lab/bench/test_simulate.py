"""The simulator against what was measured on an H200, and the policy `auto` on it.

Measured: mean first-token times in ms of `docs/performance.md`, one pass of 8 requests a cell. They
scatter by 5 %, between the two runs by 25 % (`whole` at 14336 : 4).
"""

from __future__ import annotations

import functools

import pytest

from lamina.client import FixedPolicy, ReleaseQuery, WholePolicy
from lamina.client.release import AutoPolicy, Release, ReleasePolicy
from lamina_lab.simulate import ARMS, Machine, Outcome, Workload, simulate

FIXED = {name: policy for name, policy in ARMS.items() if name != "auto"}


class MixedPolicy:
    """Synchronous when nothing is being retrieved, else released after 16 layers."""

    def decide(self, query: ReleaseQuery) -> Release:
        return Release(1, 16 if query.lane_busy_s else 0)


def outcome(
    hit: int, concurrency: int, policy: ReleasePolicy | None, machine: Machine | None = None
) -> Outcome:
    workload = Workload(hit_tokens=hit, concurrency=concurrency)
    return simulate(machine or Machine(), workload, policy)


@pytest.mark.parametrize(
    ("hit", "concurrency", "policy", "measured_ms"),
    [
        (0, 1, None, 455),
        (15_104, 1, None, 36),
        (14_336, 1, None, 43),
        (12_288, 1, None, 110.5),
        (14_336, 4, None, 116),
        (12_288, 4, None, 261),
        (12_288, 8, None, 521),
        (15_104, 1, WholePolicy(), 84.9),
        (14_336, 1, WholePolicy(), 87.6),
        (12_288, 1, WholePolicy(), 144.9),
        (12_288, 4, WholePolicy(), 317),
        (12_288, 8, WholePolicy(), 601),
        (15_104, 1, FixedPolicy(1, 1), 56.3),
        (14_336, 1, FixedPolicy(1, 1), 49.9),
        (12_288, 1, FixedPolicy(1, 1), 117.4),
        (14_336, 4, FixedPolicy(1, 1), 123.2),
        (14_336, 4, FixedPolicy(1, 16), 124.7),
        (14_336, 4, FixedPolicy(1, 24), 132.7),
        (14_336, 4, FixedPolicy(1, 29), 141),
        (12_288, 4, FixedPolicy(1, 1), 294),
        (12_288, 4, FixedPolicy(1, 29), 311.1),
        (12_288, 8, FixedPolicy(1, 1), 560),
        (15_104, 1, FixedPolicy(1, 0), 55.9),
        (14_336, 1, FixedPolicy(1, 0), 50.8),
        (12_288, 1, FixedPolicy(1, 0), 114.2),
        (12_288, 4, FixedPolicy(1, 0), 277.9),
        (12_288, 8, FixedPolicy(1, 0), 563.7),
        (14_336, 4, MixedPolicy(), 101.2),
        (12_288, 4, MixedPolicy(), 267),
        (12_288, 8, MixedPolicy(), 560),
    ],
)
def test_a_measured_cell_is_met_within_13_percent(
    hit: int, concurrency: int, policy: ReleasePolicy | None, measured_ms: float
) -> None:
    simulated_ms = outcome(hit, concurrency, policy).mean_s * 1e3
    assert simulated_ms == pytest.approx(measured_ms, rel=0.13)


def test_the_order_of_what_was_measured_at_four_long_hits() -> None:
    """Synchronous retrieves of all four are worst, the mix is at or below the floor."""
    times = {name: outcome(14_336, 4, policy).mean_s for name, policy in FIXED.items()}
    mixed_s, floor_s = outcome(14_336, 4, MixedPolicy()).mean_s, outcome(14_336, 4, None).mean_s
    assert max(times, key=lambda name: times[name]) == "sync"
    assert mixed_s < min(times.values())
    assert mixed_s < floor_s
    assert times["k=1"] < times["k=16"] < times["k=24"] < times["k=29"]


@functools.cache
def ratios(machine: Machine, hit: int, concurrency: int) -> tuple[float, float]:
    """`auto` against the best fixed arm: first-token times, and times of whole requests."""
    auto = outcome(hit, concurrency, AutoPolicy(), machine)
    fixed = [outcome(hit, concurrency, policy, machine) for policy in FIXED.values()]
    return (
        auto.mean_s / min(other.mean_s for other in fixed),
        auto.mean_total_s / min(other.mean_total_s for other in fixed),
    )


@pytest.mark.parametrize("step_tokens", [2048, 4096, 8192])
@pytest.mark.parametrize("concurrency", [1, 4, 8])
@pytest.mark.parametrize("hit", [15_104, 14_336, 12_288, 8_192])
def test_auto_is_never_worse_than_the_best_fixed_choice(
    hit: int, concurrency: int, step_tokens: int
) -> None:
    """By more than 2 %. At 15104 a fixed release after one layer makes first tokens of a closed
    loop sooner by making everybody's later tokens late: there whole requests count."""
    first_token, whole = ratios(Machine(step_tokens=step_tokens), hit, concurrency)
    assert min(first_token, whole) <= 1.02
    if hit < 15_104 or concurrency == 1:
        assert first_token <= 1.02


@pytest.mark.parametrize("link_s_per_gib", [60e-3, 200e-3, 1.0])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("hit", [15_104, 14_336, 12_288])
def test_auto_is_not_worse_on_slow_links(hit: int, concurrency: int, link_s_per_gib: float) -> None:
    """Whole requests: see above."""
    assert ratios(Machine(link_s_per_gib=link_s_per_gib), hit, concurrency)[1] <= 1.02


def test_auto_beats_every_fixed_choice_where_the_link_is_the_bound() -> None:
    """By a shorter hit: the last chunks are computed while the others arrive."""
    machine = Machine(link_s_per_gib=60e-3)
    assert ratios(machine, 15_104, 1)[0] < 0.95
    auto = outcome(15_104, 1, AutoPolicy(), machine)
    assert 11_000 * 8 < auto.retrieved_tokens < 15_104 * 8


def test_auto_computes_where_the_link_is_slower() -> None:
    """Once it knows: the first hit is retrieved."""
    machine = Machine(link_s_per_gib=8.0)
    auto = outcome(8_192, 1, AutoPolicy(), machine)
    assert auto.reasons["recomputed"] == 7
    assert sorted(auto.first_token_s)[4] == pytest.approx(outcome(0, 1, None, machine).mean_s)


def gaps_ms(policy: ReleasePolicy | None) -> list[float]:
    """Between the tokens of 8 streams while hits arrive, sorted."""
    workload = Workload(hit_tokens=15_104, concurrency=4, requests=32, streams=8)
    return sorted(gap * 1e3 for gap in simulate(Machine(), workload, policy).stream_gaps_s)


def test_streams_go_on_while_hits_arrive() -> None:
    """A step that waits is paid by every stream; `auto` keeps out of it, `sync` does not."""
    floor, auto, synchronous = gaps_ms(None), gaps_ms(AutoPolicy()), gaps_ms(FixedPolicy(1, 0))
    median, late = len(auto) // 2, -len(auto) // 100
    assert auto[median] <= 1.03 * floor[len(floor) // 2]
    assert auto[late] <= 1.15 * floor[-len(floor) // 100]
    assert synchronous[-len(synchronous) // 100] > 1.5 * auto[late]


def test_what_is_simulated_is_deterministic_and_complete() -> None:
    first, second = (outcome(14_336, 4, AutoPolicy()) for _ in range(2))
    assert first == second
    assert len(first.first_token_s) == 8
    assert sum(first.reasons.values()) == 8
    assert all(0 < a < b for a, b in zip(first.first_token_s, first.last_token_s, strict=True))


@pytest.mark.parametrize("policy", [*FIXED.values(), AutoPolicy()])
def test_no_hit_is_sooner_than_link_and_computing_allow(policy: ReleasePolicy) -> None:
    """Alone on an idle machine, and not faster than the floor."""
    machine = Machine()
    ideal = outcome(14_336, 1, policy)
    least_s = machine.arrival_s + machine.copy_s(ideal.retrieved_tokens // 8)
    assert min(ideal.first_token_s) >= least_s
    assert ideal.mean_s >= outcome(14_336, 1, None).mean_s


def test_a_machine_with_a_faster_link_is_not_slower() -> None:
    times = [
        outcome(14_336, 1, AutoPolicy(), Machine(link_s_per_gib=link)).mean_s
        for link in (1e-3, 10e-3, 20e-3, 40e-3, 80e-3)
    ]
    assert times == sorted(times)
