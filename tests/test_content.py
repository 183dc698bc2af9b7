"""Digests of files: every byte counts, nothing is read twice, and what may have changed is told."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lamina import content
from lamina.content import FileChangedError, default_memory, digests

LATER_NS = 10**10
"""Well after a test's files were written."""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "files"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Some larger than one read."""
    monkeypatch.setattr(content, "_READ_BYTES", 4096)
    monkeypatch.setattr(content, "_RECENT_NS", 0)
    made = [tmp_path / f"model-{number}.safetensors" for number in range(5)]
    for number, path in enumerate(made):
        path.write_bytes(os.urandom(3000 * (number + 1)))
    return made


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_digest_is_the_files_sha256(files: list[Path], memory: Path) -> None:
    assert digests(files, None, memory) == [sha256(path) for path in files]
    assert digests([], None, memory) == []


@pytest.mark.parametrize("where", [0, 4095, 4096, 8192, 14_999])
def test_any_byte_changes_it(files: list[Path], memory: Path, where: int) -> None:
    before = digests(files, None, memory)
    with files[4].open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))
    after = digests(files, None, memory)
    assert after[:4] == before[:4]
    assert after[4] != before[4]


def test_a_file_is_read_once(
    files: list[Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digests(files, None, memory)

    def fail(descriptor: int) -> str:
        raise AssertionError("it was read again")

    monkeypatch.setattr(content, "_read", fail)
    assert digests(files, None, memory) == first
    moved = files[0].rename(files[0].with_name("other-name"))  # the same file still
    with pytest.raises(AssertionError):  # its time of change is another
        digests([moved], None, memory)


def test_a_file_that_keeps_size_and_time_is_read_again(files: list[Path], memory: Path) -> None:
    """Only the kernel's own time of change tells."""
    stat = files[0].stat()
    before = digests(files[:1], None, memory)
    files[0].write_bytes(os.urandom(stat.st_size))
    os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digests(files[:1], None, memory) != before


def test_a_file_written_a_moment_ago_is_not_remembered(
    files: list[Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within the same tick of its clock."""
    monkeypatch.setattr(content, "_RECENT_NS", LATER_NS)
    digests(files, None, memory)
    assert [entry.stat().st_size for entry in memory.iterdir()] == [0] * len(files)


def test_a_torn_memory_is_not_believed(files: list[Path], memory: Path) -> None:
    expected = digests(files, None, memory)
    for torn, entry in zip(
        [b"", b"ab", b"x" * 64, b"0" * 63, b"0" * 65], memory.iterdir(), strict=True
    ):
        entry.write_bytes(torn)
    assert digests(files, None, memory) == expected


def test_a_memory_that_others_may_write_is_not_used(files: list[Path], memory: Path) -> None:
    memory.mkdir(parents=True)
    memory.chmod(0o777)
    assert digests(files, None, memory) == [sha256(path) for path in files]
    assert not list(memory.iterdir())


def test_without_a_place_to_remember_files_are_read_all_the_same(
    files: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "occupied").write_text("a file")
    expected = [sha256(path) for path in files]
    assert digests(files, None, tmp_path / "occupied" / "files") == expected
    assert digests(files, None, None) == expected


@pytest.mark.parametrize(
    ("owner", "call", "code"),
    [(os, "open", errno.ENOSPC), (os, "pwrite", errno.EDQUOT), (fcntl, "flock", errno.ENOLCK)],
    ids=["full", "quota", "no locks"],
)
def test_a_memory_that_fails_costs_no_more_than_reading(
    files: list[Path],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    call: str,
    code: int,
) -> None:
    open_before = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, call, fail)
    for _ in range(2):
        assert digests(files, None, memory) == [sha256(path) for path in files]
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_user_without_a_home_remembers_nothing(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_memory() is None
    assert digests(files, None, default_memory()) == [sha256(path) for path in files]


def test_a_file_that_was_written_too_late_is_told(files: list[Path], memory: Path) -> None:
    written_ns = files[2].stat().st_ctime_ns
    assert digests(files[2:3], written_ns + LATER_NS, memory)
    with pytest.raises(FileChangedError, match=r"model-2.*Restart the engine"):
        digests(files[2:3], written_ns, memory)
    with pytest.raises(FileChangedError):  # the kernel's clock may have lagged
        digests(files[2:3], written_ns + content.CLOCK_SLACK_NS // 2, memory)


def test_a_link_that_was_turned_too_late_is_told(files: list[Path], tmp_path: Path) -> None:
    since_ns = files[0].stat().st_ctime_ns + LATER_NS
    link = tmp_path / "link.safetensors"
    link.symlink_to(files[0])
    before_ns = link.lstat().st_ctime_ns
    assert digests([link], since_ns, None) == [sha256(files[0])]
    with pytest.raises(FileChangedError):
        digests([link], before_ns, None)


def test_a_file_written_while_it_is_read_is_told(
    files: list[Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = content._read

    def write_too(descriptor: int) -> str:
        found = read(descriptor)
        files[0].write_bytes(b"others")
        return found

    monkeypatch.setattr(content, "_read", write_too)
    with pytest.raises(FileChangedError, match="while it was read"):
        digests(files[:1], None, memory)


def test_what_cannot_be_read_is_told(files: list[Path], memory: Path) -> None:
    files[3].unlink()
    with pytest.raises(FileNotFoundError):
        digests(files, None, memory)


def test_processes_that_want_the_same_file_share_one_reading(
    files: list[Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first; locks are per open file, so two threads show it."""
    reading, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    readings = 0
    read, sleep = content._read, time.sleep

    def held(descriptor: int) -> str:
        nonlocal readings
        readings += 1
        reading.set()
        assert go_on.wait(30)
        return read(descriptor)

    def note(seconds: float) -> None:
        waits.set()
        sleep(0)

    monkeypatch.setattr(content, "_read", held)
    monkeypatch.setattr(time, "sleep", note)
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(digests(files[:1], None, memory)))
        for _ in range(2)
    ]
    threads[0].start()
    assert reading.wait(30)
    threads[1].start()
    assert waits.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [[sha256(files[0])]] * 2
    assert readings == 1


def hub_cache(root: Path, content: bytes, name: str) -> Path:
    """A snapshot with one file whose blob has this name."""
    snapshot = root / "models--org--m" / "snapshots" / ("c" * 40)
    blob = root / "models--org--m" / "blobs" / name
    for directory in (snapshot, blob.parent):
        directory.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link = snapshot / "model.safetensors"
    link.symlink_to(os.path.relpath(blob, snapshot))
    return link


def test_a_large_file_of_the_hub_is_named_by_its_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = os.urandom(100)
    name = hashlib.sha256(weights).hexdigest()
    link = hub_cache(tmp_path, weights, name)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights)
    assert digests([copy], None, None) == [name]
    monkeypatch.setattr(content, "_read", lambda descriptor: pytest.fail("it was read"))
    assert digests([link], 0, None) == [name]  # whenever it was downloaded


def test_a_small_file_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its blob has a git name."""
    link = hub_cache(tmp_path, b"{}", "a" * 40)
    assert digests([link], 0, None) == [hashlib.sha256(b"{}").hexdigest()]
