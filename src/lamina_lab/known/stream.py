"""A compute stream on the host, that stands still unless told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lamina.board import Board
from lamina.devices.host import HostWorkerDevice


class StreamDevice(HostWorkerDevice):
    """A host device with a compute stream: what is enqueued happens when `compute` is called, or
    at once while the stream `is_running` by itself."""

    def __init__(self, is_running: bool = False) -> None:
        self.is_running = is_running
        self._enqueued: list[Callable[[], None]] = []

    def enqueue(self, work: Callable[[], None]) -> None:
        self._enqueued.append(work)
        if self.is_running:
            self.compute()

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        self.enqueue(lambda: HostWorkerDevice.write_ticket(self, board, ticket))

    def event(self, stream: Any = None) -> Any:
        happened = threading.Event()
        self.enqueue(happened.set)
        return happened.is_set

    def detach(self, board: Board) -> None:
        self.compute()

    def compute(self) -> None:
        """Do all that is enqueued, in order."""
        while self._enqueued:
            self._enqueued.pop(0)()

    def run(self) -> None:
        """Run by itself from here."""
        self.is_running = True
        self.compute()
