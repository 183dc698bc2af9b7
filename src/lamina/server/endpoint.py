"""Where engines connect: the path of the server's socket, its directory and its lock.

| | directory | socket |
| --- | --- | --- |
| for this user alone | 0700, ours | 0600 |
| for others too (`--allow-uid`) | 0711, ours | 0666: the listener asks the kernel who connects |

Whatever is at the path and is not this server's own stays there: a live server's socket, a
successor's, a file. All on the thread that runs the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from lamina.errors import SettingsError

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""How often a server looks whether its socket is still where engines look for it."""

_Inode: TypeAlias = tuple[int, int]
"""Device and number: one file and no other, as long as somebody has it open."""

_REMEDIES = {
    errno.ENOSPC: "Make room there, or choose another --socket",
    errno.EDQUOT: "Make room there, or choose another --socket",
    errno.EROFS: "Choose another --socket, on a file system that can be written",
    errno.EACCES: "Choose another --socket, in a directory of this user",
    errno.EPERM: "Choose another --socket, in a directory of this user",
}


class Endpoint:
    """Making one takes the lock, which is held until `close`; `open` makes the socket.

    Raises `SettingsError` where the path cannot be had. `is_shared` lets other users connect.
    """

    def __init__(self, path: Path, is_shared: bool) -> None:
        self._path = path
        self._is_shared = is_shared
        self._inode: _Inode | None = None
        self.is_lost = False
        """Whether engines no longer find this server at its path, as of the last `check`."""
        with _explained(path):
            _own_directory(path, is_shared)
            self._lock = _hold_lock(path)
            try:
                _remove_dead_socket(path)
            except BaseException:
                os.close(self._lock)
                raise
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)

    def open(self) -> None:
        """Let engines connect. Raises `SettingsError`."""
        before = os.umask(0o111 if self._is_shared else 0o177)
        try:
            with _explained(self._path):
                self.socket.bind(os.fspath(self._path))
        finally:
            os.umask(before)
        self._inode = _inode_at(self._path)
        self.socket.listen(128)

    async def watch(self) -> None:
        """`check`, for ever."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Notice that the socket is gone or another's, and say so once; not after `close`."""
        if self.socket.fileno() < 0:  # the task that watches ends after that
            return
        found = _inode_at(self._path)
        was_lost, self.is_lost = self.is_lost, found != self._inode
        if self.is_lost and not was_lost:
            log.error(
                "%s is %s: no engine finds this server any more, those that it has are served on. "
                "Restart it",
                self._path,
                "gone" if found is None else "no longer this server's",
            )

    def close(self) -> None:
        """Take the socket away if it is this server's own, and release the lock."""
        # Compared while it is open: until then its inode's number is given to no other file.
        if _inode_at(self._path) == self._inode:
            with contextlib.suppress(OSError):  # gone already, or the next server removes it
                self._path.unlink()
        self.socket.close()
        os.close(self._lock)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """An `OSError` as one sentence."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"the socket {path} cannot be made: {error.strerror}",
            _REMEDIES.get(error.errno or 0, "Choose another --socket"),
        ) from error


def _own_directory(path: Path, is_shared: bool) -> None:
    """Make the socket's directory, or check the one that is there."""
    directory, mode = path.parent, 0o711 if is_shared else 0o700
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
            directory.chmod(mode)  # whatever the umask is
        info = directory.stat()
        has_nothing_else = {*os.listdir(directory)} <= {path.name, _lock_of(path).name}
    except OSError as error:
        raise SettingsError(
            f"the runtime directory {directory} cannot be used: {error.strerror}",
            _REMEDIES.get(error.errno or 0, "Choose another --socket"),
        ) from error
    if info.st_uid != os.geteuid():
        raise SettingsError(
            f"the runtime directory {directory} belongs to user {info.st_uid}, not to user "
            f"{os.geteuid()}",
            "Choose a --socket in a directory of this user",
        )
    if is_shared and (info.st_mode & 0o022 or not info.st_mode & 0o001):
        cause = "is not to be entered by the users of --allow-uid, or others may write it"
    elif not is_shared and info.st_mode & 0o077:
        cause = "is not private to this user"
    else:
        return
    # Advice that would do harm to /tmp or to a home directory.
    advice = f"chmod {mode:o} {directory}, or choose" if has_nothing_else else "Choose"
    raise SettingsError(
        f"the runtime directory {directory} {cause}",
        f"{advice} a --socket in a directory of its own",
    )


def _hold_lock(path: Path) -> int:
    """Lock the path for this process. Raises `OSError` or `SettingsError`."""
    lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except BlockingIOError:
        pid = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise SettingsError(
            f"another server (pid {pid or 'unknown'}) already serves {path}",
            "Stop it, or choose another --socket",
        ) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _remove_dead_socket(path: Path) -> None:
    """Take a dead server's socket away, and nothing else. The caller holds the lock."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise SettingsError(f"{path} is there and no socket", "Choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
            # Its lock is gone, it is not: somebody cleaned up around it.
            raise SettingsError(
                f"another process listens at {path}", "Stop it, or choose another --socket"
            )
    path.unlink()


def _inode_at(path: Path) -> _Inode | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
