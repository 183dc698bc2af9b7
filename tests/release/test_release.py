"""`scripts/release.sh` in a repository that is a copy of this tree: what it refuses and makes.

What it runs as a check is replaced here (`CHECK`): the whole of CI, which runs this test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = shutil.ignore_patterns(
    ".git", ".venv*", ".gpu", "logs", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
VERSION = "4.5.6"
TAG = f"v{VERSION}"
NAME = f"lamina-{VERSION}"
UNRELEASED = r"^## \[Unreleased\]$"


class Repository:
    """A git repository with this tree in one commit, made ready for `VERSION` as CONTRIBUTING says:
    what is under *Unreleased* is moved to a dated section beneath it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT, path, ignore=NOT_OURS)
        self.change("CHANGELOG.md", UNRELEASED, f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-24")
        self.change("src/lamina/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{VERSION}"')
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=self.path, capture_output=True, text=True, check=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "All of it")

    def change(self, name: str, pattern: str, by: str) -> None:
        file = self.path / name
        text, count = re.subn(pattern, by, file.read_text(), flags=re.MULTILINE)
        assert count == 1, f"{name} has {count} times {pattern}"
        file.write_text(text)

    def release(self, *options: str, check: str = "true") -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "CHECK": check,
            "PYTHONPATH": str(ROOT / "src"),  # another version, which is not to be taken for it
            "GIT_COMMITTER_NAME": "test",
            "GIT_COMMITTER_EMAIL": "test@localhost",
        }
        command = ["scripts/release.sh", *options]
        return subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True
        )

    def refuses(self, why: str, *options: str, check: str = "true") -> None:
        ended = self.release(*options, check=check)
        assert ended.returncode == 1
        assert f"release: {why}" in ended.stderr, ended.stderr
        assert not (self.path / "dist").exists(), "it has built something"
        assert not self.git("tag"), "it has tagged something"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "lamina")


def test_a_dry_run_builds_and_installs_and_tags_nothing(repository: Repository) -> None:
    """The entry of a version that is being worked on may be without a date."""
    repository.change("CHANGELOG.md", " - 2026-12-24$", " - not yet released")
    repository.commit()
    ended = repository.release("--dry-run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"no date yet\nrelease: {VERSION} is ready in dist/" in ended.stdout
    assert not repository.git("tag")
    assert not repository.git("status", "--porcelain"), "dist/ is not ignored"
    with zipfile.ZipFile(repository.path / f"dist/{NAME}-py3-none-any.whl") as wheel:
        packages = {name.partition("/")[0] for name in wheel.namelist()}
    assert packages == {"lamina", "lamina_lab", f"{NAME}.dist-info"}
    with tarfile.open(repository.path / f"dist/{NAME}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"CHANGELOG.md", "Makefile", "src/lamina/py.typed", "tests/conftest.py"} <= names


def test_a_release_is_tagged(repository: Repository) -> None:
    ended = repository.release()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert repository.git("tag").split() == [TAG]
    assert repository.git("cat-file", "-t", TAG) == "tag\n", "with who made it and when"
    assert repository.git("rev-parse", f"{TAG}^{{commit}}") == repository.git("rev-parse", "HEAD")
    assert f"git push origin {TAG}" in ended.stdout


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_tree_with_changes_is_refused(repository: Repository, options: tuple[str, ...]) -> None:
    (repository.path / "new.py").write_text("")
    repository.refuses("the tree is not clean: commit or remove\n?? new.py", *options)
    repository.commit()
    (repository.path / "new.py").write_text("changed")
    repository.refuses("the tree is not clean", *options)


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_check_that_fails_is_a_refusal(repository: Repository, options: tuple[str, ...]) -> None:
    repository.refuses("false has failed", *options, check="false")
    repository.refuses("touch new.py has changed the tree", *options, check="touch new.py")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_version_that_the_changelog_does_not_have_is_refused(
    repository: Repository, options: tuple[str, ...]
) -> None:
    repository.change("src/lamina/__init__.py", r'^__version__ = ".*"$', '__version__ = "7.8.9"')
    repository.commit()
    repository.refuses("CHANGELOG.md says nothing of 7.8.9", *options)


def test_a_version_without_a_date_is_refused(repository: Repository) -> None:
    repository.change("CHANGELOG.md", " - 2026-12-24$", " - not yet released")
    repository.commit()
    repository.refuses(f"CHANGELOG.md gives {VERSION} no date")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_what_is_left_without_a_version_is_refused(
    repository: Repository, options: tuple[str, ...]
) -> None:
    repository.change("CHANGELOG.md", UNRELEASED, "## [Unreleased]\n\n### Fixed\n\n* This too.")
    repository.commit()
    repository.refuses("CHANGELOG.md has lines under Unreleased: move", *options)


def test_the_changelog_is_as_a_release_needs_it() -> None:
    """*Unreleased* on top, and below it what is released, each version with its date."""
    first, *released = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.match(UNRELEASED, first)
    for heading in released:
        assert re.match(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d$", heading)


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_tag_that_exists_is_refused(repository: Repository, options: tuple[str, ...]) -> None:
    repository.git("tag", TAG)
    ended = repository.release(*options)
    assert ended.returncode == 1
    assert f"release: the tag {TAG} exists" in ended.stderr
    assert not (repository.path / "dist").exists()


def test_other_options_are_refused(repository: Repository) -> None:
    repository.refuses("there is no option '--dry'", "--dry")


def test_without_a_replacement_the_check_is_all_that_ci_runs() -> None:
    assert "${CHECK:-.ci/run}" in (ROOT / "scripts/release.sh").read_text()
