"""What CI runs: parts beside each other, each with its output, its time and its say in the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import pythons
from scripts.ci import Part, Run, all_parts, chosen
from tests.conftest import pytest_collection_modifyitems
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
LATE_S = 30.0


class Ci:
    """Runs parts; `said` is all that it has said."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.said = ""

    def run(self, *parts: Part, jobs: int = 2, limit_s: float = LATE_S) -> bool:
        return Run(parts, jobs, self._logs, limit_s, self._say).run()

    def _say(self, text: str) -> None:
        self.said += text + "\n"


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    return Ci(tmp_path / "logs")


def shell(name: str, script: str, *after: str) -> Part:
    return Part(name, ("sh", "-c", script), after)


def test_all_pass(ci: Ci) -> None:
    assert ci.run(shell("one", "echo first"), shell("two", "echo second >&2"))
    assert "first" in ci.said
    assert "second" in ci.said
    assert "FAILED" not in ci.said


def test_what_failed_comes_last_and_fails_the_whole(ci: Ci) -> None:
    bad, good = "echo ${0}reason; exit 3", "echo ${0}fine"
    assert not ci.run(shell("bad", bad), shell("good", good), jobs=1)
    assert ci.said.index("shfine") < ci.said.index("shreason"), "where it is not overlooked"
    assert ci.said.count("shreason") == 1
    assert "failed with 3" in ci.said
    assert ci.said.endswith("FAILED: bad\n")


def test_a_part_begins_once_those_that_it_needs_have_passed(ci: Ci, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert ci.run(shell("late", f"test -e {mark}", "early"), shell("early", f"touch {mark}"))


def test_what_needs_a_part_that_failed_is_not_run_and_has_failed(ci: Ci, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert not ci.run(shell("late", f"touch {mark}", "early"), shell("early", "exit 1"))
    assert not mark.exists()
    assert "not run: early failed" in ci.said
    assert ci.said.endswith("FAILED: early, late\n")


def test_as_many_at_a_time_as_it_is_told(ci: Ci, tmp_path: Path) -> None:
    """Each of two waits for the other; a third finds that one of them has gone."""
    a, b = tmp_path / "a", tmp_path / "b"
    meet = "until test -e {}; do :; done; rm {}"
    assert ci.run(
        shell("a", f"touch {a}; {meet.format(b, b)}"), shell("b", f"touch {b}; {meet.format(a, a)}")
    )
    alone = f"mkdir {a} && rmdir {a}"
    assert ci.run(*(shell(f"alone-{n}", alone) for n in range(8)), jobs=1)


def test_a_part_that_hangs_is_killed_with_its_children(ci: Ci, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo said before; sleep 600 & echo $! > {pid}; wait"
    assert not ci.run(shell("hangs", script), limit_s=0.3)
    assert "killed: it took 0 s" in ci.said
    assert "said before" in ci.said
    eventually(lambda: not is_running(int(pid.read_text())))


def test_who_interrupts_it_leaves_no_part_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 600"
    run = (
        "from pathlib import Path\n"
        "from scripts.ci import Part, Run\n"
        f"Run([Part('hangs', ('sh', '-c', {script!r}))], 1, Path({str(tmp_path)!r})).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", run], cwd=ROOT, stdout=subprocess.DEVNULL)
    eventually(pid.exists)
    process.terminate()
    assert process.wait(LATE_S) == 143
    assert not is_running(int(pid.read_text()))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may have asked how it ended


def test_parts_are_chosen_by_name_with_what_they_need() -> None:
    parts = [Part("env", ()), Part("core", (), ("env",)), Part("core-3.10", ()), Part("lint", ())]
    names = [part.name for part in chosen(parts, ["core"])]
    assert names == ["env", "core", "core-3.10"]
    with pytest.raises(ValueError, match="no part 'cor'"):
        chosen(parts, ["cor"])


def test_every_part_is_a_target_and_every_version_is_run() -> None:
    parts = {part.name: part for part in all_parts()}
    assert len(parts) == len(all_parts()), "two parts of one name"
    makefile = (ROOT / "Makefile").read_text()
    for part in parts.values():
        target = part.command[2]
        assert f"\n{target}:" in makefile, part
        assert set(part.after) <= parts.keys()
    run = [part.command[3] for part in parts.values() if part.command[2] == "test"]
    every = {pythons.main_version(), *pythons.VERSIONS}
    assert sorted(run) == sorted(f"PYTHON=python{version}" for version in every)


NARROWS = {
    "PYTHON": "python3.99",
    "ARGS": "-k narrowed",
    "SHARE": "7/9",
    "PYTEST_ADDOPTS": "-k narrowed",
    "PYTHONPATH": "/narrowed",
    "MAKEFLAGS": "i -- ARGS=-k\\ narrowed",
}


@pytest.fixture
def narrowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that would have every target do something else than it says."""
    for name, value in NARROWS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("narrowing")
def test_the_environment_narrows_no_part(ci: Ci, tmp_path: Path) -> None:
    """`PYTHON=python3.12 scripts/release.sh` runs all of CI on the Pythons that it names."""
    parts = all_parts()
    tried = [replace(part, command=dry(part.command), after=()) for part in parts]
    assert ci.run(*tried), ci.said
    made = set()
    for part in parts:
        said = (tmp_path / f"logs/{part.name}.log").read_text()
        version = part.name.partition("core-")[2] or pythons.main_version()
        kind = "-vllm" if "vllm" in part.name else ""
        environments = environments_in(said)
        assert environments == {f".venv{kind}-python{version}"}, "whoever made `.venv`"
        made |= environments
        number = part.name.partition("vllm-")[2]
        assert re.findall(r"--share=(\S+)", said) == ([f"{number}/2"] if number else [])
        for word in ("3.99", "narrowed", "7/9"):
            assert word not in said, part
    versions = {pythons.main_version(), *pythons.VERSIONS}
    assert len(made) == len(versions) + 1, "a fresh machine makes no more than it needs"


def dry(command: tuple[str, ...]) -> tuple[str, ...]:
    """What make would run, all of it."""
    return (command[0], "--dry-run", "--always-make", *command[1:])


def environments_in(said: str) -> set[str]:
    return set(re.findall(r"\.venv[^/\s]*", said))


@pytest.mark.usefixtures("narrowing")
def test_what_a_target_starts_is_not_narrowed_either(ci: Ci) -> None:
    assert ci.run(shell("env", "echo options [$PYTEST_ADDOPTS$PYTHONPATH$MAKEFLAGS] of $HOME"))
    assert f"options [] of {os.environ['HOME']}\n" in ci.said


class Selection:
    """As pytest's configuration where `--share` is given; notes what is not selected."""

    def __init__(self, share: str | None) -> None:
        self.share = share
        self.left: list[Path] = []
        self.hook = SimpleNamespace(
            pytest_deselected=lambda items: self.left.extend(item.path for item in items)
        )

    def getoption(self, name: str) -> str | None:
        return {"--share": self.share}[name]


def selected(share: str | None) -> list[Path]:
    """Of three files with two tests each."""
    tests: list[Any] = [SimpleNamespace(path=Path(name)) for name in ("c", "c", "a", "a", "b", "b")]
    asked: Any = Selection(share)
    pytest_collection_modifyitems(asked, tests)
    assert len(tests) + len(asked.left) == 6
    return [test.path for test in tests]


def test_shares_make_up_the_whole() -> None:
    """As `SHARE=1/2` and `SHARE=2/2` of a target have it."""
    a, b, c = map(Path, "abc")
    assert selected(None) == selected("1/1") == [c, c, a, a, b, b]
    assert selected("1/2") == [c, c, a, a]
    assert selected("2/2") == [b, b]
    assert [selected(f"{k}/3") for k in (1, 2, 3)] == [[a, a], [b, b], [c, c]]
    for share in ("0/2", "3/2"):
        with pytest.raises(pytest.UsageError, match="K of K/N is from 1 to N"):
            selected(share)


def test_a_target_takes_a_share() -> None:
    command = ["make", "--dry-run", "--always-make", "test-vllm", "SHARE=2/2", "ARGS=-k hit"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest tests/vllm --share=2/2 -k hit\n" in said


@pytest.mark.parametrize(
    ("python", "environment"),
    [
        ((), ""),
        (("PYTHON=python3",), ""),
        (("PYTHON=python3.12",), "-python3.12"),
        (("PYTHON=/opt/py/bin/python3",), "-+opt+py+bin+python3"),
        (("PYTHON=/opt/3.12.1/bin/python",), "-+opt+3.12.1+bin+python"),
        (("PYTHON=/opt/3.13.0/bin/python",), "-+opt+3.13.0+bin+python"),
        (("PYTHON=/opt-3.13.0/bin/python",), "-+opt-3.13.0+bin+python"),
    ],
    ids=str,
)
def test_each_python_has_an_environment_of_its_own(
    python: tuple[str, ...], environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is not `python3`, whatever its last part is."""
    for name in NARROWS:
        monkeypatch.delenv(name, raising=False)
    for target, kind in (("test", ""), ("test-vllm", "-vllm")):
        command = dry(("make", target, *python))
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert environments_in(said) == {f".venv{kind}{environment}"}
