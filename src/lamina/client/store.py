"""A store as the engine sees it.

A store only reads its pages. The board's word that it is void gives it up: then its pages are free
at once, because the server publishes nothing of what it read, whether or not it is heard of again.

    in flight ──▶ acknowledged: pages are free, its chunks are found
        └──────▶ given up: pages are free, its chunks are found if they were before

Through a ring its pages are free as soon as they are gathered, and its end follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lamina import protocol
from lamina.board import Board
from lamina.geometry import BlockIds
from lamina.records import Span


class Ticket(NamedTuple):
    """A number that the engine's compute stream writes to `board`; None where nobody reads it.
    With rings, `event` stands for what is enqueued on the stream so far."""

    number: int
    board: Board | None
    event: Any = None


class Store:
    """One store; the pages are the engine's again once `is_over`. `number` is as a retrieve's."""

    def __init__(self, number: int, chunks: int, ticket: int, deadline_s: float) -> None:
        self.number = number
        self.chunks = chunks
        self.ticket = ticket
        self.deadline_s = deadline_s
        self.ended: protocol.Stored | None = None
        """The server's account of it, once it came; late, if the store was given up."""
        self.refusal: protocol.ErrorReply | None = None
        """Why the server refused it: nothing was stored."""
        self.given_up = False
        """Whether the engine did not wait for its end. It is over all the same."""
        self.is_over = False
        """Whether its pages are the engine's again."""
        self.is_settled = False
        """Whether no more will be heard of it: it was answered, given up, or lost."""


class RingStore(Store):
    """One through a store ring: the blocks, by group, that are gathered into the records of
    `span`."""

    def __init__(
        self,
        number: int,
        chunks: int,
        ticket: Ticket,
        deadline_s: float,
        span: Span,
        block_ids: Sequence[BlockIds],
    ) -> None:
        super().__init__(number, chunks, ticket.number, deadline_s)
        self.span = span
        self.block_ids = block_ids
        self.event = ticket.event
        self.enqueued = 0
        """Records whose gathering is enqueued."""
        self.answered = False
        """Whether the server reads nothing of it any more."""
