"""The server's copy stream on a GPU: batches of driver calls that run ahead of the link."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.base import Direction, EngineMemory
from lamina.devices.cuda_memory import CudaMemory
from lamina.errors import DeviceError

_AHEAD_BATCHES = 4
"""Batches enqueued before the oldest must be done: enough that the link never waits for the
host, few enough that a cancelled transfer stops in two or three milliseconds."""
_SHARED_PIECES = 256
"""Fewer are issued (in 0.25 ms) before a second thread has woken up and done its half."""


class Gpu(Protocol):
    """What a stream asks of its GPU."""

    @property
    def can_batch(self) -> bool: ...

    def make_current(self) -> None: ...

    def split(self, copies: CopyList) -> CopyList: ...


class CudaCopyStream:
    """One ordered stream of one direction; used by one thread at a time.

    A driver call costs its thread 0.5 us a piece on an H200, on some hosts 1.0 and more; the link
    takes 0.6 us for 32 KiB. When the link is about to run dry, a second thread issues half of a
    batch on a second stream, which the first then waits for.
    """

    only_enqueues = True

    def __init__(self, device: Gpu, direction: Direction) -> None:
        self._device = device
        self._to_device = direction is Direction.RETRIEVE
        device.make_current()
        self._stream = driver.create_stream()
        self._second = _SecondThread(device)
        self._idle_events: list[int] = []
        self._batches: deque[int] = deque()
        self._marks: deque[tuple[int, int]] = deque()
        self._mark = 0
        self._done = 0

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        self._device.make_current()
        while len(self._batches) >= _AHEAD_BATCHES:
            driver.wait_recorded(self._batches[0])
            self._idle_events.append(self._batches.popleft())
        pieces = self._device.split(copies)
        count = len(pieces.size)
        if count < _SHARED_PIECES or not self._device.can_batch or not self._is_running_dry():
            self._issue(pieces, self._stream)
        else:
            ours, theirs = _parts(pieces, count // 2)
            self._second.begin(partial(self._issue, theirs, self._second.stream))
            try:
                self._issue(ours, self._stream)
            finally:
                self._second.join(self._stream)
        self._batches.append(self._record())

    def _is_running_dry(self) -> bool:
        """Whether nothing is enqueued behind the batch that is on the wire."""
        return len(self._batches) < 2 or driver.is_recorded(self._batches[-2])

    def _issue(self, pieces: CopyList, stream: int) -> None:
        engine, host, size = pieces
        target, source = (engine, host) if self._to_device else (host, engine)
        if self._device.can_batch:
            driver.copy_batch(
                target.ctypes.data,
                source.ctypes.data,
                size.ctypes.data,
                len(size),
                stream,
                to_device=self._to_device,
            )
        else:
            for piece in zip(target.tolist(), source.tolist(), size.tolist(), strict=True):
                driver.copy_one(*piece, stream, to_device=self._to_device)

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        assert isinstance(memory, CudaMemory)
        self._device.make_current()
        driver.write_value(self._stream, memory.word(slot), count & 0xFFFF_FFFF)

    def mark(self) -> int:
        self._device.make_current()
        self._mark += 1
        self._marks.append((self._mark, self._record()))
        return self._mark

    def is_done(self, mark: int) -> bool:
        self._device.make_current()
        while self._marks and driver.is_recorded(self._marks[0][1]):
            self._done, event = self._marks.popleft()
            self._idle_events.append(event)
        return self._done >= mark

    def drain(self) -> None:
        for stream in (self._stream, self._second.stream):
            with contextlib.suppress(DeviceError):  # the context is dead
                self._device.make_current()
                driver.synchronize(stream)

    def _record(self) -> int:
        event = self._idle_events.pop() if self._idle_events else driver.create_event()
        driver.record(event, self._stream)
        return event


class _SecondThread:
    """Issues copies on a stream of its own, beside the thread that uses the `CudaCopyStream`."""

    def __init__(self, device: Gpu) -> None:
        self.stream = driver.create_stream()
        self._device = device
        self._event = driver.create_event()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._results: SimpleQueue[Exception | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, issue: Callable[[], None]) -> None:
        """Run `issue`, which enqueues on `stream`; `join` must follow."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="lamina-second", daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(issue)

    def join(self, stream: int) -> None:
        """Wait until it is enqueued; what follows on `stream` follows it, complete or not.

        Raises the error of `issue`.
        """
        error = self._results.get()
        driver.wait_event(stream, self._event)
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            issue = self._work.get()
            error: Exception | None = None
            try:
                self._device.make_current()
                try:
                    issue()
                finally:
                    self._record()
            except Exception as caught:
                error = caught
            self._results.put(error)

    def _record(self) -> None:
        """What waits for the event waits for all that was issued; without one, wait here."""
        try:
            driver.record(self._event, self.stream)
        except DeviceError:
            driver.synchronize(self.stream)
            raise


def _parts(copies: CopyList, count: int) -> tuple[CopyList, CopyList]:
    """The first `count` pieces, and the rest."""
    return (
        CopyList(*(array[:count] for array in copies)),
        CopyList(*(array[count:] for array in copies)),
    )
