"""What CI runs, in parts, as many at a time as the machine has cores and memory for.

    python3 -m scripts.ci                everything
    python3 -m scripts.ci lint core      these parts, and what they need; `core` is core-3.10 too
    python3 -m scripts.ci --list         which parts there are

A part is a make target; PYTHON, SHARE and ARGS of the environment do not reach it, and each Python
has an environment of its own. What it says goes to `.ci/logs/PART.log` and is printed when it ends;
of a part that failed, at the very end. The exit code is 1 when a part has failed. Parts that grow
are split: `SHARE=1/2` and `SHARE=2/2` of a test target take every other test file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scripts import pythons

MEMORY_OF_A_PART = 8 << 30
"""Bytes. The largest, a half of vLLM's tests, took 2.5 GiB at its peak (PSS of its processes)."""
LIMIT_S = 1200.0
"""A part that takes longer hangs: it is killed, and has failed."""
LOGS = Path(".ci/logs")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_NOT_PASSED_ON = ("MAKEFLAGS", "MFLAGS", "PYTEST_ADDOPTS", "PYTHONPATH")
"""Of the environment: with them a target may do less than it says, go on after a failure, or test
what is not this tree."""


@dataclass(frozen=True)
class Part:
    """One command, begun once the parts in `after` have passed."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()


def make(name: str, target: str, version: str, share: str = "", after: Sequence[str] = ()) -> Part:
    """A part that is a make target, on the Python of that version.

    All variables are given, since a command line beats the environment; the version also where it
    is that of `python3`: `.venv` may have been made by an earlier `python3`.
    """
    given = (f"PYTHON=python{version}", f"SHARE={share}", "ARGS=")
    return Part(name, ("make", "--no-print-directory", target, *given), tuple(after))


def all_parts() -> list[Part]:
    """Those of this machine, in the order in which they begin: first what others wait for, then
    what takes long."""
    main = pythons.main_version()
    others = [version for version in pythons.VERSIONS if version != main]
    return [
        make("install-vllm", "install-vllm", main),
        make("install", "install", main),
        make("lint", "lint", main, after=["install"]),
        make("core", "test", main, after=["install"]),
        make("vllm-1", "test-vllm", main, "1/2", after=["install-vllm"]),
        make("vllm-2", "test-vllm", main, "2/2", after=["install-vllm"]),
        make("ranks-vllm", "test-vllm-ranks", main, after=["install-vllm"]),
        *(make(f"core-{version}", "test", version) for version in others),
        make("mutants", "mutants", main, after=["install"]),
        make("faults", "test-faults", main, after=["install"]),
        make("release", "test-release", main, after=["install"]),
        make("docs", "test-docs", main, after=["install"]),
    ]


@dataclass(frozen=True)
class Result:
    """How a part ended; `output` is all that it said, `why` is empty when it passed."""

    part: Part
    why: str
    seconds: float
    output: str

    @property
    def line(self) -> str:
        return f"{self.part.name:<14} {self.why or 'passed':<30} {self.seconds:6.0f} s"


class Run:
    """One run of `parts`, `jobs` at a time. Their logs go to `logs`; `say` gets what is told."""

    def __init__(
        self,
        parts: Sequence[Part],
        jobs: int,
        logs: Path = LOGS,
        limit_s: float = LIMIT_S,
        say: Callable[[str], None] = print,
    ) -> None:
        self._waiting = list(parts)
        self._jobs = jobs
        self._logs = logs
        self._limit_s = limit_s
        self._say = say
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: queue.SimpleQueue[Result | signal.Signals] = queue.SimpleQueue()
        self._results: dict[str, Result] = {}

    def run(self) -> bool:
        """Whether all parts have passed. Ends what it has begun, however it ends itself. On the
        main thread."""
        self._logs.mkdir(parents=True, exist_ok=True)
        begun_s = time.monotonic()
        # Noted only: an exception from a signal could come between a process and the note of it.
        former = {number: signal.signal(number, self._interrupt) for number in _INTERRUPTS}
        try:
            while self._waiting or self._running:
                self._begin_some()
                if self._running:
                    ended = self._ended.get()
                    if isinstance(ended, signal.Signals):
                        sys.exit(128 + ended)
                    self._note(ended)
        finally:
            for process in self._running.values():
                _kill(process)
            for number, handler in former.items():
                signal.signal(number, handler)
        results = self._results.values()
        for result in (failed := [result for result in results if result.why]):
            self._say(f"\n==== {result.part.name}: {result.why}\n{result.output}")
        self._say("\n" + "\n".join(result.line for result in results))
        self._say(f"all of it: {time.monotonic() - begun_s:.0f} s, {self._jobs} parts at a time")
        if failed:
            self._say(f"FAILED: {', '.join(result.part.name for result in failed)}")
        return not failed

    def _interrupt(self, number: int, _: object) -> None:
        self._ended.put(signal.Signals(number))

    def _begin_some(self) -> None:
        for part in list(self._waiting):
            needed = [self._results[name] for name in part.after if name in self._results]
            if lost := [result.part.name for result in needed if result.why]:
                self._waiting.remove(part)
                self._note(Result(part, f"not run: {lost[0]} failed", 0.0, ""))
            elif len(needed) == len(part.after) and len(self._running) < self._jobs:
                self._waiting.remove(part)
                self._begin(part)

    def _begin(self, part: Part) -> None:
        self._say(f"---- {part.name}: {' '.join(part.command)}")
        with (self._logs / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                part.command,
                env={k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be killed with all its children
            )
        self._running[part.name] = process
        threading.Thread(target=self._wait, args=(part, process), daemon=True).start()

    def _wait(self, part: Part, process: subprocess.Popen[bytes]) -> None:
        begun_s, why = time.monotonic(), ""
        try:
            if code := process.wait(self._limit_s):
                why = f"failed with {code}"
        except subprocess.TimeoutExpired:
            _kill(process)
            why = f"killed: it took {self._limit_s:.0f} s"
        output = (self._logs / f"{part.name}.log").read_text(errors="replace")
        self._ended.put(Result(part, why, time.monotonic() - begun_s, output))

    def _note(self, result: Result) -> None:
        self._running.pop(result.part.name, None)
        self._results[result.part.name] = result
        said = "its output comes last" if result.why else result.output.rstrip()
        self._say(f"\n==== {result.line}\n{said}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(parts: Sequence[Part], names: Iterable[str]) -> list[Part]:
    """The parts that are meant by `names` and those that they need; raises `ValueError`."""
    wanted: set[str] = set()
    for name in names:
        meant = {p.name for p in parts if p.name == name or p.name.startswith(f"{name}-")}
        if not meant:
            raise ValueError(f"there is no part {name!r}; see --list")
        wanted |= meant
    needed = {name for part in parts if part.name in wanted for name in part.after}
    return [part for part in parts if part.name in wanted | needed]


def default_jobs() -> int:
    """As many as there are cores, and room for in memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // MEMORY_OF_A_PART))


def main() -> NoReturn:
    arguments = argparse.ArgumentParser(description="Run what CI runs, in parts.")
    arguments.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    arguments.add_argument("--jobs", type=int, default=default_jobs(), help="parts at a time")
    arguments.add_argument("--list", action="store_true", help="print the parts and their commands")
    given = arguments.parse_args()
    parts = all_parts()
    try:
        parts = chosen(parts, given.parts) if given.parts else parts
    except ValueError as error:
        arguments.error(str(error))
    if given.list:
        for part in parts:
            print(f"{part.name:<14} {' '.join(part.command)}")
        sys.exit()
    sys.exit(not Run(parts, max(1, given.jobs)).run())


if __name__ == "__main__":
    main()
