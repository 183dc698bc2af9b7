"""A transfer, from the handler that makes it over its lane to everybody who waits for its end.

It is copied part by part, as its route says (`routes`): a retrieve announces each part on its slot,
and nobody waits for parts of a store. Everything else is the same for both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.board import Board, TransferStatus
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError
from lamina.server.routes import Route


class Slot(NamedTuple):
    """Where a retrieve is announced: a line of the board, and the count that it begins after."""

    number: int
    base: int


@dataclass(eq=False, slots=True)
class Transfer:
    """A retrieve (with a `slot`, for a `request`, into so many `blocks`) or a store on its way; its
    engine may void a store by its `ticket`.

    `number` is its engine's name for it. `begun_s` is by the server's clock. `on_loop` has a call
    made on the event loop; any thread may use it.

    `cancel` may be called by any thread. `end` is called by the lane's thread. So is what `run`
    gives, except that on an idle lane the first batches are enqueued by whoever submits: the
    server's event loop.
    """

    number: int
    memory: EngineMemory
    board: Board
    ticket: int | None
    route: Route
    begun_s: float
    on_loop: Callable[[Callable[[], None]], object]
    slot: Slot | None = None
    request: str | None = None
    blocks: int = 0

    ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set on the event loop: nothing more of it will touch memory, and what follows is final."""
    status: TransferStatus = field(default=TransferStatus.OK, init=False)
    """With OK, all bytes of all parts are in."""
    error: DeviceError | None = field(default=None, init=False)
    nbytes: int = field(default=0, init=False)
    first_slice_us: int = field(default=0, init=False)
    """From its making until the first slice was announced to the stream: with a stream that only
    enqueues, as a GPU's, when it was enqueued and not when it landed."""
    total_us: int = field(default=0, init=False)
    """To the end of the last copy."""

    _made_s: float = field(default_factory=time.perf_counter, init=False)
    _cancelled_as: TransferStatus | None = field(default=None, init=False)
    _tell_cancelled: Callable[[Transfer], object] | None = field(default=None, init=False)
    _enqueued_parts: int = field(default=0, init=False)

    def __str__(self) -> str:
        return f"{'store' if self.slot is None else 'retrieve'} {self.number}"

    def cancel(self, status: TransferStatus = TransferStatus.CANCELLED) -> None:
        """Ask the lane to stop. It is over when it has `ended`."""
        self._cancelled_as = status
        if self._tell_cancelled is not None:
            self._tell_cancelled(self)

    def tell_cancelled(self, tell: Callable[[Transfer], object]) -> None:
        """Have each `cancel` from now on call `tell`, on its own thread; at once if it was
        cancelled already."""
        self._tell_cancelled = tell
        if self._cancelled_as is not None:  # perhaps twice, when both threads meet here
            tell(self)

    @property
    def cancelled_as(self) -> TransferStatus | None:
        """Why the lane is to stop it; None while it is to go on.

        A store that its engine voids is cancelled by that, so that the lane spends no more time on
        it. Whoever makes its chunks findable looks at `is_void` again.
        """
        if self._cancelled_as is None and self.is_void:
            return TransferStatus.CANCELLED
        return self._cancelled_as

    @property
    def is_void(self) -> bool:
        """Whether it is a store that its engine has given up on the board."""
        return self.slot is None and self.ticket is not None and self.board.is_void(self.ticket)

    def is_ready(self) -> bool:
        """Whether its next part may be copied: the engine's earlier work on the pages is done, or a
        ring has room (or nobody needs it)."""
        part = min(self._enqueued_parts, self.route.parts - 1)
        return bool(self.cancelled_as) or self.route.is_ready(part)

    def run(self, stream: CopyStream) -> Iterator[None]:
        """Enqueue everything; yields before each part and each batch, and may be closed there.

        To be resumed only while it `is_ready`.
        """
        for part in range(self.route.parts):
            yield
            for index, batch in enumerate(self.route.batches(part)):
                if index:
                    yield
                stream.copy(self.memory, batch)
                self.nbytes += batch.nbytes
            announcement = self.route.announcement(part)
            if announcement is not None:
                stream.announce(self.memory, *announcement)
            self._enqueued_parts += 1
            self.first_slice_us = self.first_slice_us or _us_since(self._made_s)

    def end(self, error: DeviceError | None) -> None:
        """Nothing more of this transfer will touch memory.

        A retrieve that failed or was cancelled gets its status and then its final count, so that no
        wait of the engine outlives it.
        """
        self.error = error
        if error is not None or self._enqueued_parts < self.route.parts:
            self.status = self.cancelled_as or TransferStatus.COPY_FAILED
        if self.status and self.slot is not None:
            self.board.fail(self.slot.number, self.status, self.slot.base + self.route.parts)
        self.total_us = _us_since(self._made_s)
        self.on_loop(self.ended.set)


def _us_since(reading_s: float) -> int:
    return int((time.perf_counter() - reading_s) * 1e6)
