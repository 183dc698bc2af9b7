"""The socket's path, directory and lock: what cannot be had is one sentence, what is another's
stays there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import SettingsError
from lamina.server.endpoint import Endpoint


@pytest.fixture
def make(socket_path: Path) -> Iterator[Callable[..., Endpoint]]:
    """Makes open endpoints at `socket_path`, closed at the end in the order of making."""
    made: list[Endpoint] = []

    def make(is_shared: bool = False) -> Endpoint:
        made.append(Endpoint(socket_path, is_shared))
        made[-1].open()
        return made[-1]

    yield make
    for endpoint in made:
        if endpoint.socket.fileno() >= 0:
            endpoint.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_reachable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) == 0


def refusal(path: Path, is_shared: bool = False) -> str:
    """Why there can be no endpoint; nothing is left open."""
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SettingsError) as refused:
        Endpoint(path, is_shared)
    assert len(os.listdir("/proc/self/fd")) == files
    assert refused.value.remedy
    return str(refused.value)


# Directory and modes.


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
@pytest.mark.parametrize(("is_shared", "modes"), [(False, (0o700, 0o600)), (True, (0o711, 0o666))])
def test_modes_do_not_depend_on_the_umask(
    make: Callable[..., Endpoint],
    socket_path: Path,
    umask: int,
    is_shared: bool,
    modes: tuple[int, int],
) -> None:
    before = os.umask(umask)
    try:
        make(is_shared)
    finally:
        assert os.umask(before) == umask
    assert (mode_of(socket_path.parent), mode_of(socket_path)) == modes


@pytest.mark.parametrize(
    ("is_shared", "mode", "cause", "advice"),
    [
        (False, 0o711, "is not private to this user", "chmod 700"),
        (False, 0o740, "is not private to this user", "chmod 700"),
        (True, 0o700, "is not to be entered", "chmod 711"),
        (True, 0o733, "others may write it", "chmod 711"),
    ],
)
def test_a_directory_with_another_mode_is_refused(
    socket_path: Path, is_shared: bool, mode: int, cause: str, advice: str
) -> None:
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    said = refusal(socket_path, is_shared)
    assert cause in said
    assert f"{advice} {socket_path.parent}, or choose" in said
    assert mode_of(socket_path.parent) == mode


@pytest.mark.parametrize("mode", [0o711, 0o755])
def test_a_shared_directory_that_others_may_enter_will_do(
    make: Callable[..., Endpoint], socket_path: Path, mode: int
) -> None:
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    make(is_shared=True)
    assert mode_of(socket_path.parent) == mode


def test_nobody_is_told_to_change_a_directory_that_holds_other_things(socket_path: Path) -> None:
    """As /tmp would, or a home directory."""
    socket_path.parent.mkdir()
    socket_path.parent.chmod(0o755)
    (socket_path.parent / "letters").touch()
    said = refusal(socket_path)
    assert "is not private to this user. Choose a --socket in a directory of its own" in said


def test_nobody_is_told_to_change_a_directory_of_another_user(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket_path.parent.mkdir(0o755)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    said = refusal(socket_path)
    assert f"belongs to user {owner}, not to user {owner + 1}" in said
    assert "chmod" not in said


# What cannot be had.


def a_file_above(path: Path) -> None:
    path.parent.write_text("a file")


def a_file_further_up(path: Path) -> None:
    path.parent.parent.rmdir()
    path.parent.parent.write_text("a file")


def a_directory_for_the_lock(path: Path) -> None:
    path.with_name(f"{path.name}.lock").mkdir(parents=True)
    path.parent.chmod(0o700)


def a_directory_for_the_socket(path: Path) -> None:
    path.mkdir(parents=True)
    path.parent.chmod(0o700)


def a_link_to_nothing(path: Path) -> None:
    path.parent.mkdir(0o700)
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("prepare", "cause"),
    [
        (a_file_above, "cannot be used: Not a directory"),
        (a_file_further_up, "cannot be used: "),
        (a_directory_for_the_lock, "cannot be made: Is a directory"),
        (a_directory_for_the_socket, "is there and no socket"),
        (a_link_to_nothing, "is there and no socket"),
    ],
)
def test_what_is_in_the_way_is_named(
    tmp_path: Path, prepare: Callable[[Path], None], cause: str
) -> None:
    path = tmp_path / "above" / "run" / "s"
    path.parent.parent.mkdir()
    prepare(path)
    said = refusal(path)
    assert cause in said
    assert "hoose another --socket" in said


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "Make room there"),
        (errno.EROFS, "on a file system that can be written"),
        (errno.EACCES, "in a directory of this user"),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "open", "write", "unlink", "bind"])
def test_a_full_or_a_read_only_directory_is_one_sentence(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, remedy: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    if call == "unlink":  # of a dead server's socket
        socket_path.parent.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(socket_path))
    with monkeypatch.context() as patch:
        if call == "bind":
            endpoint = Endpoint(socket_path, is_shared=False)
            patch.setattr(socket.socket, "bind", fail)
            with pytest.raises(SettingsError) as refused:
                endpoint.open()
            said = str(refused.value)
            endpoint.close()
        else:
            owner = Path if call in ("mkdir", "unlink") else os
            patch.setattr(owner, call, fail)
            said = refusal(socket_path)
    assert os.strerror(code) in said
    assert remedy in said


# Whose socket it is.


def test_a_dead_servers_socket_makes_way(make: Callable[..., Endpoint], socket_path: Path) -> None:
    socket_path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(socket_path))
        dead.listen()
    make()
    assert is_reachable(socket_path)


def test_a_living_servers_socket_does_not_even_without_its_lock(
    make: Callable[..., Endpoint], socket_path: Path
) -> None:
    make()
    socket_path.with_name(f"{socket_path.name}.lock").unlink()
    assert "another process listens" in refusal(socket_path)
    assert is_reachable(socket_path)


def test_its_end_takes_its_socket_away_and_frees_the_path(
    make: Callable[..., Endpoint], socket_path: Path
) -> None:
    make().close()
    assert not socket_path.exists()
    make()
    assert is_reachable(socket_path)


def test_one_that_was_never_opened_takes_nothing_away(socket_path: Path) -> None:
    endpoint = Endpoint(socket_path, is_shared=False)
    socket_path.write_text("another's")
    endpoint.close()
    assert socket_path.read_text() == "another's"


def test_its_end_leaves_a_successors_socket_alone(
    make: Callable[..., Endpoint], socket_path: Path
) -> None:
    first = make()
    shutil.rmtree(socket_path.parent)
    make()
    first.close()
    assert is_reachable(socket_path)


def test_a_socket_that_its_server_took_away_is_not_called_gone(
    make: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    """The task that looks for it may run once more before a server that stops has ended it."""
    endpoint = make()
    endpoint.close()
    endpoint.check()
    assert not endpoint.is_lost
    assert not caplog.records


def test_a_socket_that_is_gone_or_replaced_is_noticed_and_said_once(
    make: Callable[..., Endpoint], socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make()
    first.check()
    assert not first.is_lost
    shutil.rmtree(socket_path.parent)
    for _ in range(3):
        first.check()
        assert first.is_lost
    second = make()
    for _ in range(3):
        first.check()
        second.check()
        assert (first.is_lost, second.is_lost) == (True, False)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"{socket_path} is gone" in record.getMessage()
    assert "Restart it" in record.getMessage()


def test_a_socket_that_another_took_is_said_to_be_so(
    make: Callable[..., Endpoint], socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make()
    socket_path.unlink()
    with socket.socket(socket.AF_UNIX) as usurper:
        usurper.bind(os.fspath(socket_path))
        first.check()
        first.close()
        assert socket_path.exists()
    assert "is no longer this server's" in caplog.records[0].getMessage()
