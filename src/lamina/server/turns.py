"""Long work in turns: a part of it, then everybody else's turn on the event loop.

The loop beats for every engine (`Sessions.beat`), so no request may keep it for long: not one of
65,536 keys, not a clear, not an engine that leaves with a thousand leases. Such work is a generator
that yields after a part. Between two parts any other handler may run: what was found before has to
be pinned, or looked at again.

    Connection   runs the parts of its request in hand, and no other request of it meanwhile
    in_turns     runs the parts of what a coroutine waits for
    Chores       runs the parts of what nobody waits for
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Turns = Generator[asyncio.Future[Any] | None, None, _T]
"""Yields None where others have their turn, or a future that it waits for; returns the result."""

CHUNKS_PER_TURN = 128
"""Chunks that one part of a work makes room for, makes findable or evicts: 4 to 10 µs each."""
KEYS_PER_TURN = 2048
"""Keys that one part checks, looks up, pins or unpins: 0.1 to 0.5 µs each."""


class Pace:
    """Counts what a work has done since its last turn; its unit is one of `CHUNKS_PER_TURN`."""

    def __init__(self) -> None:
        self._left = CHUNKS_PER_TURN

    def is_spent(self, steps: int = 1) -> bool:
        """Count steps; whether the turn is over with them, and then the next one begins."""
        self._left -= steps
        if self._left > 0:
            return False
        self._left = CHUNKS_PER_TURN
        return True


def parts(items: Sequence[_T], are_chunks: bool = False) -> Iterator[Sequence[_T]]:
    """Cut into what one turn may do, in order: `KEYS_PER_TURN`, or `CHUNKS_PER_TURN`."""
    length = CHUNKS_PER_TURN if are_chunks else KEYS_PER_TURN
    for first in range(0, len(items), length):
        yield items[first : first + length]


def each_part(
    items: Sequence[_T], call: Callable[[Sequence[_T]], object], are_chunks: bool = False
) -> Turns[None]:
    """Call with one of the `parts` a turn."""
    for number, part in enumerate(parts(items, are_chunks)):
        if number:
            yield None
        call(part)


def at_once(work: Turns[_T]) -> _T:
    """Run a work in one go, where no event loop has to go on. It must not wait for a future."""
    while True:
        try:
            waits_for = next(work)
        except StopIteration as end:
            result: _T = end.value
            return result
        assert waits_for is None, "a work that waits cannot be run in one go"


async def in_turns(work: Turns[_T]) -> _T:
    """Run a work on the event loop, with everybody else's turn after each part."""
    while True:
        try:
            waits_for = next(work)
        except StopIteration as end:
            result: _T = end.value
            return result
        if waits_for is None:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(Exception):  # the work asks the future itself
                await waits_for


class Chores:
    """Works that nobody waits for, one after another. Used by the server's event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[Turns[None]] = deque()
        self._added = asyncio.Event()

    def add(self, work: Turns[None]) -> None:
        """Do the first part now and the others, if there are any, in later turns."""
        if next(work, _Done) is not _Done:
            self._waiting.append(work)
            self._added.set()

    def backlog(self) -> Turns[None]:
        """Takes its turns until what was added before now is done."""
        last = self._waiting[-1] if self._waiting else None
        while last in self._waiting:
            yield None

    async def run(self) -> None:
        """Do what is added, for ever."""
        while True:
            await self._added.wait()
            while self._waiting:
                try:
                    await in_turns(self._waiting[0])
                except Exception:  # one that breaks must not keep the others' pins
                    log.exception("work after a request broke")
                self._waiting.popleft()
            self._added.clear()


class _Done:
    """What a work that is done has for its next part."""
