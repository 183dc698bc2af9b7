"""Objects in processes of their own, whose methods a test calls, and which it stops and kills.

Processes are forked from one clean process that has everything imported already, so that starting
one takes a few hundredths of a second.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_S = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.engine", "tests.support.fault_server"])


def shared_number() -> Any:
    """A float that processes share, for example how far a clock is ahead."""
    return _context.Value("d", 0.0, lock=False)


def shared_event() -> Any:
    return _context.Event()


class Remote:
    """One process. `main(commands, *arguments)` runs there and answers with `serve_commands`."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = _context.Pipe()
        self.process = _context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        assert self.pid is not None

    def begin(self, path: str, *arguments: Any) -> None:
        """Call a method; `result` waits for what it returns."""
        self._ours.send((path, arguments))

    def result(self) -> Any:
        assert self._ours.poll(PATIENCE_S), f"process {self.pid} did not answer"
        is_fine, value = self._ours.recv()
        assert is_fine, value
        return value

    def call(self, path: str, *arguments: Any) -> Any:
        self.begin(path, *arguments)
        return self.result()

    def send(self, number: signal.Signals) -> None:
        """Signal it; a stopped process has stopped when this returns."""
        assert self.pid is not None
        os.kill(self.pid, number)
        if number is signal.SIGSTOP:
            while _state_of(self.pid) not in "TtZX":
                pass

    def kill(self) -> None:
        """SIGKILL; the process has ended when this returns."""
        self.process.kill()
        self.join()

    def join(self) -> int | None:
        """Wait for its end; returns its exit code."""
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive(), f"process {self.pid} did not end"
        return self.process.exitcode


def serve_commands(root: object, commands: Connection) -> None:
    """Run the commands of the test on `root` until it hangs up or `close` has been called."""
    path = ""
    while path != "close":
        try:
            path, arguments = commands.recv()
        except EOFError:
            return
        try:
            target: Any = root
            for name in path.split("."):
                target = getattr(target, name)
            answer = True, target(*arguments) if callable(target) else target
        except Exception:
            answer = False, traceback.format_exc()
        commands.send(answer)


def jump_wall_clock() -> None:
    """From now on, every reading of this process's wall clock is years before or after the last."""
    years = itertools.count()
    time.time = lambda: 1e9 + (-1) ** (year := next(years)) * (year % 40) * 3.15e7


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
