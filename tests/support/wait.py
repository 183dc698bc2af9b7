"""Waiting for another thread or process, in the one place where tests may poll."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 20.0
PATIENT: dict[str, Any] = {
    f"{limit}_ms": 30_000
    for limit in (
        "connect_timeout",
        "lookup_timeout",
        "retrieve_timeout",
        "store_timeout",
        "suspect_after",
    )
}
"""Client settings for a host however busy: no limit runs out before the test's own patience."""


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Poll until `condition` holds; fail when it does not within `patience_s`."""
    until_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until_s, "what the test waits for did not happen"
        time.sleep(0.0005)
