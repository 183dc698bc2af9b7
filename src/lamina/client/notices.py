"""What a client says in the log: each thing once, and again only after it was well in between."""

from __future__ import annotations

import logging

from lamina import protocol
from lamina.errors import DeviceError, ErrorCode

log = logging.getLogger(__name__)

ALARM_AFTER_S = 1.0
"""Pages quarantined for so long are worth a line in the log."""


class Notices:
    """Those of one client, which its lines name by `label`. Engine's thread only."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._last_trouble = ""
        self._quarantined_since_s: float | None = None
        self._is_alarmed = False
        self._are_stores_late = False
        self._refused: dict[str, set[ErrorCode]] = {}

    def trouble(self, trouble: str) -> None:
        """Why there is no cache, however often it is tried."""
        if trouble != self._last_trouble:
            log.warning("%s goes on without a cache: %s", self._label, trouble)
        self._last_trouble = trouble

    def no_rings(self, error: DeviceError) -> None:
        """What would be faster cannot be had."""
        log.warning("%s has its small pages copied one by one: %s", self._label, error)

    def no_trouble(self) -> None:
        """The cache is there."""
        if self._last_trouble:
            log.info("%s has its cache back", self._label)
            self._last_trouble = ""

    def stores_given_up(self, stores: int, timeout_ms: int) -> None:
        """As many were not done in time; again after a `store_done`."""
        if stores and not self._are_stores_late:
            self._are_stores_late = True
            log.warning(
                "%s has given up %d stores that were not done in %d ms: the server is stopped or "
                "starved, or its link is busy. Continue it, give it a core, or raise "
                "lamina.store_timeout_ms",
                self._label,
                stores,
                timeout_ms,
            )

    def store_done(self) -> None:
        """A store has succeeded, in time."""
        self._are_stores_late = False

    def quarantined(self, retrieves: int, now_s: float) -> None:
        """As many are given up and not over, for a while; and when their pages are back."""
        if not retrieves:
            if self._is_alarmed:
                log.info("%s has its quarantined pages back", self._label)
            self._quarantined_since_s, self._is_alarmed = None, False
        elif self._quarantined_since_s is None:
            self._quarantined_since_s = now_s
        elif not self._is_alarmed and now_s - self._quarantined_since_s > ALARM_AFTER_S:
            self._is_alarmed = True
            log.error(
                "%s has quarantined the pages of %d failed transfers: the server may still write "
                "them until it answers or its process ends. Continue or kill it",
                self._label,
                retrieves,
            )

    def answered(
        self, kind: type[protocol.Message], reply: protocol.Reply | None
    ) -> protocol.ErrorReply | None:
        """The refusal if `reply` to a request of that kind is one, after saying so.

        Each code once, until a request of the kind is granted; None is a lost connection, which
        `trouble` tells of.
        """
        if isinstance(reply, protocol.ErrorReply):
            said = self._refused.setdefault(kind.__name__, set())
            if reply.code not in said:
                said.add(reply.code)
                log.warning(
                    "the server refused a %s of %s: %s. %s",
                    kind.__name__.lower(),
                    self._label,
                    reply.cause,
                    reply.remedy,
                )
            return reply
        if reply is not None:
            self._refused.pop(kind.__name__, None)
        return None
