"""A retrieve as the engine sees it: how far it is, how it ended, when its pages are free.

Where the server copies into pages, a retrieve's progress is its slot's count on the board; its end
is acknowledged by the server's reply or proven by the server's death. Between the two it may have
been given up (its waits are ended, its request has failed): its pages and its slot stay taken all
the same.

    in flight ──▶ all landed ──────────────▶ acknowledged: slot and pages are free
        └──────▶ forced (time-out, death) ──▶    "

Through a ring, the engine's own device places what has landed. Its progress is what that device has
counted; its pages are free once its records have been passed, whatever the server does.

    in flight ──▶ all landed ──────────────▶ passed: pages are free ──▶ acknowledged: slot too
        └──────▶ forced (time-out, death) ──▶    "
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from lamina import protocol
from lamina.board import PLACED, Board, TransferStatus, reached
from lamina.errors import UsageError
from lamina.geometry import Slice
from lamina.records import Span


class Retrieve:
    """One retrieve. Its owner is the engine's thread; the watchdog may `force` it.

    `number` names it among the retrieves and stores of its connection."""

    def __init__(
        self,
        number: int,
        request: str,
        board: Board,
        slot: int,
        base: int,
        slices: tuple[Slice, ...],
        deadline_s: float,
        is_server_dead: Callable[[], bool],
    ) -> None:
        self.number = number
        self.request = request
        self.board = board
        self.slot = slot
        self.base = base
        self.slices = slices
        self.deadline_s = deadline_s
        self.is_server_dead = is_server_dead
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused it; its lease has ended then."""
        self.ended: protocol.Retrieved | None = None
        """The server's account of it, once it came."""
        self._acknowledged = False
        self._forced: TransferStatus | None = None
        self._outcome: TransferStatus | None = None  # kept, since the slot is used again
        self._lock = threading.Lock()  # between `force` and giving the slot back, nothing else

    @property
    def final_count(self) -> int:
        """The slot's count once all has landed."""
        return self.base + len(self.slices)

    def awaited(self, slices: int) -> tuple[int, int]:
        """The slot and the count that say that so many slices are in the pages."""
        return self.slot, self.base + slices

    def slice_of(self, layer: int) -> int:
        """The number of the slice that `layer` is in. Raises `UsageError` for a layer that the
        geometry lacks: its slice would never land, and nobody would end a wait for it."""
        first, layers = self.slices[0], self.slices[-1].end_layer
        if not 0 <= layer < layers:
            raise UsageError(
                f"there is no layer {layer} among {layers}",
                "Number layers as the geometry has them, in order of execution",
            )
        return layer // (first.end_layer - first.first_layer)

    @property
    def landed_slices(self) -> int:
        """How many slices are in the pages. Meaningless once `outcome` is a failure."""
        if self._acknowledged:  # the slot is another's, and the board may be gone
            return 0 if self._outcome else len(self.slices)
        landed = (self.board.landed(self.slot) - self.base) & 0xFFFF_FFFF
        return landed if landed <= len(self.slices) else 0

    @property
    def outcome(self) -> TransferStatus | None:
        """None while in flight; OK when every slice has landed; why it failed otherwise.

        A failure is final for the engine, but its pages are free only when `is_over`.
        """
        if self._outcome is None and (self._forced is not None or self._has_ended()):
            # Read in this order: whoever forces the count says so first (`force`), and the server
            # writes the status before it forces the count.
            forced = self._forced
            self._outcome = forced if forced is not None else self.board.status(self.slot)
        return self._outcome

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written to the pages."""
        return self._acknowledged or self.outcome is TransferStatus.OK

    @property
    def is_passed(self) -> bool:
        """Whether the engine's own device is done with it, where it has a part in it."""
        return True

    @property
    def is_acknowledged(self) -> bool:
        """Whether the slot is free too."""
        return self._acknowledged

    def force(self, status: TransferStatus) -> None:
        """End every wait on this retrieve and make it failed; again if the server wrote since.

        Any thread: makes no device call, and its lock is never held across one.
        """
        with self._lock:
            if self._acknowledged or (self._forced is None and self._has_landed()):
                return
            self._forced = self._forced or status
            self.board.announce(self.slot, self.final_count)

    def acknowledge(self) -> None:
        """The server will not write again. Called by `Transfers` only."""
        assert self.outcome is not None, "acknowledged before its final count"
        with self._lock:
            self._acknowledged = True

    def _has_landed(self) -> bool:
        """Whether the count is final, by the server's doing or because it was forced."""
        return reached(self.board.landed(self.slot), self.final_count)

    def _has_ended(self) -> bool:
        return self._has_landed()


class RingRetrieve(Retrieve):
    """One through a retrieve ring, as the records of `span`: slice `i` is there with record
    `lasts[i]`."""

    def __init__(
        self,
        number: int,
        request: str,
        board: Board,
        slot: int,
        base: int,
        slices: tuple[Slice, ...],
        deadline_s: float,
        is_server_dead: Callable[[], bool],
        span: Span,
        lasts: Sequence[int],
    ) -> None:
        super().__init__(number, request, board, slot, base, slices, deadline_s, is_server_dead)
        self.span = span
        self.lasts = lasts
        self.answered = False
        """Whether the server has ended it; its slot is free once it `is_passed` too."""
        self._passed = False

    @property
    def final_count(self) -> int:
        return self.base + len(self.span.shapes)

    def awaited(self, slices: int) -> tuple[int, int]:
        return PLACED, self.span.number(self.lasts[slices - 1])

    @property
    def landed_slices(self) -> int:
        passed = 0
        if not self.is_passed:
            before = self.span.first_number - 1
            passed = (self.board.landed(PLACED) - before) & 0xFFFF_FFFF
        # Then the outcome: records of a retrieve that has failed are passed all the same.
        if (outcome := self.outcome) is not None:
            return 0 if outcome else len(self.slices)
        return bisect_right(self.lasts, passed - 1) if passed <= len(self.span.shapes) else 0

    @property
    def is_over(self) -> bool:
        return self.is_passed

    @property
    def is_passed(self) -> bool:
        self._passed = self._passed or reached(self.board.landed(PLACED), self.span.last_number)
        return self._passed

    def spoil(self, status: TransferStatus) -> None:
        """It is not placed as it should be: make it failed, whatever has landed. Engine's thread,
        before its records are passed."""
        with self._lock:
            self._forced = self._forced or status
            self.board.announce(self.slot, self.final_count)

    def _has_ended(self) -> bool:
        """Whether all of it is placed, or the server says that it will not be."""
        return self.is_passed or self.board.status(self.slot) is not TransferStatus.OK
