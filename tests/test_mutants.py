"""The mutations of `make mutants` are of today's code, and what runs them tells the truth."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.every import MUTATIONS
from tests.mutants.mutation import Mutation
from tests.mutants.runner import ROOT, Copy, StaleMutationError, Verdict, mutated

EVERY = [mutation for mutations in MUTATIONS.values() for mutation in mutations]
INVARIANTS = range(1, 14)

TOY = Mutation(
    "toy", 1, "the limit is passed", "toy.py", "LIMIT = 8", "LIMIT = 9", ("tests/test_toy.py",)
)


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name)
def test_a_mutation_is_of_the_code_as_it_is(mutation: Mutation) -> None:
    """Whoever changes a guard changes its mutation with it."""
    before = (ROOT / "src/lamina" / mutation.file).read_text()
    assert ast.dump(ast.parse(mutated(mutation))) != ast.dump(ast.parse(before))
    assert mutation.lost
    assert mutation.tests
    for test in mutation.tests:
        path, *names = test.split("::")
        assert all(f"def {name}(" in (ROOT / path).read_text() for name in names), test


def test_names_are_unlike_each_other_and_every_invariant_is_tried() -> None:
    names = Counter(mutation.name for mutation in EVERY)
    assert max(names.values()) == 1
    tried = Counter(mutation.invariant for mutation in EVERY)
    assert all(tried[invariant] >= 2 for invariant in INVARIANTS)


@pytest.mark.parametrize("text", ["LIMIT = 7\n", "LIMIT = 8\nOTHER_LIMIT = 8\n"])
def test_a_mutation_of_other_code_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "src/lamina").mkdir(parents=True)
    (tmp_path / "src/lamina/toy.py").write_text(text)
    with pytest.raises(StaleMutationError, match="toy: "):
        mutated(TOY, tmp_path)


@pytest.fixture
def toy(tmp_path: Path) -> Copy:
    """A copy of a tree with one guard."""
    root, directory = tmp_path / "root", tmp_path / "copy"
    for parent in (root / "src/lamina", root / "tests", directory):
        parent.mkdir(parents=True)
    (root / "src/lamina/__init__.py").touch()
    (root / "src/lamina/toy.py").write_text("LIMIT = 8\n")
    (root / "tests/test_toy.py").write_text(
        "from lamina.toy import LIMIT\n\ndef test_toy() -> None:\n    assert LIMIT == 8\n"
    )
    (root / "tests/test_nothing.py").write_text("def test_nothing() -> None:\n    pass\n")
    (root / "tests/test_wait.py").write_text(
        "import threading\n\ndef test_wait() -> None:\n    threading.Event().wait()\n"
    )
    return Copy(root, directory)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "caught"),
        ({"tests": ("tests/test_nothing.py",)}, "survived"),
        ({"tests": ("tests/test_nothing.py",), "equivalent": "as quick"}, "equivalent"),
        ({"equivalent": "as quick"}, "caught"),
        ({"tests": ("tests/test_gone.py",)}, "broken"),
        ({"new": "LIMIT = ("}, "broken"),
    ],
)
def test_a_verdict_is_what_the_tests_say(
    toy: Copy, change: dict[str, object], verdict: Verdict
) -> None:
    assert toy.run(TOY._replace(**change)).verdict == verdict  # type: ignore[arg-type]


def test_tests_that_do_not_end_are_ended(toy: Copy) -> None:
    waits = TOY._replace(tests=("tests/test_wait.py",))
    assert toy.run(waits, timeout_s=0.1).verdict == "timed out"


def test_one_mutation_leaves_nothing_to_the_next(toy: Copy) -> None:
    """Nor does its bytecode, though all edits are of one size and of one second."""
    for new in ("LIMIT = 9", "LIMIT = 8", "LIMIT = 7", "LIMIT = 8"):
        outcome = toy.run(TOY._replace(new=new))
        assert outcome.verdict == ("survived" if new == TOY.old else "caught"), outcome.told
    assert toy.test(TOY.tests).verdict == "survived"
