"""Every request is answered, however and whenever its handler fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lamina import protocol
from lamina.errors import ErrorCode, GeometryError, refuse
from lamina.server.sessions import Session
from lamina.server.turns import Turns
from tests.e2e.strangers import Stranger
from tests.support.server import ServerThread

Handler = Callable[[Session, protocol.Ping], object]


def at_once(error: Exception) -> Handler:
    def handle(session: Session, request: protocol.Ping) -> protocol.Pong:
        raise error

    return handle


def in_a_turn(error: Exception) -> Handler:
    def handle(session: Session, request: protocol.Ping) -> Turns[protocol.Pong]:
        yield None
        raise error

    return handle


def later(error: Exception) -> Handler:
    def handle(session: Session, request: protocol.Ping) -> Awaitable[protocol.Pong]:
        async def answer() -> protocol.Pong:
            raise error

        return answer()

    return handle


def later_after_a_turn(error: Exception) -> Handler:
    def handle(session: Session, request: protocol.Ping) -> Turns[Awaitable[protocol.Pong]]:
        yield None
        answer: Awaitable[protocol.Pong] = later(error)(session, request)  # type: ignore[assignment]
        return answer

    return handle


@pytest.mark.parametrize("way", [at_once, in_a_turn, later, later_after_a_turn])
@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (refuse("too many", "Ask less", ErrorCode.BUSY), ErrorCode.BUSY, "too many"),
        (GeometryError("does not fit", "Fit"), ErrorCode.BAD_REQUEST, "does not fit"),
        (protocol.MalformedError("no ids"), ErrorCode.BAD_REQUEST, "no ids"),
        (RuntimeError("a fault"), ErrorCode.INTERNAL, "the server failed"),
    ],
)
def test_a_handler_that_fails_is_answered_with_a_typed_error(
    server: ServerThread,
    socket_path: Path,
    way: Callable[[Exception], Handler],
    error: Exception,
    code: ErrorCode,
    cause: str,
) -> None:
    """And the connection goes on."""
    server.server._handlers[protocol.Ping] = way(error)  # type: ignore[assignment]
    stranger = Stranger(socket_path)
    stranger.greet()
    stranger.ask(protocol.Hello(1, "engine", "stranger"))
    stranger.send(protocol.Ping(2), protocol.GetStats(3))
    replies = {reply.id: reply for reply in (stranger.receive(), stranger.receive()) if reply}
    assert isinstance(replies[3], protocol.Stats)
    assert isinstance(refusal := replies[2], protocol.ErrorReply)
    assert (refusal.code, refusal.cause) == (code, cause)
    assert server.server.counters.refused[code.value] == 1
    stranger.close()
