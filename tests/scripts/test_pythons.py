"""Which interpreter a name means: one that runs and is that version, never a shim that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import pythons
from scripts.pythons import MissingPythonError, find

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One without any Python: `bin` is in PATH, `pyenv` is where pyenv keeps versions."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def install(path: Path, says: str, code: int = 0) -> str:
    """A program at `path` that says which version it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def pyenv(machine: Path, version: str, name: str) -> str:
    said = ".".join(version.split(".")[:2])
    return install(machine / "pyenv/versions" / version / "bin" / name, said)


def test_path_comes_first(machine: Path) -> None:
    pyenv(machine, "3.12.1", "python3.12")
    in_path = install(machine / "bin/python3.12", "3.12")
    assert find("python3.12") == in_path


def test_a_shim_that_fails_is_passed_over(machine: Path) -> None:
    install(machine / "bin/python3.12", "pyenv: python3.12: command not found", 127)
    installed = pyenv(machine, "3.12.1", "python3.12")
    assert find("python3.12") == installed


def test_one_that_is_another_version_is_passed_over(machine: Path) -> None:
    install(machine / "bin/python3.12", "3.11")
    installed = pyenv(machine, "3.12.1", "python3.12")
    assert find("python3.12") == installed


def test_the_newest_of_pyenvs_is_taken(machine: Path) -> None:
    pyenv(machine, "3.12.9", "python3.12")
    newest = pyenv(machine, "3.12.10", "python3.12")
    pyenv(machine, "3.13.0", "python3.13")
    assert find("python3.12") == newest


def test_pyenv_is_looked_for_at_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYENV_ROOT")
    monkeypatch.setenv("HOME", str(machine))
    there = install(machine / ".pyenv/versions/3.13.0/bin/python3.13", "3.13")
    assert find("python3.13") == there


def test_a_path_is_taken_as_it_is(machine: Path) -> None:
    named = install(machine / "elsewhere/python", "3.10")
    assert find(named) == named
    with pytest.raises(MissingPythonError):
        find(str(machine / "nowhere/python"))


def test_what_is_missing_is_one_line_that_says_what_to_do(machine: Path) -> None:
    install(machine / "bin/python3.12", "not found", 127)
    command = [sys.executable, "-m", "scripts.pythons", "python3.12"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    for word in ("no python3.12 that runs", str(machine / "pyenv"), "pyenv install 3.12"):
        assert word in ended.stderr


def test_make_says_which_python_is_missing_and_fails(tmp_path: Path) -> None:
    environment = ["env", f"PYENV_ROOT={tmp_path}", "make", "--silent", "test"]
    ended = subprocess.run(
        [*environment, "PYTHON=python3.99"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert "there is no python3.99 that runs" in ended.stderr


def test_the_versions_are_those_that_the_package_takes() -> None:
    """From the one that pyproject.toml requires, without a gap."""
    least = (ROOT / "pyproject.toml").read_text().partition('requires-python = ">=')[2]
    minors = [int(version.removeprefix("3.")) for version in pythons.VERSIONS]
    assert least.startswith(pythons.VERSIONS[0] + '"')
    assert minors == list(range(minors[0], minors[-1] + 1))
