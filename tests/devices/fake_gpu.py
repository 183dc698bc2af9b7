"""A GPU that is slow on purpose, in the place of `cuda_driver`: "device" memory is host memory.

What is enqueued stays where it is until somebody waits for it or the test lets a stream `run`; of
all orders in which the GPU may work, the test chooses. Only the calls that Lamina's copies and
boards need are there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from lamina.devices import cuda_driver as driver


class _Work(NamedTuple):
    """`do` says whether it is done; else all that follows on its stream waits with it."""

    do: Callable[[], bool]
    is_copy: bool


class FakeGpu:
    """Any thread may enqueue; the GPU moves on the test's thread."""

    def __init__(self) -> None:
        self.streams: dict[int, deque[_Work]] = {0: deque()}
        """By handle, in the order in which they were made; 0 is the default one."""
        self.allocations: dict[bytes, tuple[int, int]] = {}
        """Of another process, by IPC handle: address and size."""
        self.opened: list[int] = []
        """The mappings that are there."""
        self._pinned: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._latest: dict[int, int] = {}  # the number of each event's last record
        self._recorded: set[int] = set()

    # What a test does

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the driver; its other calls fail where there is none."""
        for name in vars(driver):
            if not name.startswith("_") and hasattr(FakeGpu, name):
                monkeypatch.setattr(driver, name, getattr(self, name))

    def run(self, stream: int) -> None:
        """Let the stream do what it can without the others."""
        while self._step(stream):
            pass

    def copies(self, stream: int) -> int:
        """Batches that are enqueued on the stream."""
        return sum(work.is_copy for work in self.streams[stream])

    # As `cuda_driver`

    def current_device_uuid(self) -> str:
        return "fake"

    def retain_primary_context(self, device: int) -> int:
        return 1

    def set_context(self, context: int) -> None: ...

    def has_batch_copy(self) -> bool:
        return True

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self._pinned, "memory is pinned once"
        self._pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def device_pointer(self, address: int) -> int:
        assert address in self._pinned
        return address

    def open_ipc(self, handle: bytes) -> int:
        address, _ = self.allocations[handle]
        assert address not in self.opened, "a process can open a handle once at a time"
        self.opened.append(address)
        return address

    def close_ipc(self, pointer: int) -> None:
        self.opened.remove(pointer)

    def address_range(self, pointer: int) -> tuple[int, int]:
        return next(found for found in self.allocations.values() if found[0] == pointer)

    def create_stream(self) -> int:
        stream = next(self._numbers)
        self.streams[stream] = deque()
        return stream

    def create_event(self) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        number = self._latest[event] = next(self._numbers)

        def note() -> bool:
            self._recorded.add(number)
            return True

        self._enqueue(stream, note)

    def wait_event(self, stream: int, event: int) -> None:
        number = self._latest.get(event)
        self._enqueue(stream, lambda: number is None or number in self._recorded)

    def is_recorded(self, event: int) -> bool:
        return self._latest[event] in self._recorded

    def wait_recorded(self, event: int) -> None:
        self._work_until(lambda: self.is_recorded(event))

    def synchronize(self, stream: int) -> None:
        self._work_until(lambda: not self.streams[stream])

    def synchronize_context(self) -> None:
        self._work_until(lambda: not any(self.streams.values()))

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        def write() -> bool:
            assert any(0 <= pointer - at < nbytes for at, nbytes in self._pinned.items()), (
                "the GPU writes to memory that is not mapped for it any more"
            )
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        self._enqueue(stream, write)

    def copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, stream: int, *, to_device: bool
    ) -> None:
        pieces = np.stack([_words(array, count) for array in (targets, sources, sizes)], 1).tolist()

        def copy() -> bool:
            for target, source, nbytes in pieces:
                ctypes.memmove(target, source, nbytes)
            return True

        self._enqueue(stream, copy, is_copy=True)

    # How it works

    def _enqueue(self, stream: int, do: Callable[[], bool], is_copy: bool = False) -> None:
        self.streams[stream].append(_Work(do, is_copy))

    def _step(self, stream: int) -> bool:
        """Do the next thing of the stream; False if there is none or it must wait."""
        work = self.streams[stream]
        if not work or not work[0].do():
            return False
        work.popleft()
        return True

    def _work_until(self, condition: Callable[[], bool]) -> None:
        """Do no more than is waited for."""
        while not condition():
            assert any(map(self._step, self.streams)), "the GPU would never come to it"


def _words(address: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
