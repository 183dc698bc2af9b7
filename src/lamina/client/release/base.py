"""What a release policy is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from lamina.client.release.forecast import Forecast


class Batch(NamedTuple):
    """Who else is there: what a request that is waited for in a step delays.

    `prefilling` requests compute `prefill_tokens` in the step that is being put together, and
    `decoding` ones a token each. `retrieving` requests wait for their own retrieves and compute
    `retrieving_tokens` then; `waiting` ones have not begun."""

    decoding: int = 0
    prefilling: int = 0
    prefill_tokens: int = 0
    retrieving: int = 0
    retrieving_tokens: int = 0
    waiting: int = 0

    @classmethod
    def of(
        cls, running: Iterable[int], retrieving: Iterable[int], waiting: int, step_tokens: int
    ) -> Batch:
        """Of the tokens that each running and each retrieving request has yet to compute; a step
        computes `step_tokens` at most."""
        prompts, decoding = [], 0
        for tokens in running:
            if tokens > 1:
                prompts.append(tokens)
            else:
                decoding += 1
        left = list(retrieving)
        prefill_tokens = min(step_tokens, sum(prompts))
        return cls(decoding, len(prompts), prefill_tokens, len(left), sum(left), waiting)

    @property
    def running(self) -> int:
        return self.decoding + self.prefilling


class Speed(NamedTuple):
    """What was measured, for a request of this length. Seconds.

    `copy_s_per_token` is for all layers of a token, from host memory to the engine's.
    `compute_s_per_token` is None until enough steps were measured; `slowest_compute_s_per_token` is
    the longest of the latest samples. A step with few tokens of
    prompts takes `least_prefill_s`, one without any `decode_s`. `release_s` passes from the landing
    of the slices before release until an idle engine schedules the request; None until measured.
    """

    copy_s_per_token: float
    compute_s_per_token: float | None = None
    least_prefill_s: float = 0.0
    decode_s: float = 0.0
    slowest_compute_s_per_token: float = 0.0
    release_s: float | None = None


class ReleaseQuery(NamedTuple):
    """What a policy may look at. A policy is a pure function of it.

    `retrieve_tokens` are what the server has beyond the engine's own hit, `compute_tokens` what is
    left to compute after them. A shorter retrieve ends `chunk_tokens` earlier, or a multiple of
    that. `step_tokens` bounds the tokens of a step. The lane is free in `lane_busy_s`; the step
    that is being put together begins in `engine_busy_s`."""

    layers: int
    retrieve_tokens: int
    compute_tokens: int
    chunk_tokens: int = 256
    step_tokens: int = 2048
    batch: Batch = Batch()
    speed: Speed | None = None
    lane_busy_s: float = 0.0
    engine_busy_s: float = 0.0


class Reason(Enum):
    """Why a policy answered as it did; the value is for log lines and metrics."""

    FIXED = "fixed"
    """The settings say so."""
    UNMEASURED = "unmeasured"
    """Nothing was measured yet."""
    HIDDEN = "hidden"
    """Computing takes longer than copying: the step does not wait."""
    ALONE = "alone"
    """The step waits, and there is nobody else in it."""
    CHEAPER = "cheaper"
    """The step waits, and that delays all together less than letting the request wait."""
    OUTSIDE = "outside"
    """The request waits outside the batch until the rest arrives in time."""
    RECOMPUTED = "recomputed"
    """Computing is sooner than retrieving."""


class Release(NamedTuple):
    """The answer. `release_after_slices` is 0 for a synchronous retrieve: the request runs in this
    very step, and every layer waits for its own slice. `retrieve_tokens` is None for all of them.

    `forecast` is what was expected; None where nothing is known.
    """

    layers_per_slice: int
    release_after_slices: int
    retrieve_tokens: int | None = None
    reason: Reason = Reason.FIXED
    forecast: Forecast | None = None

    def tokens_of(self, query: ReleaseQuery) -> int:
        """How many tokens to retrieve."""
        return query.retrieve_tokens if self.retrieve_tokens is None else self.retrieve_tokens


class ReleasePolicy(Protocol):
    def decide(self, query: ReleaseQuery) -> Release:
        """Called on the engine's thread, perhaps several times for one request: the last answer
        counts."""
