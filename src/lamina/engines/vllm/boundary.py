"""What a fault of our own may do to vLLM: an exception that leaves the connector ends its engine.

Where going on without the cache is safe, the fault is logged once with its traceback, counted, and
no hit is offered any more. Where it is not, the exception goes on and the engine ends: a step whose
gates are not armed, or blocks that vLLM may hand out while a transfer has them, could become wrong
tokens, and no answer is better than a wrong one.

    a lookup fails              no hit, for nobody from then on
    a request is tracked        what it shares with retrieves in flight is still gated and held
    nothing is held             nothing can be read or written wrongly: every call may be left out
    anything else               the exception goes on; so it does where vLLM was promised a hit
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from lamina.engines.vllm.scheduler import SchedulerSide

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Boundary:
    """Calls the scheduler's side. `is_broken` once a fault was survived."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self.is_broken = False

    @property
    def is_bypassed(self) -> bool:
        """Whether the side has failed and holds nothing: it is not called any more."""
        return self.is_broken and not self._side.has_pending_work

    def ask(self, request: Any, call: Callable[[], _T], without: _T) -> _T:
        """A lookup for a request: `without` when it fails, or when no hit is offered any more."""
        if self.is_bypassed:
            return without
        try:
            answer = call()
        except Exception:
            if self._side.has_pending_work and not self._side.is_tracked(request.request_id):
                raise  # it might read blocks of a retrieve in flight, and no gate would know
            self._survive()
            return without
        return without if self.is_broken else answer

    def step(self, call: Callable[[], _T], without: _T) -> _T:
        """A call that keeps blocks and gates right: `without` only when nothing is held."""
        if self.is_bypassed:
            return without
        held = self._side.has_pending_work
        try:
            return call()
        except Exception:
            if held or self._side.has_pending_work:
                raise
            self._survive()
            return without

    def end(self, call: Callable[[], object]) -> None:
        """A call that only gives things back: what is left stays held, and is read by nobody."""
        try:
            if not self.is_bypassed:
                call()
        except Exception:
            self._survive()

    def _survive(self) -> None:
        if not self.is_broken:
            log.exception("Lamina failed; this engine goes on without its cache until it restarts")
        self.is_broken = True
        self._side.counts.faults += 1
