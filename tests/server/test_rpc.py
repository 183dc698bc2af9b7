"""The handlers of the server are those of the protocol, or it does not start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lamina import protocol
from lamina.errors import SettingsError
from lamina.server.rpc import handlers_of
from lamina.server.service import Service
from lamina.server.sessions import Session
from lamina.server.turns import Turns

COMPLETE = {n: method for n, method in vars(Service).items() if not n.startswith("_")}


def service(**changes: Callable[..., Any] | None) -> object:
    """A service with every handler, except for `changes`; None takes one away."""
    methods = {n: method for n, method in {**COMPLETE, **changes}.items() if method is not None}
    made: object = type("ChangedService", (), methods)()
    return made


def faults_of(changed: object) -> list[str]:
    """What a refusal names, one entry a fault."""
    with pytest.raises(SettingsError) as caught:
        handlers_of(changed)
    assert caught.value.remedy == "Change both together"
    intro, _, faults = caught.value.cause.partition(": ")
    assert intro == "the server's handlers and the protocol differ"
    return faults.split("; ")


def test_the_service_has_a_handler_for_every_request() -> None:
    handlers = handlers_of(service())
    assert set(handlers) == set(protocol.REPLY_OF)
    assert {request.__name__: handler.__name__ for request, handler in handlers.items()} == {
        "Hello": "hello",
        "Register": "register",
        "Workers": "workers",
        "Lookup": "lookup",
        "Retrieve": "retrieve",
        "Store": "store",
        "Cancel": "cancel",
        "EndLease": "end_lease",
        "EndRequest": "end_request",
        "Ping": "ping",
        "GetStats": "get_stats",
        "Clear": "clear",
        "EndSession": "end_session",
        "SetLogLevel": "set_log_level",
    }


@pytest.mark.parametrize("request_type", protocol.REPLY_OF, ids=lambda kind: kind.__name__)
def test_a_missing_handler_is_named(request_type: type[protocol.Message]) -> None:
    method = handlers_of(service())[request_type].__name__
    assert faults_of(service(**{method: None})) == [f"no handler for {request_type.__name__}"]


class Right:
    """Handlers of `Ping`."""

    def at_once(self, session: Session, request: protocol.Ping) -> protocol.Pong:
        return protocol.Pong(request.id)

    def later(self, session: Session, request: protocol.Ping) -> Awaitable[protocol.Pong]:
        raise NotImplementedError

    def in_turns(self, session: Session, request: protocol.Ping) -> Turns[protocol.Pong]:
        raise NotImplementedError

    def in_turns_and_later(
        self, session: Session, request: protocol.Ping
    ) -> Turns[Awaitable[protocol.Pong]]:
        raise NotImplementedError


def test_a_public_method_that_no_request_has_is_named() -> None:
    assert faults_of(service(pong=Right.at_once)) == ["handler 'pong' handles no request"]


def test_private_methods_and_values_are_nobodys_handlers() -> None:
    changed = service(_pong=Right.at_once)
    changed.__dict__["answer"] = 42
    assert set(handlers_of(changed)) == set(protocol.REPLY_OF)


class Wrong:
    """Handlers of `Ping` that are not."""

    def other_request(self, session: Session, request: protocol.Clear) -> protocol.Pong:
        return protocol.Pong(request.id)

    def other_reply(self, session: Session, request: protocol.Ping) -> protocol.Done:
        return protocol.Done(request.id)

    def other_later_reply(
        self, session: Session, request: protocol.Ping
    ) -> Awaitable[protocol.Done]:
        raise NotImplementedError

    def other_reply_in_turns(
        self, session: Session, request: protocol.Ping
    ) -> Turns[protocol.Done]:
        raise NotImplementedError

    def no_session(self, request: protocol.Ping) -> protocol.Pong:
        return protocol.Pong(request.id)

    def swapped(self, request: protocol.Ping, session: Session) -> protocol.Pong:
        return protocol.Pong(request.id)

    def one_too_many(self, session: Session, request: protocol.Ping, flag: bool) -> protocol.Pong:
        return protocol.Pong(request.id)

    def untyped(self, session, request):  # type: ignore[no-untyped-def]
        return protocol.Pong(request.id)

    def no_reply(self, session: Session, request: protocol.Ping) -> None: ...


@pytest.mark.parametrize("wrong", [m for name, m in vars(Wrong).items() if name[0] != "_"])
def test_a_handler_with_the_wrong_types_is_named_with_the_right_ones(
    wrong: Callable[..., Any],
) -> None:
    assert faults_of(service(ping=wrong)) == ["handler 'ping' is not (Session, Ping) -> Pong"]


@pytest.mark.parametrize(
    "right", [Right.at_once, Right.later, Right.in_turns, Right.in_turns_and_later]
)
def test_a_handler_may_answer_at_once_or_in_turns_or_later(right: Callable[..., Any]) -> None:
    assert handlers_of(service(ping=right))[protocol.Ping].__name__ == right.__name__


def test_every_fault_is_named_at_once() -> None:
    changed = service(lookup=None, pong=Right.at_once, ping=Wrong.other_reply, end_lease=None)
    assert faults_of(changed) == [
        "handler 'ping' is not (Session, Ping) -> Pong",
        "handler 'pong' handles no request",
        "no handler for EndLease",
        "no handler for Lookup",
    ]
