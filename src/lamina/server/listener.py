"""Who may connect: taking connections, and the greeting of a fresh one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from lamina import protocol
from lamina.board import Board
from lamina.errors import BoardError, ErrorCode, LaminaError, RequestRefusedError
from lamina.linux import OUT_OF_DESCRIPTORS, peer_of
from lamina.server.endpoint import Endpoint
from lamina.server.sessions import Session

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
"""How long a fresh connection may take to send its preface."""
MAX_GREETINGS = 64
"""Fresh connections at a time; for one more, whoever has said nothing for longest has to go."""
MAX_SESSIONS = 512
"""Connections that were greeted. Each takes three file descriptors."""
_RETRY_ACCEPT_S = 0.1
_MAX_FDS = 2
"""Received with a preface: one is right, and with two it is known that there were too many."""

Welcome = Callable[[Session, socket.socket], Awaitable[None]]


class Listener:
    """The server's socket and who may connect to it: its own user, and those of `allow_uids`.

    Making one takes the lock; the socket is there, and can be connected to, from `open` on. Both
    raise `SettingsError`.
    """

    def __init__(self, path: Path, allow_uids: Collection[int] = ()) -> None:
        self._uids = frozenset((os.geteuid(), *allow_uids))
        self._endpoint = Endpoint(path, is_shared=bool(allow_uids))

    @property
    def is_lost(self) -> bool:
        """Whether engines no longer find the server at its path."""
        return self._endpoint.is_lost

    def open(self) -> None:
        """Let engines connect. Only once the server can be stopped in order."""
        _allow_descriptors(4 * (MAX_SESSIONS + MAX_GREETINGS))
        self._endpoint.open()

    def close(self) -> None:
        self._endpoint.close()

    async def serve(
        self,
        welcome: Welcome,
        has_room: Callable[[], bool],
        refused: Callable[[ErrorCode], None],
    ) -> None:
        """Greet whoever connects, for ever; `welcome` gets those that may, while there is room."""
        greetings: dict[asyncio.Task[None], None] = {}  # the oldest first
        watch = asyncio.create_task(self._endpoint.watch())
        try:
            while True:
                sock = await self._accept()
                task = asyncio.create_task(self._greet(sock, welcome, has_room, refused))
                greetings[task] = None
                task.add_done_callback(greetings.pop)
                if len(greetings) > MAX_GREETINGS:
                    next(iter(greetings)).cancel()
                await asyncio.sleep(0)  # a flood of connections does not hold up the loop
        finally:
            for task in (watch, *greetings):
                task.cancel()
            await asyncio.gather(watch, *greetings, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        """The next connection; with no descriptor left for it, wait until others are closed."""
        is_said = False
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._endpoint.socket)
                return sock
            except OSError as error:
                if not is_said:
                    log.error("cannot take a connection: %s. Raise `ulimit -n`", error.strerror)
                is_said = True
                await asyncio.sleep(_RETRY_ACCEPT_S)

    async def _greet(
        self,
        sock: socket.socket,
        welcome: Welcome,
        has_room: Callable[[], bool],
        refused: Callable[[ErrorCode], None],
    ) -> None:
        """Check who connects before anything of theirs is read by the event loop's transport."""
        with contextlib.ExitStack() as on_refusal:
            on_refusal.callback(sock.close)
            try:
                await _first_bytes(sock)  # before it a client would not read what we say
                peer = peer_of(sock)
                on_refusal.callback(peer.close)
                self._check_user(peer.uid)
                if not has_room():
                    raise RequestRefusedError(
                        ErrorCode.BUSY,
                        f"{MAX_SESSIONS} connections are served already",
                        "Close some, or start another server",
                    )
                data, fds = _received_preface(sock)
                for fd in fds:
                    on_refusal.callback(os.close, fd)
                board = _checked_board(data, fds)
            except LaminaError as error:
                refused(_turn_away(sock, error))
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    refused(_turn_away(sock, _no_descriptors()))
                return
            on_refusal.pop_all()  # all of it is the session's now
        await welcome(Session(peer, board), sock)

    def _check_user(self, uid: int) -> None:
        if uid not in self._uids:
            raise RequestRefusedError(
                ErrorCode.FORBIDDEN,
                f"user {uid} may not use a server of user {os.geteuid()}",
                f"Run the engine and the server as the same user, or serve with --allow-uid {uid}",
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


def _received_preface(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The preface and the descriptors that came with it, which are the caller's to close.

    Raises `RequestRefusedError` when this process has no descriptor left to receive them.
    """
    data, fds, received, _ = socket.recv_fds(
        sock, protocol.PREFACE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
    )
    if received & socket.MSG_CTRUNC and len(fds) < _MAX_FDS:  # the kernel drops what it cannot give
        for fd in fds:
            os.close(fd)
        raise _no_descriptors()
    return data, fds


def _no_descriptors() -> RequestRefusedError:
    return RequestRefusedError(
        ErrorCode.BUSY,
        "the server has no file descriptors left for another connection",
        "Raise its `ulimit -n`, or close connections",
    )


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
