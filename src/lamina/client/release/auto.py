"""The policy `auto`: of all ways to retrieve a hit, the one that delays everybody least.

Candidates are a *synchronous* retrieve (the request runs in this step, each layer waits for its
slice) and one *outside* the step (the request waits outside the batch until the rest will arrive
just in time), each with the whole hit or with fewer chunks, whose tokens are then computed. For
each the policy predicts when the request's prompt is computed, and by how much others are delayed:

    own   max(computing ends, last slice lands + its layers are computed), then the chunks that
          did not fit the first step
    others  in a synchronous step: the wait for slices, for each request that is in it or could be;
          computing tokens that could have been retrieved: for everybody

and takes the smallest sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from lamina.client.release.base import Reason, Release, ReleaseQuery, Speed
from lamina.client.release.forecast import Candidate, Forecast, Why

SLICE_S = 100e-6
"""A slice shorter than this is widened: announcing and waiting for one costs about 5 us of GPU
time, and its copies begin later than those of one long call would (H200, 2026-11)."""
RELEASE_S = 2e-3
"""Until it is measured: from a slice's landing until an idle engine schedules the request. Two
turns of vLLM's loop, which sleeps 1 ms in each."""
DECODES_TO_RELEASE = 2
"""The same for a busy engine, in steps after the one that is put together: with asynchronous
scheduling a release is seen when a step is launched, counts when that step is over, and the next
one but one has then been launched."""
CAUTION = 1.1
"""Computing what could be retrieved is assumed to be this much slower than measured."""
LEAST_GAIN = 0.1
"""A shorter retrieve must be better by this share: on an H200 gains of 6 % that were predicted for
the last chunks did not come, since the rest of vLLM's work is in first-token time too. And it must
be no worse were computing as slow as the slowest step of late: a retrieve that is too short can
cost a hundred milliseconds."""
UNMEASURED_SHARE = 26 / 32
"""Before anything is measured a request that is not alone is released after this share of its
slices: best at 4 and 8 requests at once on an H200, by less than the noise."""


@dataclass(frozen=True)
class AutoPolicy:
    """See the module. Stateless: whatever was measured comes with the query."""

    def decide(self, query: ReleaseQuery) -> Release:
        speed = query.speed
        if speed is None or speed.compute_s_per_token is None:
            return _unmeasured(query)
        outlook = _Outlook(query, speed, speed.compute_s_per_token)
        forecast = _weigh(query, speed, outlook)
        chosen = forecast.chosen
        if not chosen.retrieve_tokens:
            return Release(query.layers, 0, 0, Reason.RECOMPUTED, forecast)
        width = _width(query.layers, chosen.link_s)
        return Release(
            width,
            -(-chosen.layers_before // width),
            chosen.retrieve_tokens,
            outlook.reason_of(chosen),
            forecast,
        )


def _weigh(query: ReleaseQuery, speed: Speed, outlook: _Outlook) -> Forecast:
    """The cheapest of all candidates; with less than the whole hit only for a real gain that does
    not hang on the pace of computing."""
    wholes, shorter_ones = outlook.wholes(), outlook.shorter_ones()
    whole, shorter = min(wholes, key=_cost), min(shorter_ones, key=_cost)
    chosen, why = whole, Why.LEAST
    if shorter.cost_s < whole.cost_s * (1 - LEAST_GAIN):
        slowest_s = max(speed.compute_s_per_token or 0.0, speed.slowest_compute_s_per_token)
        if _Outlook(query, speed, slowest_s).agrees(shorter):
            chosen = shorter
        else:
            why = Why.UNSURE
    elif shorter.cost_s < whole.cost_s:
        why = Why.NO_GAIN
    candidates = tuple(dict.fromkeys(wholes + shorter_ones))
    return Forecast(
        query.lane_busy_s, query.engine_busy_s, outlook.release_s, chosen, why, candidates
    )


class _Outlook:
    """What would become of a request and of the others."""

    def __init__(self, query: ReleaseQuery, speed: Speed, token_s: float) -> None:
        self._query = query
        self._copy_s = speed.copy_s_per_token
        self._token_s = token_s
        self._least_prefill_s = speed.least_prefill_s
        self._decode_s = speed.decode_s
        self.release_s = RELEASE_S if speed.release_s is None else speed.release_s
        batch = query.batch
        self._others_step_s = self._step_s(batch.prefill_tokens) if batch.running else 0.0
        self._others_end_s = query.engine_busy_s + self._others_step_s

    def wholes(self) -> list[Candidate]:
        """Each way with the whole hit."""
        return [way(0) for way in self._ways()]

    def shorter_ones(self) -> list[Candidate]:
        """Each way with the best number of fewer chunks, which may be all, and none at all."""
        chunks = -(-self._query.retrieve_tokens // self._query.chunk_tokens)
        return [_cheapest(way, chunks - 1) for way in self._ways()] + [self.synchronous(chunks)]

    def agrees(self, other: Candidate) -> bool:
        """Whether `other`, of another outlook, is no worse than the whole hit here too."""
        fewer = -(
            -(self._query.retrieve_tokens - other.retrieve_tokens) // self._query.chunk_tokens
        )
        again = self.outside(fewer) if other.layers_before else self.synchronous(fewer)
        return again.cost_s <= min(map(_cost, self.wholes()))

    def _ways(self) -> list[Callable[[int], Candidate]]:
        """A synchronous retrieve never overtakes those who are retrieving. Alone there is nobody to
        wait outside for."""
        query = self._query
        if query.batch.retrieving:
            return [self.outside]
        if query.batch.running or query.lane_busy_s:
            return [self.synchronous, self.outside]
        return [self.synchronous]

    def reason_of(self, chosen: Candidate) -> Reason:
        if chosen.layers_before:
            return Reason.OUTSIDE
        first_slices_s = 2 * chosen.link_s / self._query.layers
        if chosen.stall_s <= first_slices_s:  # the first one is always waited for
            return Reason.HIDDEN
        return Reason.CHEAPER if self._query.batch.running else Reason.ALONE

    def synchronous(self, fewer_chunks: int) -> Candidate:
        """The request runs in this step."""
        query, batch = self._query, self._query.batch
        retrieve, compute, extra_s = self._tokens(fewer_chunks)
        room = max(1, query.step_tokens - batch.prefill_tokens - batch.decoding)
        first = min(compute, room)
        step_s = self._step_s(batch.prefill_tokens + first)
        unstalled_s = query.engine_busy_s + step_s
        end_s = unstalled_s
        copy_s = retrieve * self._copy_s
        if retrieve:
            part = 1 / query.layers
            first_s = query.lane_busy_s + copy_s * part
            last_s = query.lane_busy_s + copy_s
            end_s = max(unstalled_s, first_s + step_s, last_s + step_s * part)
        stall_s = end_s - unstalled_s
        others_s = batch.prefilling * max(0.0, end_s - self._others_end_s)
        others_s += (batch.decoding + batch.retrieving) * stall_s + self._delay_s(extra_s)
        rest_s = (compute - first) * self._token_s
        return Candidate(
            retrieve, 0, copy_s, step_s + rest_s, stall_s, 0.0, end_s + rest_s, others_s
        )

    def outside(self, fewer_chunks: int) -> Candidate:
        """The request is released so late that its step need not wait."""
        query = self._query
        layers = query.layers
        retrieve, compute, extra_s = self._tokens(fewer_chunks)
        first = min(compute, query.step_tokens)
        step_s = self._step_s(first)
        delay_s = self.release_s
        if query.batch.running:
            delay_s += self._others_step_s + DECODES_TO_RELEASE * self._decode_s
        copy_s = retrieve * self._copy_s
        early_s = delay_s + step_s * (layers - 1) / layers
        free_s = self._others_end_s + query.batch.retrieving_tokens * self._token_s
        layer_s = copy_s / layers
        if layer_s:
            needed = math.ceil((copy_s - early_s) / layer_s)
            unhurried = math.floor((free_s - delay_s - query.lane_busy_s) / layer_s)
            before = max(1, min(layers, max(needed, unhurried)))
        else:
            before = layers
        ready_s = query.lane_busy_s + layer_s * before
        begins_s = max(ready_s + delay_s, free_s)
        landed_s = query.lane_busy_s + copy_s
        end_s = max(begins_s + step_s, landed_s + step_s / layers)
        rest_s = (compute - first) * self._token_s
        others_s = self._delay_s(extra_s)
        return Candidate(
            retrieve, before, copy_s, step_s + rest_s, 0.0, ready_s, end_s + rest_s, others_s
        )

    def _tokens(self, fewer_chunks: int) -> tuple[int, float, float]:
        """Tokens to retrieve and to compute, and the time that the latter take more than need
        be."""
        query = self._query
        retrieve = max(0, query.retrieve_tokens - fewer_chunks * query.chunk_tokens)
        extra = (query.retrieve_tokens - retrieve) * CAUTION
        return retrieve, query.compute_tokens + extra, extra * self._token_s

    def _delay_s(self, extra_s: float) -> float:
        """What computing `extra_s` longer costs the others: the GPU is theirs as well."""
        batch = self._query.batch
        return extra_s * (batch.running + batch.retrieving + batch.waiting)

    def _step_s(self, tokens: float) -> float:
        return max(self._least_prefill_s, tokens * self._token_s) if tokens else self._decode_s


def _cost(candidate: Candidate) -> float:
    return candidate.cost_s


def _cheapest(plan: Callable[[int], Candidate], most: int) -> Candidate:
    """The cheapest of `plan(0)` to `plan(most)`, the first of equals; costs are convex.

    Rarely do more than a few chunks pay, so the search begins there.
    """
    plan = functools.cache(plan)
    low, high = 0, 0
    while high < most and plan(high).cost_s > plan(high + 1).cost_s:
        low, high = high + 1, 2 * high + 1
    high = min(high, most)
    while low < high:
        middle = (low + high) // 2
        if plan(middle).cost_s <= plan(middle + 1).cost_s:
            high = middle
        else:
            low = middle + 1
    return plan(low)


def _width(layers: int, copy_s: float) -> int:
    """Layers a slice: one, or as many as make a slice worth announcing."""
    if copy_s <= 0:
        return layers
    return max(1, min(layers, math.ceil(SLICE_S * layers / copy_s)))


def _unmeasured(query: ReleaseQuery) -> Release:
    alone = not query.batch.running and not query.lane_busy_s
    copy_s = query.retrieve_tokens * query.speed.copy_s_per_token if query.speed else math.inf
    width = _width(query.layers, copy_s)
    after = 0 if alone else math.ceil(query.layers * UNMEASURED_SHARE / width)
    return Release(width, after, reason=Reason.UNMEASURED)
