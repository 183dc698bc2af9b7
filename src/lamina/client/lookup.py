"""Lookups: how much of a prompt the server holds, asked without waiting for the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lamina import protocol
from lamina.client.connection import Connection
from lamina.client.notices import Notices


class LookupResult(NamedTuple):
    """`chunks` chunks of the prompt are pinned under `lease`; both 0 for a miss."""

    chunks: int
    lease: int


MISS = LookupResult(0, 0)


class Lookup:
    """One lookup. `result` is None until the answer is in, the connection is lost or time is up.

    A late answer's lease is given back, so that nothing stays pinned for nobody. Engine's thread.
    """

    def __init__(
        self,
        connection: Connection | None,
        request: str,
        keys: tuple[bytes, ...],
        deadline_s: float,
        clock: Callable[[], float],
        notices: Notices,
    ) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._clock = clock
        self._notices = notices
        self._result: LookupResult | None = None
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused to answer; the result is a miss then."""
        if connection is None or not keys:
            self._result = MISS
        else:
            connection.call(lambda number: protocol.Lookup(number, request, keys), self._answered)

    @property
    def result(self) -> LookupResult | None:
        """Reads what has arrived, polled or not, and never blocks. A miss when nobody was asked."""
        if self._result is None and self._connection is not None:
            self._connection.pump()
        if self._result is None and self._clock() >= self._deadline_s:
            self._result = MISS
        return self._result

    @property
    def is_lost(self) -> bool:
        """Whether nobody was asked, or the connection is gone: so is the lease."""
        return self._connection is None or self._connection.is_lost

    def wait(self, timeout_s: float) -> LookupResult | None:
        """Wait up to `timeout_s` for the answer."""
        until_s = self._clock() + timeout_s
        while self.result is None and (left_s := until_s - self._clock()) > 0:
            assert self._connection is not None
            self._connection.wait(left_s)
        return self.result

    def _answered(self, reply: protocol.Reply | None) -> None:
        self.refusal = self._notices.answered(protocol.Lookup, reply)
        found = (
            LookupResult(reply.chunks, reply.lease) if isinstance(reply, protocol.Found) else MISS
        )
        if self._result is None:
            self._result = found
        elif found.lease and self._connection is not None:
            lease = found.lease
            self._connection.call(lambda number: protocol.EndLease(number, lease), lambda _: None)
