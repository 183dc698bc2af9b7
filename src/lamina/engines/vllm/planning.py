"""What the scheduler's side measures for the release policy, and how its predictions came out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from lamina.client import Batch, Meters, Offer, Prefixes, Reason
from lamina.engines.vllm.messages import Account
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import Tracked

log = logging.getLogger(__name__)


class _Expectation(NamedTuple):
    """A first token that was predicted."""

    tracked: Tracked
    decided_s: float
    predicted_s: float | None
    reason: Reason


def prompt_tokens(output: Any) -> dict[str, int]:
    """How many tokens of prompts the step of `output` computes, by request: no drafts, nor the one
    token of those that decode. In most steps there are none."""
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    drafted = sum(map(len, drafts.values()))
    if output.total_num_scheduled_tokens - drafted <= len(scheduled):
        return {}
    counts = ((name, count - len(drafts.get(name, ()))) for name, count in scheduled.items())
    return {name: count for name, count in counts if count > 1}


class Planner:
    """Weighs each hit, and compares what comes with what was predicted.

    Steps are told apart by number, since vLLM may not report on each. The clock of `prefixes` is
    the same as the worker's side's.
    """

    def __init__(self, prefixes: Prefixes, counts: SchedulerCounts, ranks: int) -> None:
        self._ranks = ranks
        self._prefixes = prefixes
        self._counts = counts
        self._expected: dict[str, _Expectation] = {}
        self._outside: dict[str, int] = {}
        """Retrieves of requests that wait outside the batch, by request."""
        self._landed: dict[int, list[Account]] = {}
        """Retrieves that have landed on some ranks."""

    def batch(self, asked: Tracked, tracked: Mapping[str, Tracked]) -> Batch:
        """Who else is there when vLLM asks about a request in the middle of a scheduling pass."""
        running: list[int] = []
        retrieving: list[int] = []
        waiting = 0
        for other in tracked.values():
            if other is asked:
                continue
            request = other.request
            left = request.num_tokens - request.num_computed_tokens
            if request.status is RequestStatus.RUNNING:
                running.append(left)
            elif request.num_computed_tokens:  # retrieving, or released and not run yet
                retrieving.append(left)
            else:
                waiting += 1
        return Batch.of(running, retrieving, waiting, self._prefixes.step_tokens)

    def committed(self, tracked: Tracked, offer: Offer, retrieve: int | None) -> None:
        """vLLM took the offer: as the retrieve with this number, or none to compute all."""
        now_s = self._prefixes.clock()
        release, counts = offer.release, self._counts
        if retrieve is not None:
            self._meters.copies.begin(retrieve, offer.tokens, now_s)
            if after := release.release_after_slices:
                share = min(1.0, after * release.layers_per_slice / self._meters.layers)
                self._meters.releases.begin(retrieve, share)
                self._outside[tracked.name] = retrieve
        else:
            self._meters.copies.skipped()
        counts.count_decision(release.reason)
        counts.hit_tokens_computed += offer.hit_tokens - offer.tokens
        expected = release.forecast.chosen if release.forecast is not None else None
        if expected is not None and release.release_after_slices:
            counts.expected_release_s += expected.ready_after_s
        if not tracked.request.num_output_tokens:
            expected_s = expected.first_token_after_s if expected is not None else None
            self._expected[tracked.name] = _Expectation(tracked, now_s, expected_s, release.reason)
        log.debug(  # the forecast is put into words only where that is written
            "%s: %s: retrieves %d of %d tokens, %d layers a slice, released after %d slices; "
            "forecast: %s",
            tracked.name,
            release.reason.value,
            offer.tokens,
            offer.hit_tokens,
            release.layers_per_slice,
            release.release_after_slices,
            release.forecast,
        )

    def step_built(self, number: int, output: Any, prompts: Mapping[str, int], waits: bool) -> None:
        """A step was scheduled, with `prompt_tokens`; it `waits` for slices."""
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        tokens = weighted = 0
        if prompts:
            cached = output.scheduled_cached_reqs
            computed = [
                (data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs
            ]
            computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            for name, before in computed:
                count = prompts.get(name, 0)
                tokens += count
                weighted += count * before
        context = weighted // tokens if tokens else 0
        now_s, meters = self._prefixes.clock(), self._meters
        for name in [name for name in self._outside if name in scheduled]:
            meters.releases.scheduled(
                self._outside.pop(name), now_s, meters.steps.queue.idle_since_s
            )
        meters.steps.begin(number, now_s, tokens, context, waits)

    def step_over(self, number: int) -> None:
        """The step's output is being taken: it is over."""
        now_s = self._prefixes.clock()
        self._meters.steps.end(number, now_s)
        for name, expected in list(self._expected.items()):
            if expected.tracked.request.num_output_tokens:
                self._note_first_token(expected, now_s)
                del self._expected[name]

    def landed(self, accounts: list[Account]) -> None:
        """What the server says about retrieves that have landed. Of several ranks the last one
        counts: no request runs before."""
        for account in accounts:
            number = account.number
            told = self._landed.setdefault(number, [])
            told.append(account)
            if len(told) < self._ranks:
                continue
            del self._landed[number]
            last = max(told, key=lambda each: each.end_s)
            copied_s = self._meters.copies.end(number, last.end_s, last.nbytes, last.begun_s)
            if copied_s is not None:
                self._meters.releases.landed(number, last.end_s, copied_s)

    def retrieve_failed(self, retrieve: int) -> None:
        """It is over, for the link."""
        self._landed.pop(retrieve, None)
        self._meters.copies.end(retrieve, self._prefixes.clock())

    def forget(self, request: str) -> None:
        """The request is over."""
        self._expected.pop(request, None)
        self._outside.pop(request, None)

    @property
    def _meters(self) -> Meters:
        return self._prefixes.meters

    def _note_first_token(self, expected: _Expectation, now_s: float) -> None:
        took_s = now_s - expected.decided_s
        log.debug(
            "%s: %s: first token after %s, expected after %s",
            expected.tracked.name,
            expected.reason.value,
            _ms(took_s),
            _ms(expected.predicted_s),
        )
        if expected.predicted_s is not None:
            self._counts.expected_first_token_s += expected.predicted_s
            self._counts.first_token_s += took_s
            self._counts.first_tokens += 1


def _ms(seconds: float | None) -> str:
    return "unknown time" if seconds is None else f"{seconds * 1e3:.1f} ms"
