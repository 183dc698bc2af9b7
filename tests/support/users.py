"""What another user of the host does: in a forked child that has become that user."""

from __future__ import annotations

import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

STRANGER = 65534
OTHER_STRANGER = 65533

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_user(uid: int, call: Callable[[], str]) -> str:
    """What `call` returns, or the error that it raises, when user `uid` calls it."""
    ours, theirs = os.pipe()
    if not (pid := _fork()):
        try:
            _become(uid)
            said = call()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


class StrangersServer:
    """User `uid` makes the directory of `path` with `mode` and listens there. It answers nobody,
    and notes what it is told by whoever connects and leaves."""

    def __init__(self, path: Path, uid: int = STRANGER, mode: int = 0o755) -> None:
        path.parent.parent.chmod(0o777)
        ours, theirs = os.pipe()
        self._told = os.fdopen(ours)
        if not (pid := _fork()):
            try:
                _become(uid)
                _listen(path, mode, theirs)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        self._pid = pid
        os.close(theirs)
        assert self._told.readline() == "listening\n"

    def next_told(self) -> str:
        """What it was told by the next one that left: bytes in hexadecimal."""
        return self._told.readline().strip()

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._told.close()


def _listen(path: Path, mode: int, notes: int) -> None:
    os.umask(0)
    path.parent.mkdir(mode)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen(8)
        os.write(notes, b"listening\n")
        while True:
            connection, _ = listening.accept()
            with connection:
                told = b""
                while data := connection.recv(1 << 16):
                    told += data
            os.write(notes, told.hex().encode() + b"\n")


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread's code
        return os.fork()


def _become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
