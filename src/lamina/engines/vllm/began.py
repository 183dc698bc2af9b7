"""When the engines of this process began: before vLLM opened the first file of their models.

Files that were written since may hold other weights than an engine has loaded. vLLM makes a
connector only after it has loaded the model, but it looks our class up when it makes an engine's
configuration; nothing else of ours runs before the files are opened.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from lamina.content import wall_clock_ns

_SOONER_IS_NO_CONFIGURATION_NS = 20_000_000
"""Between an engine's configuration and its connector lies the loading of a model. A look-up that
comes right before a connector is made was for that."""


class Beginnings:
    """One for a process. Called on the thread that makes engines, one after the other."""

    def __init__(self) -> None:
        self._first_look_ns: int | None = None
        self._worker_made_ns: int | None = None
        self._last_made_ns: int | None = None

    def looked_up(self) -> None:
        """vLLM looks the connector's class up."""
        self._first_look_ns = self._first_look_ns or wall_clock_ns()

    def worker_made(self) -> None:
        """A worker's side is made."""
        self._worker_made_ns = wall_clock_ns()

    def take(self) -> int:
        """A time before the engine whose scheduler's side is being made began to load, in
        nanoseconds of the wall clock."""
        now_ns = wall_clock_ns()
        look_ns, made_ns = self._first_look_ns, self._worker_made_ns or now_ns
        last_ns = self._last_made_ns
        self._first_look_ns, self._worker_made_ns, self._last_made_ns = None, None, now_ns
        if multiprocessing.parent_process() is not None:
            return process_start_ns()  # an engine's own process
        if look_ns is not None and look_ns + _SOONER_IS_NO_CONFIGURATION_NS < made_ns:
            return look_ns
        return last_ns if last_ns is not None else process_start_ns()


def process_start_ns() -> int:
    """When this process began, by the wall clock (proc(5): field 22 of stat, ticks since boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return wall_clock_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + started_ns


beginnings = Beginnings()
