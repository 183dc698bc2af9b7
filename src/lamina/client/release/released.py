"""How long a release takes: from what has landed until the request is scheduled."""

from __future__ import annotations

import math
from typing import NamedTuple

from lamina.client.release.jobs import MOST_JOBS, Recent


class _Awaited(NamedTuple):
    """`after` is the share of its slices that land after its release."""

    after: float
    scheduled_s: float | None = None
    idle_since_s: float = math.inf
    release_landed_s: float | None = None


class ReleaseMeter:
    """How long it takes from the landing of the slices before release until the request is
    scheduled, of an engine that has nothing else to do meanwhile.

    The server tells only of a retrieve's end, so a slice's landing is reckoned back from that.
    """

    def __init__(self) -> None:
        self._taken = Recent()
        self._awaited: dict[int, _Awaited] = {}

    @property
    def release_s(self) -> float | None:
        """None before enough were measured."""
        return self._taken.value

    def begin(self, retrieve: int, release_share: float) -> None:
        """A retrieve outside the step; its request is released after that share of its slices."""
        self._awaited[retrieve] = _Awaited(1 - release_share)
        if len(self._awaited) > MOST_JOBS:  # some requests end before they are scheduled
            del self._awaited[next(iter(self._awaited))]

    def scheduled(self, retrieve: int, now_s: float, idle_since_s: float) -> None:
        """Its request is scheduled; only the first time counts. The engine had nothing to do since
        `idle_since_s`."""
        awaited = self._awaited.get(retrieve)
        if awaited is not None and awaited.scheduled_s is None:
            self._note(retrieve, awaited._replace(scheduled_s=now_s, idle_since_s=idle_since_s))

    def landed(self, retrieve: int, end_s: float, copied_s: float) -> None:
        """All of it has landed, copied in `copied_s`."""
        if (awaited := self._awaited.get(retrieve)) is not None:
            release_landed_s = end_s - awaited.after * copied_s
            self._note(retrieve, awaited._replace(release_landed_s=release_landed_s))

    def _note(self, retrieve: int, awaited: _Awaited) -> None:
        self._awaited[retrieve] = awaited
        if awaited.scheduled_s is None or awaited.release_landed_s is None:
            return
        del self._awaited[retrieve]
        if awaited.idle_since_s <= awaited.release_landed_s <= awaited.scheduled_s:
            self._taken.add(awaited.scheduled_s - awaited.release_landed_s)
