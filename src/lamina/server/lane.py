"""A lane: the ordered queue of transfers of one device in one direction.

One thread per lane takes transfers one after another and runs each to its end: slices of two
transfers never interleave, and nothing overtakes a transfer that has started, but where the ring of
its worker stays full: it is put aside then, until that has room, and others go on. On a lane with
nothing to do, the thread that submits enqueues the first batches itself: until the lane's own
thread has woken up, they keep the link busy. Workers take turns (`FairQueue`). Tickets are read by
the CPU; no stream of the server waits for another process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from lamina.devices.base import CopyStream, Direction, EngineMemory, ServerDevice
from lamina.errors import DeviceError
from lamina.server.fair_queue import FairQueue
from lamina.server.transfer import Transfer

log = logging.getLogger(__name__)

_FIRST_POLL_S = 50e-6
_LONGEST_POLL_S = 500e-6
_MAX_YIELD_S = 0.02
"""How long a store lets retrieves go first before each of its batches."""
_MAX_ROOM_S = 0.002
"""How long a lane stays with a transfer whose ring is full: an engine that computes places a record
within a millisecond or two, and to change over costs more than that."""
_SUBMITTED_BATCHES = 2
"""Batches that `submit` enqueues: 0.3 ms of link, time enough for a thread to wake up."""


class _State(Enum):
    """Of a transfer that is being enqueued."""

    GOING = "can go on"
    FULL = "waits until its worker's ring has room"
    ENDED = "is at its end, however it came"


class _Run:
    """A transfer being enqueued, batch by batch."""

    def __init__(self, transfer: Transfer, stream: CopyStream) -> None:
        self.transfer = transfer
        self.error: DeviceError | None = None
        self._batches = transfer.run(stream)

    def step(self) -> _State:
        """Go on to just before the next batch, if the engine is ready for that."""
        try:
            if not self.transfer.cancelled_as:
                if not self.transfer.is_ready():
                    return _State.FULL
                next(self._batches)
                return _State.GOING
        except StopIteration:
            pass
        except DeviceError as caught:
            self.error = caught
        except Exception:
            log.exception("%s broke; its engine recomputes", self.transfer)
            self.error = DeviceError("the server failed to run the transfer", "See its log")
        return _State.ENDED


class Lane:
    """One thread that runs transfers on one stream. `submit` and `stop` may be called anywhere.

    The stream belongs to whoever runs a transfer (`_running`), else to who holds `_changed`.
    """

    def __init__(self, name: str, stream: CopyStream, yields_to: Lane | None = None) -> None:
        self._stream = stream
        self._yields_to = yields_to
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: _Run | None = None
        self._aside: dict[EngineMemory, _Run] = {}
        """Begun, and put aside while their workers' rings are full; one a worker."""
        self._in_flight: deque[tuple[int, Transfer, DeviceError | None]] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Transfers that have not ended."""
        running = (self._running is not None) + len(self._aside)
        return len(self._queue) + running + len(self._in_flight)

    def submit(self, transfer: Transfer) -> None:
        with self._changed:
            # While the lane runs a transfer, it alone may ask whether another is ready: to look at
            # a ring's records is to note which are placed.
            if self._running is None and transfer.is_ready():
                self._idle.clear()
            if self._can_begin_at_once(transfer):
                run = self._running = _Run(transfer, self._stream)
                for _ in range(1 + _SUBMITTED_BATCHES):  # the first step comes before any batch
                    if run.step() is not _State.GOING:
                        break
            else:
                self._queue.append(transfer)
            self._changed.notify()

    def stop(self) -> None:
        """Run what is queued to its end (cancel it first to be quick), then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _can_begin_at_once(self, transfer: Transfer) -> bool:
        return (
            self._stream.only_enqueues
            and self._yields_to is None
            and not self.queued
            and transfer.is_ready()
        )

    def _work(self) -> None:
        while (run := self._next()) is not None:
            while (state := self._step(run)) is _State.GOING:
                self._retire()
                self._let_retrieves_go_first()
            with self._changed:
                if state is _State.FULL:
                    self._aside[run.transfer.memory] = run
                    self._running = None
                    continue
                try:
                    self._in_flight.append((self._stream.mark(), run.transfer, run.error))
                except DeviceError as caught:
                    self._stream.drain()
                    run.transfer.end(run.error or caught)
                self._running = None

    def _step(self, run: _Run) -> _State:
        """A step of the transfer; one whose ring is full has some time to get room."""
        until_s = time.monotonic() + _MAX_ROOM_S
        while (state := run.step()) is _State.FULL and time.monotonic() < until_s:
            self._retire()
            time.sleep(_FIRST_POLL_S)
        return state

    def _next(self) -> _Run | None:
        """What was begun already, or the first transfer that is ready; None at the lane's end."""
        poll_s = _FIRST_POLL_S
        with self._changed:
            while self._running is None:
                self._retire()
                if (aside := self._take_aside()) is not None:
                    self._idle.clear()
                    self._running = aside
                    continue
                if (ready := self._queue.take_ready(self._aside)) is not None:
                    self._idle.clear()
                    self._running = _Run(ready, self._stream)
                    continue
                if not self._in_flight:
                    self._idle.set()  # also while tickets are waited for: the link has no work
                if self._queue or self._in_flight or self._aside:
                    self._changed.wait(poll_s)  # a ticket or a copy is on its way
                    poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)
                elif self._stopping:
                    return None
                else:
                    self._changed.wait()
                    poll_s = _FIRST_POLL_S
            return self._running

    def _take_aside(self) -> _Run | None:
        """A transfer that was put aside and can go on, or end; the one that waits longest."""
        for memory, run in self._aside.items():
            if run.transfer.is_ready():
                return self._aside.pop(memory)
        return None

    def _retire(self) -> None:
        """End the transfers whose copies have all taken effect, in order.

        When the stream fails, everything on it has failed, and ends once it moves nothing more.
        """
        try:
            while self._in_flight and self._stream.is_done(self._in_flight[0][0]):
                _, transfer, error = self._in_flight.popleft()
                transfer.end(error)
        except DeviceError as failure:
            self._stream.drain()
            while self._in_flight:
                _, transfer, error = self._in_flight.popleft()
                transfer.end(error or failure)

    def _let_retrieves_go_first(self) -> None:
        if self._yields_to is not None:
            self._yields_to._idle.wait(_MAX_YIELD_S)


class DeviceLanes(NamedTuple):
    """The two lanes of one device."""

    retrieves: Lane
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
            to_retrieve, to_store = map(self.devices[device].stream, Direction)  # before any thread
            retrieves = Lane(f"lamina-retrieve-{device}", to_retrieve)
            stores = Lane(f"lamina-store-{device}", to_store, yields_to=retrieves)
            self._lanes[device] = DeviceLanes(retrieves, stores)
        return self._lanes[device]

    @property
    def queued(self) -> int:
        """Transfers that have not ended, on all lanes."""
        return sum(lane.queued for lanes in self._lanes.values() for lane in lanes)

    def stop(self) -> None:
        for lanes in self._lanes.values():
            lanes.stores.stop()
            lanes.retrieves.stop()
