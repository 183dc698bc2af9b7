"""One connection to one server. No thread and no blocking call: the engine's thread drives it.

`call` sends a request and returns at once; `pump` reads what has arrived and runs the callbacks of
the replies. Everything here belongs to one thread, except `is_server_dead`, which any may ask.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from lamina import protocol
from lamina.board import Board
from lamina.client.trust import check_server
from lamina.errors import ServerUnavailableError
from lamina.frames import FrameBuffer
from lamina.linux import OUT_OF_DESCRIPTORS, Peer, peer_of, wait_readable

MAX_UNSENT_BYTES = 4 * protocol.MAX_FRAME_BYTES
"""A server that leaves this much unread is as good as gone."""
_RECEIVE_BYTES = 1 << 18

OnReply = Callable[[protocol.Reply | None], None]
"""Gets the reply, an `ErrorReply`, or None when the connection was lost before."""


class Connection:
    """Raises `ServerUnavailableError` when nothing listens at `path`, `UntrustedServerError` when
    who does is not to be trusted, `OSError` when this process can have no socket.

    `server_uid` is a user besides our own whose server is trusted.
    """

    def __init__(self, path: Path, board: Board, server_uid: int | None = None) -> None:
        with contextlib.ExitStack() as on_failure:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            on_failure.callback(self._socket.close)
            self._socket.setblocking(False)  # a stopped server's backlog may be full
            try:
                self._socket.connect(os.fspath(path))
                self.server: Peer = peer_of(self._socket)
                on_failure.callback(self.server.close)
                check_server(path, self.server.uid, server_uid)  # before it is sent anything
                socket.send_fds(self._socket, [protocol.preface()], [board.fd])
            except OSError as error:
                raise _unavailable(path, error) from error
            on_failure.pop_all()
        self._board = board
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._waiting: dict[int, OnReply] = {}
        self._number = 0
        self._clock_skew_ns = 0
        self.is_lost = False
        self.parting_word: protocol.ErrorReply | None = None
        """What the server said to the connection as a whole, mostly before it closed it."""

    def call(self, make: Callable[[int], protocol.Message], on_reply: OnReply) -> None:
        """Send `make(id)`, with an id of its own. `on_reply` is called by a later `pump`.

        Raises `UsageError` for what cannot be sent, and has then done nothing.
        """
        frame = protocol.encode(make(self._number + 1))
        self._number += 1
        self._waiting[self._number] = on_reply
        self._unsent += frame
        self._flush()

    @property
    def is_flushed(self) -> bool:
        """Whether all that was called is on its way to the server."""
        return not self._unsent and not self.is_lost

    def set_server_clock(self, server_clock_ns: int, asked_ns: int) -> None:
        """Note how far the server's monotonic clock is ahead (time namespaces may differ).

        `asked_ns` is our clock when the server was asked for its own. A server's clock between
        then and now is the same as ours, however long its answer has waited to be read.
        """
        now_ns = time.monotonic_ns()
        is_same = asked_ns <= server_clock_ns <= now_ns
        self._clock_skew_ns = 0 if is_same else server_clock_ns - now_ns

    def heartbeat_age_s(self) -> float:
        """Seconds since the server last wrote its heartbeat."""
        now_ns = time.monotonic_ns() + self._clock_skew_ns
        return (now_ns - self._board.heartbeat_ns) / 1e9

    def is_server_dead(self) -> bool:
        """Whether the server's process has ended, so that it writes no more. Any thread."""
        return self.server.is_dead()

    def pump(self) -> None:
        """Send what is unsent, read what has arrived, run the callbacks."""
        if self.is_lost:
            return
        self._flush()
        while not self.is_lost:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._receive(data)

    def wait(self, timeout_s: float) -> None:
        """Wait until something arrives, or what is unsent can be sent, at most `timeout_s`; then
        `pump`."""
        if not self.is_lost and wait_readable(
            self._socket.fileno(), timeout_s, or_writable=bool(self._unsent)
        ):
            self.pump()

    def close(self) -> None:
        """Close the socket; callbacks still waiting get None."""
        if not self.is_lost:
            self._lose()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies. No callback is run, as nothing has ended."""
        self.is_lost = True
        self._waiting.clear()
        self._socket.close()
        self.server.close()

    def _receive(self, data: bytes) -> None:
        try:
            replies = [protocol.decode_reply(body) for body in self._frames.feed(data)]
        except protocol.MalformedError:
            self._lose()
            return
        for reply in replies:
            on_reply = self._waiting.pop(reply.id, None)
            if on_reply is not None:
                on_reply(reply)
            elif isinstance(reply, protocol.ErrorReply):
                self.parting_word = reply

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self._lose()
        except OSError:
            # Keep what the server may have said before it closed: the next `recv` finds it.
            self._unsent.clear()

    def _lose(self) -> None:
        self.is_lost = True
        with contextlib.suppress(OSError):
            self._socket.close()
        waiting, self._waiting = self._waiting, {}
        for on_reply in waiting.values():
            on_reply(None)


def _unavailable(path: Path, error: OSError) -> ServerUnavailableError:
    if error.errno in OUT_OF_DESCRIPTORS:
        return ServerUnavailableError(
            f"this process has no file descriptors left to connect to {path}",
            "Raise its `ulimit -n`",
        )
    if isinstance(error, PermissionError):
        return ServerUnavailableError(
            f"user {os.geteuid()} may not connect to {path}",
            "Run the engine and the server as the same user, or serve with --allow-uid "
            f"{os.geteuid()} and set lamina.server_uid",
        )
    return ServerUnavailableError(
        f"no Lamina server answers at {path} ({error.strerror})",
        "Start one with `lamina serve`, or correct lamina.socket",
    )
