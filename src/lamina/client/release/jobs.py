"""Jobs that are worked on in order, and the median of what was measured of late.

Link and engine both work in order, one job after another, and are seen from outside: a job that is
begun at b and ends at e has been worked on since the later of b and the end of the job before. So
queueing never counts as work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

KEPT = 9
"""Samples of one quantity: five newer ones outvote the rest, and four wild ones do nothing."""
ENOUGH = 3
"""Samples without which nothing is known: the first step of an engine compiles, for example."""
MOST_JOBS = 64


class Recent:
    """The lower median of the latest samples: it follows a change, no outlier moves it far."""

    def __init__(self, enough: int = ENOUGH) -> None:
        self._enough = enough
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._value: float | None = None

    @property
    def value(self) -> float | None:
        """None before there are enough."""
        return self._value

    @property
    def largest(self) -> float:
        """Of the samples that are kept; 0 without any."""
        return max(self._samples, default=0.0)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        if len(self._samples) >= self._enough:
            self._value = sorted(self._samples)[(len(self._samples) - 1) // 2]


class _Job(NamedTuple):
    begun_s: float
    predicted_s: float


class JobQueue:
    """Jobs that are worked on in order, with predictions of how long each takes."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, _Job] = {}
        self._last_end_s = float("-inf")
        self._free_s = float("-inf")
        """When, as far as predicted, the jobs were over that have ended. Ends may be seen late."""

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, key: Hashable, now_s: float, predicted_s: float) -> None:
        self._jobs[key] = _Job(now_s, predicted_s)
        if len(self._jobs) > MOST_JOBS:  # the end of the first was never told: its server died
            del self._jobs[next(iter(self._jobs))]

    def end(self, key: Hashable, now_s: float, begun_s: float | None = None) -> float | None:
        """The job is over: how long it was worked on, after `begun_s` if that is better known.

        Unknown jobs are fine: None.
        """
        job = self._jobs.pop(key, None)
        if job is None:
            return None
        worked_s = now_s - max(job.begun_s if begun_s is None else begun_s, self._last_end_s)
        self._last_end_s = max(self._last_end_s, now_s)
        self._free_s = min(now_s, max(self._free_s, job.begun_s) + job.predicted_s)
        return worked_s

    def busy_s(self, now_s: float) -> float:
        """Until all jobs that were begun are over."""
        free_s = self._free_s
        least_s = now_s  # the first job is not over, however long it was predicted to take
        for job in self._jobs.values():
            free_s = max(max(free_s, job.begun_s) + job.predicted_s, least_s)
            least_s = free_s
        return max(0.0, free_s - now_s)

    @property
    def idle_since_s(self) -> float:
        """When the last job was seen to end; infinite while there is one."""
        return math.inf if self._jobs else self._last_end_s
