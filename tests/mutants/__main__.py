"""`python -m tests.mutants [NAME ...]`: runs mutations; 1 when one of them goes unnoticed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.every import MUTATIONS
from tests.mutants.mutation import Mutation
from tests.mutants.runner import (
    ROOT,
    TIMEOUT_S,
    UNNOTICED,
    Copy,
    Outcome,
    StaleMutationError,
    chosen,
    mutated,
)

_BASELINE_TIMEOUT_S = 900.0


def main() -> int:
    """The exit code."""
    options = _parsed()
    mutations = chosen(MUTATIONS[options.environment], options.names)
    try:
        for mutation in mutations:
            mutated(mutation)
    except StaleMutationError as error:
        print(error)
        return 1
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lamina-mutants-") as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(ROOT, Path(directory, str(number))))
        if not options.no_baseline and not _is_sound(copies, mutations):
            return 1

        def run(mutation: Mutation) -> Outcome:
            copy = copies.get()
            try:
                return copy.run(mutation, options.timeout)
            finally:
                copies.put(copy)

        unnoticed = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutation, outcome in zip(mutations, pool.map(run, mutations), strict=True):
                _show(mutation, outcome, options.verbose)
                unnoticed += outcome.verdict in UNNOTICED
    took_s = time.monotonic() - began_s
    print(f"{len(mutations)} mutations, {unnoticed} unnoticed, {took_s:.0f} s")
    return int(bool(unnoticed))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="run these only")
    parser.add_argument("--environment", choices=tuple(MUTATIONS), default="core")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds a mutation")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass")
    parser.add_argument("--verbose", action="store_true", help="show what pytest wrote")
    options = parser.parse_args()
    known = {mutation.name for mutation in MUTATIONS[options.environment]}
    if unknown := set(options.names) - known:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    return options


def _is_sound(copies: SimpleQueue[Copy], mutations: Sequence[Mutation]) -> bool:
    """Whether the tests pass without any mutation: else what fails with one proves nothing."""
    arguments = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    copy = copies.get()
    outcome = copy.test(arguments, _BASELINE_TIMEOUT_S)
    copies.put(copy)
    if outcome.verdict != "survived":
        print(f"{outcome.told}\nthe tests do not pass without any mutation: {outcome.verdict}")
        return False
    print(f"without any mutation all tests pass, in {outcome.took_s:.0f} s", flush=True)
    return True


def _show(mutation: Mutation, outcome: Outcome, is_verbose: bool) -> None:
    print(f"{outcome.verdict:<10} {outcome.took_s:6.1f} s  {mutation.name}", flush=True)
    if outcome.verdict == "survived":
        print(f"            {mutation.lost}")
    if outcome.verdict == "equivalent":
        print(f"            {mutation.equivalent}")
    if outcome.verdict == "broken" or is_verbose:
        print(outcome.told)


if __name__ == "__main__":
    sys.exit(main())
