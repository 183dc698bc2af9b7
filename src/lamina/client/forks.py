"""A forked child holds nothing of its parent's clients open.

All descriptors are close-on-exec. A child that goes on without exec, as a data loader's worker
does, would still keep its parent's connection standing and its board in memory after the parent has
left. So it closes its copies first of all, without a word to the server: the parent goes on with
its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What has descriptors open."""

    def leave_to_parent(self) -> None:
        """Close this process's copies; nothing is sent or written. Called in a forked child."""


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()

no_fork = threading.RLock()
"""Held while descriptors are opened or closed, so that a fork finds them all or none."""


def close_in_children(client: Forkable) -> None:
    """From now on a forked child calls `leave_to_parent`."""
    _open.add(client)


def _leave_to_parent() -> None:
    no_fork.release()
    for client in list(_open):
        client.leave_to_parent()


os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_leave_to_parent
)
