"""Which workers this engine has: asked of the server, without waiting, until enough are there."""

from __future__ import annotations

from lamina import protocol
from lamina.client.connection import Connection


class Workers:
    """What one engine's workers say of themselves. Engine's thread only."""

    def __init__(self, ask_every_s: float) -> None:
        self._ask_every_s = ask_every_s
        self._ask_again_s = float("-inf")
        self._is_asking = False
        self._known: tuple[bytes, ...] = ()

    def known(
        self, count: int, connection: Connection | None, now_s: float
    ) -> tuple[bytes, ...] | None:
        """The unlike descriptions of `count` workers or more, in order of registration; None until
        then. A connection that was lost may linger at the server beside the one that follows it.

        Asks over `connection`, one question at a time and one every `ask_every_s`. What it has
        told once it tells again, also when the server is gone.
        """
        if len(self._known) >= count:
            return self._known
        if connection is not None and not self._is_asking and now_s >= self._ask_again_s:
            self._is_asking, self._ask_again_s = True, now_s + self._ask_every_s
            connection.call(protocol.Workers, self._answered)
        return None

    def _answered(self, reply: protocol.Reply | None) -> None:
        self._is_asking = False
        if isinstance(reply, protocol.WorkersKnown):
            unlike = tuple(dict.fromkeys(reply.descriptions))
            self._known = unlike if len(unlike) >= len(self._known) else self._known
