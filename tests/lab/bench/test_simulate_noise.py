"""The simulator with noise: what each rule of `auto` that guards against it is worth.

Each test takes one rule away and finds first tokens later by a good part of what was measured so;
docs/performance.md has the other cells.
"""

from __future__ import annotations

import statistics

import pytest

import lamina.client.release.auto
from lamina.client import AutoPolicy, Release, ReleasePolicy, ReleaseQuery
from lamina.client.release.auto import _Outlook
from lamina_lab.simulate import Machine, Outcome, Workload, simulate

AUTO = AutoPolicy()


def outcome(
    machine: Machine, hit: int, concurrency: int = 1, policy: ReleasePolicy = AUTO
) -> Outcome:
    return simulate(machine, Workload(hit_tokens=hit, concurrency=concurrency, requests=16), policy)


def mean_s(noise: float, hit: int, concurrency: int, link: float, step_tokens: int) -> float:
    """First-token time of `auto` over some seeds."""
    return statistics.mean(
        outcome(
            Machine(
                step_tokens=step_tokens,
                link_s_per_gib=link,
                step_noise=noise,
                link_noise=noise,
                seed=seed,
            ),
            hit,
            concurrency,
        ).mean_s
        for seed in range(6)
    )


def test_noise_is_the_seeds_and_multiplies_steps_and_copies() -> None:
    quiet, loud = Machine(), Machine(step_noise=0.3, link_noise=0.3)
    assert outcome(loud, 14_336) == outcome(loud, 14_336)
    assert outcome(loud, 14_336) != outcome(Machine(step_noise=0.3, link_noise=0.3, seed=1), 14_336)
    assert outcome(quiet, 14_336) == outcome(Machine(seed=1), 14_336)
    steps = outcome(Machine(step_noise=0.3), 8_192).first_token_s
    copies = outcome(Machine(link_noise=0.3), 15_104).first_token_s
    for noisy_s in steps, copies:
        assert statistics.stdev(noisy_s) / statistics.mean(noisy_s) == pytest.approx(0.2, abs=0.1)


def test_steps_that_seemed_quick_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the slowest step: without it hits are cut short on the word of a few."""
    guarded_s = mean_s(0.5, 15_104, 1, 60e-3, 8192)
    monkeypatch.setattr(_Outlook, "agrees", lambda outlook, other: True)
    assert mean_s(0.5, 15_104, 1, 60e-3, 8192) > 1.08 * guarded_s


def test_computing_instead_of_retrieving_needs_caution(monkeypatch: pytest.MonkeyPatch) -> None:
    cautious_s = mean_s(0.3, 15_104, 1, 100e-3, 2048)
    monkeypatch.setattr(lamina.client.release.auto, "CAUTION", 1.0)
    assert mean_s(0.3, 15_104, 1, 100e-3, 2048) > 1.05 * cautious_s


def test_who_retrieves_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_s = mean_s(0.1, 12_288, 4, 19.7e-3, 2048)
    monkeypatch.setattr(_Outlook, "_ways", lambda outlook: [outlook.synchronous, outlook.outside])
    assert mean_s(0.1, 12_288, 4, 19.7e-3, 2048) > 1.05 * patient_s


@pytest.mark.parametrize("idle_poll_s", [1e-3, 4e-3])
def test_how_long_a_release_takes_is_learned(idle_poll_s: float) -> None:
    """Two turns of an idle engine's loop at most, which sleeps in each. Requests of one token leave
    it idle in between."""
    learned: list[float | None] = []

    class Listening:
        def decide(self, query: ReleaseQuery) -> Release:
            assert query.speed is not None
            learned.append(query.speed.release_s)
            return AUTO.decide(query)

    machine = Machine(idle_poll_s=idle_poll_s)
    workload = Workload(hit_tokens=15_104, concurrency=8, requests=48, output_tokens=1)
    simulate(machine, workload, Listening())
    assert learned[0] is None
    assert learned[-1] is not None
    assert idle_poll_s < learned[-1] < 2 * idle_poll_s + 2e-3
