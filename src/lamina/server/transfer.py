"""What a lane runs: a retrieve or a store on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from lamina.board import Board, TransferStatus, reached
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError


class Transfer(ABC):
    """A retrieve or a store on its way.

    `end` is called by the lane's thread. So is what `run` gives, except that on an idle lane the
    first batches are enqueued by whoever submits: the server's event loop.
    """

    def __init__(self, memory: EngineMemory, board: Board, ticket: int | None) -> None:
        self.memory = memory
        self.board = board
        self._ticket = ticket
        self._cancelled_as: TransferStatus | None = None

    def cancel(self, status: TransferStatus = TransferStatus.CANCELLED) -> None:
        """Ask the lane to stop; any thread. It is over when `end` has been called."""
        self._cancelled_as = status

    @property
    def cancelled_as(self) -> TransferStatus | None:
        """Why the lane is to stop it; None while it is to go on."""
        return self._cancelled_as

    def is_ready(self) -> bool:
        """Whether the engine's earlier work on the pages is done (or nobody needs them)."""
        ticket = self._ticket
        return ticket is None or bool(self.cancelled_as) or reached(self.board.ticket, ticket)

    @abstractmethod
    def run(self, stream: CopyStream) -> Iterator[None]:
        """Enqueue everything; yields before each batch, and may be closed there."""

    @abstractmethod
    def end(self, error: DeviceError | None) -> None:
        """Nothing more of this transfer will touch memory."""
