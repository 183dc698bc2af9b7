"""Runs mutations, each on a private copy of the tree, and says which of them were noticed.

caught      a test failed
timed out   the tests did not end in time: as good as caught, where a wait lost its owner
survived    all tests passed: a test is missing
equivalent  likewise, and the mutation says why nothing that can be observed changes
broken      the tests could not be run: the mutation proves nothing
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutants.mutation import Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
_COPIED = ("src", "tests", "benchmarks", "docs", "README.md", "pyproject.toml")
_PASSED, _FAILED = 0, 1  # pytest's exit codes; any other says that it did not come to test

Verdict = Literal["caught", "timed out", "survived", "equivalent", "broken"]
UNNOTICED: tuple[Verdict, ...] = ("survived", "broken")


class StaleMutationError(Exception):
    """The text that a mutation replaces is not in the code exactly once."""


class Outcome(NamedTuple):
    """What became of a mutation. `told` is the end of what pytest wrote."""

    verdict: Verdict
    took_s: float
    told: str


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The text of the mutation's file with the mutation in it. Raises `StaleMutationError`."""
    text = (root / "src/lamina" / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise StaleMutationError(
            f"{mutation.name}: the text that it replaces occurs {count} times in {mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


class Copy:
    """A copy of the tree at `root` in `directory`, with one mutation at a time. One thread."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._directory = directory
        for name in _COPIED:
            source, target = root / name, directory / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, target)
        self._edits = 0

    def run(self, mutation: Mutation, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Run the mutation's tests with it. Raises `StaleMutationError`."""
        target = self._directory / "src/lamina" / mutation.file
        before = target.read_text()
        self._write(target, mutated(mutation, self._directory))
        try:
            outcome = self.test(mutation.tests, timeout_s)
        finally:
            self._write(target, before)
        if mutation.equivalent and outcome.verdict == "survived":
            return outcome._replace(verdict="equivalent")
        return outcome

    def test(self, arguments: Iterable[str], timeout_s: float = TIMEOUT_S) -> Outcome:
        """Run pytest on the copy as it is."""
        paths = [str(self._directory / "src"), str(self._directory)]
        began_s = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self._directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that what the tests have started ends with them
        ) as process:
            try:
                told, _ = process.communicate(timeout=timeout_s)
                verdict = _verdict(process.returncode)
            except subprocess.TimeoutExpired:
                told, verdict = "", "timed out"
            finally:
                with contextlib.suppress(ProcessLookupError):  # all of it has ended
                    os.killpg(process.pid, signal.SIGKILL)
        return Outcome(verdict, time.monotonic() - began_s, told[-3000:])

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Bytecode is told from an edit's by the seconds of a file's time, and by its size.
        self._edits += 1
        os.utime(path, (self._edits, self._edits))


def chosen(mutations: Sequence[Mutation], names: Sequence[str]) -> list[Mutation]:
    """Those of these names, all without any. Raises `KeyError` for a name that there is not."""
    known = {mutation.name: mutation for mutation in mutations}
    return [known[name] for name in names] if names else list(mutations)


def _verdict(code: int) -> Verdict:
    if code == _PASSED:
        return "survived"
    return "caught" if code == _FAILED else "broken"
