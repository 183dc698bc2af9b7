"""Whether a server may be trusted: asked of the kernel before anything is said to it.

Whoever serves reads and writes the engine's KV. A path says little of who listens there: in /tmp
any user may have made it first. Two things are asked: whose the server's process is (SO_PEERCRED),
and whether somebody else could have put the socket where it lies.
"""

from __future__ import annotations

import os
from pathlib import Path

from lamina.errors import UntrustedServerError

_ROOT = 0


def check_server(path: Path, uid: int, server_uid: int | None) -> None:
    """Check a server of user `uid` at the socket `path`; `server_uid` is trusted beside our own.

    Raises `UntrustedServerError`, or `OSError` when the socket's directory cannot be looked at.
    """
    ours = os.geteuid()
    if uid not in (ours, server_uid):
        trusted = f"user {ours}" if server_uid is None else f"user {ours} or {server_uid}"
        raise UntrustedServerError(
            f"the server at {path} is of user {uid}, not of {trusted}",
            "Run the engine and the server as the same user, or set lamina.server_uid "
            "(--server-uid on the command line) if that user is to be trusted",
        )
    directory = path.parent
    info = directory.stat()
    remedy = "Choose a socket in a directory of its own that only the server's user can write"
    if info.st_uid not in (uid, _ROOT):
        raise UntrustedServerError(
            f"the socket's directory {directory} belongs to user {info.st_uid}, not to the "
            f"server's user {uid}",
            remedy,
        )
    if info.st_mode & 0o022:
        raise UntrustedServerError(
            f"the socket's directory {directory} can be written by others than user {info.st_uid}",
            remedy,
        )
