"""A host device with a compute stream of its own, whose commands a test lets run."""

from __future__ import annotations

import threading
from typing import Any

from lamina.board import Board, reached
from lamina.devices.host import HostWorkerDevice
from lamina.devices.host_rings import HostStream


class ComputeDevice(HostWorkerDevice):
    """Waits and events are commands of `compute`."""

    def __init__(self) -> None:
        self.compute = HostStream("compute")

    def event(self, stream: Any = None) -> Any:
        happened = threading.Event()

        def happen() -> bool:
            happened.set()
            return True

        self.compute.enqueue(happen)
        return happened.is_set

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        self.compute.enqueue(lambda: reached(board.landed(slot), count))

    def detach(self, board: Board) -> None:
        self.compute.go_on()
        self.compute.synchronize()
        self.compute.hold()
