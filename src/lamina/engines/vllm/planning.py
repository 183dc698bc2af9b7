"""How hits are retrieved: what the scheduler's side measures, and what it asks the release
policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from lamina.client import Batch, Meters, Reason, Release, ReleaseQuery
from lamina.engines.vllm.messages import LandedRetrieve
from lamina.engines.vllm.retrieves import Retrieves
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import Offer, Tracked

log = logging.getLogger(__name__)


class _Expectation(NamedTuple):
    """A first token that was predicted."""

    tracked: Tracked
    decided_s: float
    predicted_s: float | None
    reason: Reason


class Planner:
    """Asks the policy of each hit, and compares what comes with what was predicted.

    Steps are told apart by number, since vLLM may not report on each. `clock` in seconds, the same
    for the worker's side.
    """

    def __init__(
        self,
        chunk_tokens: int,
        step_tokens: int,
        counts: SchedulerCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self._counts = counts
        self._clock = clock
        self._meters = Meters(1, 1, chunk_tokens, step_tokens)
        self._expected: dict[str, _Expectation] = {}

    def set_model(self, layers: int, token_bytes: int) -> None:
        """What the worker's side found out; before this nothing is retrieved."""
        self._meters = Meters(layers, token_bytes, self._chunk_tokens, self._step_tokens)

    def decide(
        self, asked: Tracked, start_tokens: int, hit_tokens: int, others: Batch
    ) -> tuple[ReleaseQuery, Release]:
        """Ask the request's policy how to retrieve `hit_tokens` beyond `start_tokens`."""
        left = asked.request.num_tokens - start_tokens - hit_tokens
        query = self._meters.query(self._clock(), start_tokens, hit_tokens, left, others)
        return query, asked.settings.policy.decide(query)

    def batch(self, asked: Tracked, tracked: Mapping[str, Tracked], retrieves: Retrieves) -> Batch:
        """Who else is there when vLLM asks about a request in the middle of a scheduling pass."""
        decoding = prefilling = prefill_tokens = retrieving = retrieving_tokens = waiting = 0
        for other in tracked.values():
            request = other.request
            left = request.num_tokens - request.num_computed_tokens
            if other is asked:
                continue
            if request.status is RequestStatus.RUNNING:
                if left > 1:
                    prefilling += 1
                    prefill_tokens += left
                else:
                    decoding += 1
            elif request.num_computed_tokens:  # it is retrieving, or was released and not run yet
                retrieving += 1
                retrieving_tokens += left
            else:
                waiting += 1
        now_s = self._clock()
        gated = [
            self._meters.copies.queue.busy_s(now_s, number)
            for number, retrieve in retrieves.open.items()
            if retrieve.is_gate and not retrieve.over
        ]
        return Batch(
            decoding,
            prefilling,
            min(prefill_tokens, self._step_tokens),
            max(gated, default=0.0),
            retrieving,
            retrieving_tokens,
            waiting,
        )

    def committed(self, tracked: Tracked, offer: Offer, retrieve: int | None) -> None:
        """vLLM took the offer: as the retrieve with this number, or none to compute all."""
        now_s = self._clock()
        release, counts = offer.release, self._counts
        if retrieve is not None:
            self._meters.copies.begin(retrieve, offer.tokens, now_s)
        else:
            self._meters.copies.skipped()
        counts.count_decision(release.reason)
        counts.hit_tokens_computed += offer.hit_tokens - offer.tokens
        if release.ready_s is not None and release.release_after_slices:
            counts.expected_release_s += release.ready_s
        if not tracked.request.num_output_tokens:
            self._expected[tracked.name] = _Expectation(
                tracked, now_s, release.first_token_s, release.reason
            )
        log.debug(
            "%s: %s: retrieves %d of %d tokens, %d layers a slice, released after %d slices; "
            "first token expected in %s",
            tracked.name,
            release.reason.value,
            offer.tokens,
            offer.hit_tokens,
            release.layers_per_slice,
            release.release_after_slices,
            _ms(release.first_token_s),
        )

    def step_built(self, number: int, output: Any, waits: bool) -> None:
        """A step was scheduled; it `waits` for slices."""
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        tokens = weighted = 0
        if output.total_num_scheduled_tokens > len(scheduled):  # there is a prompt in it
            cached = output.scheduled_cached_reqs
            computed = [
                (data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs
            ]
            computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            for name, before in computed:
                if (count := scheduled[name]) > 1:
                    tokens += count
                    weighted += count * before
        context = weighted // tokens if tokens else 0
        self._meters.steps.begin(number, self._clock(), tokens, context, waits)

    def step_over(self, number: int) -> None:
        """The step's output is being taken: it is over."""
        now_s = self._clock()
        self._meters.steps.end(number, now_s)
        for name, expected in list(self._expected.items()):
            if expected.tracked.request.num_output_tokens:
                self._note_first_token(expected, now_s)
                del self._expected[name]

    def landed(self, retrieves: list[LandedRetrieve]) -> None:
        """What the server says about retrieves that have landed."""
        for retrieve in retrieves:
            self._meters.copies.end(
                retrieve.number, retrieve.end_s, retrieve.nbytes, retrieve.begun_s
            )

    def retrieve_failed(self, retrieve: int) -> None:
        """It is over, for the link."""
        self._meters.copies.end(retrieve, self._clock())

    def forget(self, request: str) -> None:
        """The request is over."""
        self._expected.pop(request, None)

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
