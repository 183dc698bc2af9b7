"""What is said too often is held back, and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from lamina.server.log_lines import message_of, record_of

SHOWN = 5
WINDOW_S = 10.0


class Repeats:
    """Of one logger, level and format string `SHOWN` lines are shown in `WINDOW_S`, counted from
    the first. Afterwards it is told how many were held back: "74 more like it: ", and the first.

    `clock` in seconds. Not thread-safe: the handler's lock guards it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, int, str], _Window] = {}

    def is_shown(self, record: logging.LogRecord) -> bool:
        """Whether to show this one. Ask `told` before."""
        key = (record.name, record.levelno, str(record.msg))
        window = self._windows.get(key)
        if window is None:
            until_s = self._clock() + WINDOW_S
            self._windows[key] = window = _Window(until_s, message_of(record))
        window.count += 1
        return window.count <= SHOWN

    def told(self, *, at_end: bool = False) -> list[logging.LogRecord]:
        """What is to be told of windows that are over, or of all of them."""
        now_s, told = self._clock(), []
        while self._windows:
            key, window = next(iter(self._windows.items()))  # the oldest
            if not at_end and window.until_s > now_s:
                break
            del self._windows[key]
            if (kept_back := window.count - SHOWN) > 0:
                told.append(record_of(*key[:2], "%d more like it: %s", kept_back, window.first))
        return told


@dataclass(slots=True)
class _Window:
    """Of one message: when it ends, what was said first, how often it has been said."""

    until_s: float
    first: str
    count: int = 0
