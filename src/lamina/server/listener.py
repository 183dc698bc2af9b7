"""Who may connect: the socket, its directory and lock, and the greeting of a fresh connection."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from lamina import protocol
from lamina.board import Board
from lamina.errors import BoardError, ErrorCode, LaminaError, RequestRefusedError, SettingsError
from lamina.linux import Peer, peer_of
from lamina.server.sessions import Session

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
"""How long a fresh connection may take to send its preface."""
MAX_GREETINGS = 64
"""Fresh connections at a time; for one more, whoever has said nothing for longest has to go."""
MAX_SESSIONS = 512
"""Connections that were greeted. Each takes three file descriptors."""
_RETRY_ACCEPT_S = 0.1

Welcome = Callable[[Session, socket.socket], Awaitable[None]]


class Listener:
    """The server's socket, in a 0700 directory, held by a lock for as long as the server lives.

    Making one takes the lock; the socket is there, and can be connected to, from `open` on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _private_directory(path.parent)
        self._lock = _hold_lock(path)
        _remove_dead_socket(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)

    def open(self) -> None:
        """Let engines connect. Only once the server can be stopped in order."""
        _allow_descriptors(4 * (MAX_SESSIONS + MAX_GREETINGS))
        before = os.umask(0o177)
        try:
            self._socket.bind(os.fspath(self._path))
        finally:
            os.umask(before)
        self._socket.listen(128)

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    async def serve(
        self,
        welcome: Welcome,
        has_room: Callable[[], bool],
        refused: Callable[[ErrorCode], None],
    ) -> None:
        """Greet whoever connects, for ever; `welcome` gets those that may, while there is room."""
        greetings: dict[asyncio.Task[None], None] = {}  # the oldest first
        try:
            while True:
                sock = await self._accept()
                task = asyncio.create_task(_greet(sock, welcome, has_room, refused))
                greetings[task] = None
                task.add_done_callback(greetings.pop)
                if len(greetings) > MAX_GREETINGS:
                    next(iter(greetings)).cancel()
                await asyncio.sleep(0)  # a flood of connections does not hold up the loop
        finally:
            for task in greetings:
                task.cancel()
            await asyncio.gather(*greetings, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        """The next connection; with no descriptor left for it, wait until others are closed."""
        is_said = False
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._socket)
                return sock
            except OSError as error:
                if not is_said:
                    log.error("cannot take a connection: %s. Raise `ulimit -n`", error.strerror)
                is_said = True
                await asyncio.sleep(_RETRY_ACCEPT_S)


async def _greet(
    sock: socket.socket,
    welcome: Welcome,
    has_room: Callable[[], bool],
    refused: Callable[[ErrorCode], None],
) -> None:
    """Check who connects before anything of theirs is read by the event loop's transport."""
    with contextlib.ExitStack() as on_refusal:
        on_refusal.callback(sock.close)
        try:
            peer = peer_of(sock)
            on_refusal.callback(peer.close)
            await _first_bytes(sock)  # before it a client would not read what we say
            _check_peer(peer)
            if not has_room():
                raise RequestRefusedError(
                    ErrorCode.BUSY,
                    f"{MAX_SESSIONS} connections are served already",
                    "Close some, or start another server",
                )
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, _, _ = socket.recv_fds(sock, protocol.PREFACE_BYTES, 2, flags)
            for fd in fds:
                on_refusal.callback(os.close, fd)
            board = _checked_board(data, fds)
        except (OSError, LaminaError) as error:
            if isinstance(error, LaminaError):
                refused(_turn_away(sock, error))
            return
        on_refusal.pop_all()  # all of it is the session's now
    await welcome(Session(peer, board), sock)


def _check_peer(peer: Peer) -> None:
    if peer.uid != os.geteuid():
        raise RequestRefusedError(
            ErrorCode.FORBIDDEN,
            f"user {peer.uid} may not use a server of user {os.geteuid()}",
            "Run the engine and the server as the same user",
        )


async def _first_bytes(sock: socket.socket) -> None:
    """Wait for the preface, as long as a peer may take for it."""
    try:
        await asyncio.wait_for(_readable(sock), GREETING_TIMEOUT_S)
    except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
        raise RequestRefusedError(
            ErrorCode.MALFORMED,
            f"no greeting came within {GREETING_TIMEOUT_S:g} s",
            "Connect with a Lamina client",
        ) from error


def _checked_board(data: bytes, fds: list[int]) -> Board:
    try:
        version = protocol.preface_version(data)
    except protocol.MalformedError as error:
        raise RequestRefusedError(
            ErrorCode.MALFORMED, str(error), "Connect with a Lamina client"
        ) from error
    if version != protocol.VERSION:
        raise RequestRefusedError(
            ErrorCode.VERSION,
            f"the engine speaks protocol {version}, the server {protocol.VERSION}",
            "Install the same Lamina version on both sides",
        )
    if len(fds) != 1:
        raise BoardError(f"{len(fds)} boards came with the preface", "Send one")
    return Board.attach(fds[0])


def _turn_away(sock: socket.socket, error: LaminaError) -> ErrorCode:
    """Say why, with the code that is returned."""
    code = error.code if isinstance(error, RequestRefusedError) else ErrorCode.BAD_BOARD
    with contextlib.suppress(OSError):
        sock.send(protocol.encode(protocol.ErrorReply(0, code, error.cause, error.remedy)))
    log.warning("turned a connection away: %s", error)
    return code


def _allow_descriptors(count: int) -> None:
    """Raise this process's soft limit on open files to `count`, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _remove_dead_socket(path: Path) -> None:
    """Take a dead server's socket away; whoever holds its lock may. Never anything else."""
    if not path.exists():
        return
    if not path.is_socket():
        raise SettingsError(f"{path} is there and no socket", "Choose another --socket")
    path.unlink()


def _private_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise SettingsError(
            f"the runtime directory {directory} cannot be used: {error.strerror}",
            "Choose another --socket",
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise SettingsError(
            f"the runtime directory {directory} is not private to this user",
            f"chmod 700 {directory}, or choose a --socket in a directory of its own",
        )


def _hold_lock(path: Path) -> int:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise SettingsError(
            f"another server (pid {pid or 'unknown'}) already serves {path}",
            "Stop it, or choose another --socket",
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock
