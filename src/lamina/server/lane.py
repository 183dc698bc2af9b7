"""A lane: the ordered queue of transfers of one device in one direction.

One thread per lane takes transfers one after another, in order of arrival, and runs each to its
end: slices of two transfers never interleave, and nothing overtakes a transfer that has started.
A transfer whose ticket the engine has not written yet holds nobody up: the first one that is ready
goes next. Tickets are read by the CPU; no stream of the server waits for another process.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lamina.board import Board, TransferStatus, reached
from lamina.devices.base import CopyStream, Direction, EngineMemory, ServerDevice
from lamina.errors import DeviceError

log = logging.getLogger(__name__)

_FIRST_POLL_S = 50e-6
_LONGEST_POLL_S = 500e-6
_MAX_YIELD_S = 0.02
"""How long a store lets loads go first before each of its batches."""


class Transfer(ABC):
    """A retrieve or a store on its way. `run` and `end` are called by the lane's thread."""

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
        return self._cancelled_as

    def is_ready(self) -> bool:
        """Whether the engine's earlier work on the pages is done (or nobody needs them)."""
        ticket = self._ticket
        return ticket is None or bool(self._cancelled_as) or reached(self.board.ticket, ticket)

    @abstractmethod
    def run(self, stream: CopyStream) -> Iterator[None]:
        """Enqueue everything; yields before each batch, and may be closed there."""

    @abstractmethod
    def end(self, error: DeviceError | None) -> None:
        """Nothing more of this transfer will touch memory."""


class Lane:
    """One thread that runs transfers on one stream. `submit` and `stop` may be called anywhere."""

    def __init__(self, name: str, stream: CopyStream, yields_to: Lane | None = None) -> None:
        self._stream = stream
        self._yields_to = yields_to
        self._queue: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: Transfer | None = None
        self._in_flight: deque[tuple[int, Transfer, DeviceError | None]] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Transfers that have not ended."""
        return len(self._queue) + (self._running is not None) + len(self._in_flight)

    def submit(self, transfer: Transfer) -> None:
        with self._changed:
            self._idle.clear()
            self._queue.append(transfer)
            self._changed.notify()

    def stop(self) -> None:
        """Run what is queued to its end (cancel it first to be quick), then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            error = None
            try:
                for _ in transfer.run(self._stream):  # before each batch
                    self._retire()
                    self._let_loads_go_first()
                    if transfer.cancelled_as:
                        break
            except DeviceError as caught:
                error = caught
            except Exception:
                log.exception("a transfer broke; its engine recomputes")
                error = DeviceError("the server failed to run the transfer", "See its log")
            try:
                self._in_flight.append((self._stream.mark(), transfer, error))
            except DeviceError as caught:
                transfer.end(error or caught)
            self._running = None
            self._retire()

    def _next(self) -> Transfer | None:
        """The first transfer that is ready; None when the lane is to end."""
        poll_s = _FIRST_POLL_S
        while True:
            self._retire()
            with self._changed:
                for index, transfer in enumerate(self._queue):
                    if transfer.is_ready():
                        del self._queue[index]
                        self._running = transfer
                        return transfer
                if self._queue or self._in_flight:
                    self._changed.wait(poll_s)  # a ticket or a copy is on its way
                    poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)
                    continue
                self._idle.set()
                if self._stopping:
                    return None
                self._changed.wait()
                poll_s = _FIRST_POLL_S

    def _retire(self) -> None:
        """End the transfers whose copies have all taken effect, in order.

        A stream that fails moves nothing more: everything on it has failed.
        """
        try:
            while self._in_flight and self._stream.is_done(self._in_flight[0][0]):
                _, transfer, error = self._in_flight.popleft()
                transfer.end(error)
        except DeviceError as failure:
            while self._in_flight:
                _, transfer, error = self._in_flight.popleft()
                transfer.end(error or failure)

    def _let_loads_go_first(self) -> None:
        if self._yields_to is not None:
            self._yields_to._idle.wait(_MAX_YIELD_S)


class DeviceLanes(NamedTuple):
    """The two lanes of one device."""

    loads: Lane
    stores: Lane


class Lanes:
    """The lanes of every device, made when its first worker registers, shared by all of its."""

    def __init__(self, devices: Mapping[str, ServerDevice]) -> None:
        self.devices = devices
        self._lanes: dict[str, DeviceLanes] = {}

    def near_cpus(self) -> set[int]:
        """The CPUs that the arena's memory should be near to: those of the devices that care."""
        near = [cpus for device in self.devices.values() if (cpus := device.near_cpus())]
        return set().union(*near) or os.sched_getaffinity(0)

    def pin(self, address: int, nbytes: int) -> None:
        """Let every device pin a segment of the arena; on the filler's thread."""
        for device in self.devices.values():
            device.pin(address, nbytes)

    def of(self, device: str) -> DeviceLanes:
        if device not in self._lanes:
            make_stream = self.devices[device].stream
            loads = Lane(f"lamina-load-{device}", make_stream(Direction.LOAD))
            stores = Lane(f"lamina-store-{device}", make_stream(Direction.STORE), yields_to=loads)
            self._lanes[device] = DeviceLanes(loads, stores)
        return self._lanes[device]

    @property
    def queued(self) -> int:
        """Transfers that have not ended, on all lanes."""
        return sum(lane.queued for lanes in self._lanes.values() for lane in lanes)

    def stop(self) -> None:
        for lanes in self._lanes.values():
            lanes.stores.stop()
            lanes.loads.stop()
