"""Epochs: what was stored before a reset is not found after it, nor is KV of other weights.

An engine begins in the epoch "". A reset of vLLM's caches suspends it, since a change of weights
comes with one, until the worker's side has looked at the weights in memory:

    as they were at the start, nothing to forget    the same epoch goes on
    others                                          one that is named by them
    the connector was to forget too                 one that counts how often
    they cannot be looked at                        one that nobody else has

Ranks of one engine that have the same weights, and were reset as often, are in the same epoch.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

_RANK = re.compile(r"_dp\d+$")
"""What vLLM appends to the engine's identifier for each data-parallel rank."""


class Epochs:
    """The epoch of an engine's new requests; on the engine's thread."""

    def __init__(self, engine: str) -> None:
        self._engine = _RANK.sub("", engine)
        self._forgotten = 0
        self._is_watched: bool | None = None
        self.current: str | None = ""
        """None while it is not known."""
        self.resets = 0
        """Names the reset about which the worker's side is asked."""

    def watched(self, is_watched: bool) -> None:
        """Whether the worker's side can look at the weights."""
        self._is_watched = is_watched
        if self.current is None and not is_watched:
            self.current = secrets.token_hex(16)

    def reset(self, forget: bool) -> None:
        """vLLM's prefix cache was reset; with `forget` the connector's too."""
        self.resets += 1
        self._forgotten += forget
        self.current = secrets.token_hex(16) if self._is_watched is False else None

    def looked(self, reset: int, changes: Sequence[str | None]) -> None:
        """What the ranks say of their weights after a reset (`LoadedWeights.change`)."""
        if reset != self.resets or self.current is not None:
            return
        if None in changes:
            self.current = secrets.token_hex(16)
            return
        weights = ",".join(sorted({change for change in changes if change}))
        forgotten = f"{self._engine} {self._forgotten}" if self._forgotten else ""
        self.current = f"{weights} {forgotten}" if weights or forgotten else ""
