"""The wire's server end after the greeting: frames in, replies out, no request unanswered.

A connection's requests are taken up in the order in which they came, one after another: the next
one not before the handler of the last has returned, however many turns that took. Replies come as
transfers end.
"""

from __future__ import annotations

import asyncio
import collections.abc
import logging
import re
import typing
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from lamina import protocol
from lamina.errors import ErrorCode, LaminaError, RequestRefusedError, SettingsError
from lamina.frames import FrameBuffer
from lamina.server.sessions import Session
from lamina.server.turns import Turns

log = logging.getLogger(__name__)

Answer = protocol.Reply | Awaitable[protocol.Reply]
"""A reply, or one that comes later."""
Handler = Callable[[Session, Any], Answer | Turns[Answer]]


REQUESTS_PER_TURN = 16
BYTES_PER_TURN = 32 << 10
"""What one connection may have handled before everybody else's turn: about a millisecond. What a
request costs grows with its keys and blocks, so with its bytes; one is handled whatever its size.
"""
MAX_UNANSWERED = 2048
"""Requests of one connection that wait for a lane; above it no more are read until some end. More
than the retrieves and stores that may be in flight, so that a cancel always gets through."""
_LONGEST_CAUSE = 1000
"""Characters; an error may quote what a peer sent."""

_REFUSED_WHEN_STOPPING = (protocol.Register, protocol.Lookup, protocol.Retrieve, protocol.Store)


def handlers_of(service: object) -> dict[type[protocol.Message], Handler]:
    """The method of `service` for every request, named after it (`EndLease` → `end_lease`).

    Raises `SettingsError` naming every request that lacks a method, every public method that no
    request has, and every method with the wrong types: the server then refuses to start.
    """
    wanted = {_method_name(request): request for request in protocol.REPLY_OF}
    methods = {n for n in dir(service) if not n.startswith("_") and callable(getattr(service, n))}
    faults = [f"no handler for {wanted[name].__name__}" for name in wanted.keys() - methods]
    faults += [f"handler {name!r} handles no request" for name in methods - wanted.keys()]
    handlers = {}
    for name in wanted.keys() & methods:
        request = wanted[name]
        handlers[request] = getattr(service, name)
        hints = typing.get_type_hints(getattr(service, name))
        reply = hints.pop("return", None)
        if typing.get_origin(reply) is collections.abc.Generator:  # handled in turns
            reply = typing.get_args(reply)[2]
        if typing.get_origin(reply) is collections.abc.Awaitable:  # answered later
            (reply,) = typing.get_args(reply)
        if list(hints.values()) != [Session, request] or reply is not protocol.REPLY_OF[request]:
            faults.append(
                f"handler {name!r} is not ({Session.__name__}, {request.__name__}) -> "
                f"{protocol.REPLY_OF[request].__name__}"
            )
    if faults:
        raise SettingsError(
            "the server's handlers and the protocol differ: " + "; ".join(sorted(faults)),
            "Change both together",
        )
    return handlers


def _method_name(request: type[protocol.Message]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", request.__name__).lower()


class Connection(asyncio.Protocol):
    """One client after its greeting. Every request gets its reply or a typed error.

    Connections take turns: what was read and is not handled yet waits for the next one. Meanwhile
    nothing more is read, so a flood fills the sender's socket and not the server's memory.
    """

    def __init__(
        self,
        session: Session,
        handlers: dict[type[protocol.Message], Handler],
        is_stopping: Callable[[], bool],
        refused: Callable[[ErrorCode], None],
        lost: Callable[[Session], None],
    ) -> None:
        self._session = session
        self._handlers = handlers
        self._is_stopping = is_stopping
        self._refused = refused
        self._lost = lost
        self._frames = FrameBuffer()
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_read = True  # whether the client reads its replies
        self._is_turn_due = False
        self._in_hand: tuple[int, Turns[Answer]] | None = None
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._session.hang_up = transport.abort
        asyncio.get_running_loop().add_reader(self._session.peer.pidfd, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().remove_reader(self._session.peer.pidfd)
        self._is_lost = True
        if self._in_hand is None:
            self._lost(self._session)

    def pause_writing(self) -> None:
        self._is_read = False  # take no more requests

    def resume_writing(self) -> None:
        self._is_read = True
        self._ask_for_a_turn()

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        self._take_turn()

    def _ask_for_a_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Handle what has come, within the limits of a turn; read on once all of it is handled."""
        self._is_turn_due = False
        requests = nbytes = 0
        try:
            while not self._is_blocked():
                if requests == REQUESTS_PER_TURN or nbytes > BYTES_PER_TURN:
                    self._ask_for_a_turn()
                    break
                body = self._frames.take()
                if body is None:
                    self._transport.resume_reading()
                    return
                requests, nbytes = requests + 1, nbytes + len(body)
                self._dispatch(protocol.decode_request(body))
        except protocol.MalformedError as error:
            self._fail(0, ErrorCode.MALFORMED, str(error), "The connection is closed; reconnect")
            self._transport.close()
        self._transport.pause_reading()

    def _is_blocked(self) -> bool:
        """Whether no request is handled until the one in hand is, or replies are read, or
        transfers end, or ever."""
        return (
            self._in_hand is not None
            or not self._is_read
            or len(self._tasks) >= MAX_UNANSWERED
            or self._transport.is_closing()
        )

    def _dispatch(self, request: protocol.Request) -> None:
        if self._is_stopping() and isinstance(request, _REFUSED_WHEN_STOPPING):
            self._fail(request.id, ErrorCode.STOPPING, "the server stops", "Go on without it")
            return
        try:
            result = self._handlers[type(request)](self._session, request)
        except Exception as error:
            self._explain(request.id, error)
            return
        if isinstance(result, Generator):
            self._in_hand = request.id, result
            self._session.in_hand = not self._handle_a_part()
        else:
            self._answer(request.id, result)

    def _handle_a_part(self) -> bool:
        """Go on with the request in hand; whether that was its last part."""
        assert self._in_hand is not None
        number, work = self._in_hand
        try:
            waits_for = next(work)
        except StopIteration as end:
            self._in_hand = None
            self._answer(number, end.value)
        except Exception as error:
            self._in_hand = None
            self._explain(number, error)
        else:
            if waits_for is None:
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                waits_for.add_done_callback(self._go_on)
        return self._in_hand is None

    def _go_on(self, _: object = None) -> None:
        """A turn of the request in hand, to its end even if nobody waits for its answer any more:
        so nothing of it is left over."""
        if not self._handle_a_part():
            return
        self._session.in_hand = False
        if self._is_lost:
            self._lost(self._session)
        else:
            self._ask_for_a_turn()

    def _answer(self, number: int, answer: Answer) -> None:
        if isinstance(answer, protocol.Message):
            self._reply(answer)
        else:
            task = asyncio.ensure_future(self._answer_later(number, answer))
            self._tasks.add(task)
            task.add_done_callback(self._answered)

    async def _answer_later(self, number: int, result: Awaitable[protocol.Reply]) -> None:
        try:
            self._reply(await result)
        except Exception as error:
            self._explain(number, error)

    def _answered(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if len(self._tasks) == MAX_UNANSWERED - 1:
            self._ask_for_a_turn()

    def _explain(self, number: int, error: Exception) -> None:
        if isinstance(error, RequestRefusedError):
            self._fail(number, error.code, error.cause, error.remedy)
        elif isinstance(error, LaminaError):
            self._fail(number, ErrorCode.BAD_REQUEST, error.cause, error.remedy)
        elif isinstance(error, protocol.MalformedError):
            self._fail(number, ErrorCode.BAD_REQUEST, str(error), "Send what the protocol asks for")
        else:
            log.error("a request of %s failed", self._session, exc_info=error)
            self._fail(number, ErrorCode.INTERNAL, "the server failed", "Look at the server's log")

    def _fail(self, number: int, code: ErrorCode, cause: str, remedy: str) -> None:
        self._refused(code)
        self._reply(protocol.ErrorReply(number, code, cause[:_LONGEST_CAUSE], remedy))

    def _reply(self, reply: protocol.Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(protocol.encode(reply))
