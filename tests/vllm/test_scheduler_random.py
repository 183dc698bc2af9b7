"""vLLM's real schedulers with both sides of the connector, and everything happens at any time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from lamina.client import LaminaError, Offer, Prefix, Prefixes, Reason, Release
from tests.vllm import scheduler_guards as guards
from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER, MODES, RANKS, Rig, Step, prompt
from tests.vllm.scripted_client import CHUNK, LAYERS

EPISODES = 100
FAMILIES = (1, 2)


class Episode:
    """A few requests with shared prefixes, little room, and a server that does as it likes; with
    `apart` it does so to each of two ranks by itself."""

    def __init__(self, mode: str, seed: int, apart: bool = False, drafts: int = 0) -> None:
        self._draw = random.Random(seed)
        blocks, step_tokens = self._draw.choice([14, 20, 40]), self._draw.choice([64, 512])
        ranks = 2 if apart else RANKS
        self.rig = Rig(mode, blocks=blocks, step_tokens=step_tokens, ranks=ranks, drafts=drafts)
        self.rig.client.leads = not apart
        self._movers = self.rig.clients if apart else [self.rig.client]
        self.rig.drafter.is_right = lambda name, position: self._guess(seed, name, position)
        self.rig.side._prefixes.offer = self._offer  # type: ignore[assignment, method-assign]
        for client in self._movers:
            client.acknowledges = self._chance(0.5)
        self.rig.client.answers = self._chance(0.8)
        for family in FAMILIES:
            self.rig.hold(prompt(family, 160), self._draw.randrange(6))

    def _offer(self, prefix: Prefix, *question: Any) -> Offer:
        """`auto` answers anything that it may."""
        offer = Prefixes.offer(self.rig.side._prefixes, prefix, *question)
        release = offer.release
        if release.reason is Reason.UNMEASURED:
            fewer = CHUNK * self._draw.randrange(3)
            tokens = max(0, offer.hit_tokens - fewer)
            width = self._draw.randint(1, LAYERS)
            after = self._draw.randint(0, -(-LAYERS // width))
            release = Release(width, after, tokens, Reason.OUTSIDE)
            offer = offer._replace(tokens=tokens, release=release)
        return offer

    def run(self) -> None:
        for index in range(self._draw.randint(20, 60)):
            if len(self.rig.requests) < 7 and self._chance(0.4):
                self._add(f"R{index}")
            self._move_transfers()
            self._disturb()
            self.rig.step(self._abort_late)
        self.rig.client.answers = True
        self.rig.close()

    def _chance(self, share: float) -> bool:
        return self._draw.random() < share

    @staticmethod
    def _guess(seed: int, name: str, position: int) -> bool | None:
        """Whether a draft is right: the same whenever it is asked."""
        return random.Random(f"{seed} {name} {position}").choice([True, True, False, None])

    def _anyone(self) -> str:
        return self._draw.choice(sorted(self.rig.requests))

    def _add(self, name: str) -> None:
        options: dict[str, Any] = {key: False for key in ("retrieve", "store") if self._chance(0.1)}
        if self._chance(0.6):
            options["release_after_slices"] = self._draw.choice([0, 1, 2])
        elif self._chance(0.7):
            options["layerwise_overlap"] = "auto"
        asked = prompt(self._draw.choice(FAMILIES), self._draw.randint(2, 150))
        self.rig.add(name, asked, max_tokens=self._draw.randint(1, 40), **options)

    def _move_transfers(self) -> None:
        for retrieve in [x for client in self._movers for x in client.open_retrieves]:
            if retrieve.outcome is not None:
                if self._chance(0.3):
                    retrieve.end()
            elif self._chance(0.2):
                retrieve.land(retrieve.landed_slices + 1)
            elif self._chance(0.06):
                retrieve.fail(is_over=self._chance(0.5))
        for store in [x for client in self._movers for x in client.stores]:
            if self._chance(0.3):
                store.end()

    def _disturb(self) -> None:
        client = self._draw.choice(self._movers)
        if self.rig.requests and self._chance(0.05):
            self.rig.abort(self._anyone())
        if self.rig.requests and self._chance(0.1):
            client.doomed[self._anyone()] = self._chance(0.5)
        if self._chance(0.08):
            client.is_usable = not client.is_usable
        if self._chance(0.1):
            self.rig.client.answers = not self.rig.client.answers
        if self._chance(0.02):
            self.rig.connector.reset_cache()

    def _abort_late(self, step: Step) -> list[str]:
        """Right before the step's output is taken, rather those whom it releases."""
        if step.released and self._chance(0.2):
            return sorted(step.released)
        return [self._anyone()] if self.rig.requests and self._chance(0.03) else []


@pytest.mark.parametrize("seed", range(EPISODES))
@pytest.mark.parametrize("mode", MODES)
def test_anything_at_any_time(mode: str, seed: int) -> None:
    Episode(mode, seed).run()


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="several ranks are refused")
@pytest.mark.parametrize("seed", range(EPISODES))
@pytest.mark.parametrize("mode", MODES)
def test_anything_at_any_time_on_either_of_two_ranks(mode: str, seed: int) -> None:
    Episode(mode, seed, apart=True).run()


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
@pytest.mark.parametrize("seed", range(EPISODES))
@pytest.mark.parametrize("mode", MODES)
def test_anything_at_any_time_with_drafts(mode: str, seed: int) -> None:
    Episode(mode, seed, drafts=1 + seed % 4).run()


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
@pytest.mark.parametrize("remove", [guards.with_drafts, guards.with_last_tokens])
def test_the_episodes_with_drafts_notice_a_missing_guard(
    remove: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LaminaError`: what was stored was never a text."""
    remove(monkeypatch)
    with pytest.raises((AssertionError, LaminaError)):
        _run_all("async", drafts=3)


@pytest.mark.parametrize(
    "remove",
    [
        guards.without_holds,
        guards.without_gates,
        guards.without_cap,
        guards.without_failures,
        guards.without_recomputing,
        guards.without_eviction,
        guards.with_steps_in_flight,
        guards.without_end_request,
        guards.without_pending_work,
    ],
)
def test_the_episodes_notice_a_missing_guard(
    remove: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are worth something: some episode fails."""
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        _run_all("async")


def _run_all(mode: str, drafts: int = 0) -> None:
    for seed in range(EPISODES):
        Episode(mode, seed, drafts=drafts).run()
