"""How the bytes of a transfer go between chunks and an engine's memory, part by part.

A *part* is what one count announces. Directly, a part is a slice: pieces between chunks and pages.
Through a ring, it is a record: one range of the arena a chunk. A lane asks whether a part may be
copied yet; what it waits for is always the engine's doing, so a lane never waits: it looks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lamina.board import DRAINED, GATHERED, PLACED, Board, reached
from lamina.copies import CopyList, CopyPlan, batches
from lamina.errors import refuse
from lamina.geometry import Geometry, Int64Array, Slice
from lamina.protocol import RingPlace
from lamina.records import MAX_POSITION, Shape, Span, fingerprint, lay_out


class Announcement(NamedTuple):
    """A count that follows a part: the slot of the board it is written to, and the count."""

    slot: int
    value: int


class Route(Protocol):
    """Used by the lane's thread, and by the event loop while the lane is idle."""

    @property
    def parts(self) -> int:
        """How many there are, in order."""

    def is_ready(self, part: int) -> bool:
        """Whether the engine has done what must come before the part is copied."""

    def batches(self, part: int) -> Iterator[CopyList]:
        """The part's copies."""

    def announcement(self, part: int) -> Announcement | None:
        """What follows the part's copies."""


class DirectRoute:
    """Between chunks and pages; a retrieve (with a `slot`) announces every slice after `base`. With
    a `ticket`, nothing is copied before the board's ticket reaches it."""

    def __init__(
        self,
        plan: CopyPlan,
        slices: Sequence[Slice],
        board: Board,
        ticket: int | None,
        slot: int | None = None,
        base: int = 0,
    ) -> None:
        self._plan = plan
        self._slices = slices
        self._board = board
        self._ticket = ticket
        self._slot = slot
        self._base = base
        self.parts = len(slices)

    def is_ready(self, part: int) -> bool:
        ticket = self._ticket
        return part > 0 or ticket is None or reached(self._board.ticket, ticket)

    def batches(self, part: int) -> Iterator[CopyList]:
        layers = self._slices[part]
        return self._plan.batches(layers.first_layer, layers.end_layer)

    def announcement(self, part: int) -> Announcement | None:
        if self._slot is None:
            return None
        return Announcement(self._slot, self._base + part + 1)


class Ring:
    """One ring of a worker, as the server sees it: where it is and what was last put into it.

    The event loop has transfers `join`; the lane of its direction does the rest.
    """

    def __init__(self, address: int, nbytes: int, board: Board) -> None:
        self.address = address
        self.nbytes = nbytes
        self.board = board
        self._next_number = 1
        self._end_position = 0
        self._filled: deque[tuple[int, int]] = deque()  # number and position, not placed yet

    def check(self, cut: Sequence[Shape], place: RingPlace) -> None:
        """Raise `RequestRefusedError` where a transfer would reach back, or is cut otherwise by its
        engine."""
        number, position = place.number, place.position
        if not (
            0 <= number < 2**32
            and reached(number, self._next_number)
            and self._end_position <= position < MAX_POSITION
        ):
            raise refuse(
                f"a transfer joins its ring as record {number} at {position}, but the next is "
                f"{self._next_number} at {self._end_position}",
                "Number the records of a ring in the order of their transfers",
            )
        if fingerprint(cut) != place.cut:
            raise refuse(
                f"the engine cuts a transfer otherwise than into the {len(cut)} records here",
                "Run the same Lamina version in the engine and in the server",
            )

    def join(self, cut: Sequence[Shape], place: RingPlace) -> Span:
        """Lay a transfer out. Raises as `check`."""
        self.check(cut, place)
        span = lay_out(cut, place.number, place.position, self.nbytes)
        self._next_number = (span.last_number + 1) & 0xFFFF_FFFF
        self._end_position = span.end_position
        return span

    def address_of(self, span: Span, index: int) -> int:
        """Where a record lies in the server's addresses."""
        return self.address + span.positions[index] % self.nbytes

    def has_room(self, span: Span, index: int) -> bool:
        """Whether every record whose bytes this one takes over has been placed."""
        position = span.positions[index] + span.shapes[index].nbytes - self.nbytes
        while self._filled and reached(self.board.landed(PLACED), self._filled[0][0]):
            self._filled.popleft()
        return not self._filled or self._filled[0][1] >= position

    def note_filled(self, span: Span, index: int) -> None:
        self._filled.append((span.number(index), span.positions[index]))


class RecordRows:
    """The copies of the records of some chunks. `rows` are the positions, among the chunks that the
    records hold, of those at `addresses`; the others' bytes are left alone."""

    def __init__(
        self, geometry: Geometry, addresses: Iterable[int], rows: Iterable[int] | None = None
    ) -> None:
        self._offsets = geometry.layer_offsets
        self._addresses: Int64Array = np.asarray(addresses, np.int64)
        count = len(self._addresses)
        self._rows = (
            np.arange(count, dtype=np.int64) if rows is None else np.asarray(rows, np.int64)
        )

    def batches(self, shape: Shape, record_address: int) -> Iterator[CopyList]:
        """The copies of one record, in order of rows."""
        first, end = np.searchsorted(self._rows, (shape.first_chunk, shape.end_chunk))
        if first == end:
            return
        within = self._rows[first:end] - shape.first_chunk
        yield from batches(
            CopyList(
                record_address + within * shape.chunk_stride_bytes,
                self._addresses[first:end] + int(self._offsets[shape.first_layer]),
                np.full(end - first, shape.chunk_stride_bytes, np.int64),
            )
        )


class RetrieveRoute:
    """Of a retrieve, into a retrieve ring: record `i` is announced as `base + i + 1` on `slot`."""

    def __init__(self, ring: Ring, span: Span, rows: RecordRows, slot: int, base: int) -> None:
        self._ring = ring
        self._span = span
        self._rows = rows
        self._slot = slot
        self._base = base
        self.parts = len(span.shapes)

    def is_ready(self, part: int) -> bool:
        return self._ring.has_room(self._span, part)

    def batches(self, part: int) -> Iterator[CopyList]:
        self._ring.note_filled(self._span, part)
        return self._rows.batches(self._span.shapes[part], self._ring.address_of(self._span, part))

    def announcement(self, part: int) -> Announcement:
        return Announcement(self._slot, self._base + part + 1)


class StoreRoute:
    """Of a store, out of a store ring: each record once it is gathered, then counted as drained,
    also where none of its chunks is wanted."""

    def __init__(self, ring: Ring, span: Span, rows: RecordRows) -> None:
        self._ring = ring
        self._span = span
        self._rows = rows
        self.parts = len(span.shapes)

    def is_ready(self, part: int) -> bool:
        return reached(self._ring.board.landed(GATHERED), self._span.number(part))

    def batches(self, part: int) -> Iterator[CopyList]:
        return self._rows.batches(self._span.shapes[part], self._ring.address_of(self._span, part))

    def announcement(self, part: int) -> Announcement:
        return Announcement(DRAINED, self._span.number(part))
