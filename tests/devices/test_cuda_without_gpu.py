"""What the CUDA device does where the driver fails; runs without a GPU."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from lamina.devices import cuda_driver as driver
from lamina.devices.cuda import CudaServerDevice
from lamina.devices.cuda_memory import PinnedSegments
from lamina.devices.cuda_stream import _SecondThread
from lamina.errors import DeviceError

SEGMENT = np.zeros(4096, np.uint8)
NO_MEMORY = DeviceError("the GPU is full", "Free some")


class Gpu:
    """Nothing is enqueued anywhere."""

    can_batch = True

    def make_current(self) -> None: ...

    def split(self, copies: object) -> object:
        return copies


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The driver's calls, which do nothing."""
    made: list[str] = []

    def note(name: str, result: int = 0) -> None:
        def call(*_: object) -> int:
            made.append(name)
            return result

        monkeypatch.setattr(driver, name, call)

    for name in ("create_stream", "create_event", "record", "wait_event", "synchronize", "pin"):
        note(name)
    note("retain_primary_context", 7)
    note("set_context")
    note("has_batch_copy", 1)
    return made


def test_memory_that_no_gpu_can_pin_is_said_once_and_never_raised(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arena's filler calls it: an exception would leave every engine without an arena."""

    def fail(index: int) -> int:
        raise NO_MEMORY

    monkeypatch.setattr(driver, "retain_primary_context", fail)
    pinned = PinnedSegments()
    with caplog.at_level(logging.WARNING, "lamina"):
        for number in range(3):
            CudaServerDevice(0, pinned).pin(SEGMENT.ctypes.data + number, 1)
    assert pinned.incomplete
    assert caplog.text.count("the GPU is full") == 1


def test_a_segment_that_one_gpu_pinned_costs_no_context_on_another(calls: list[str]) -> None:
    pinned = PinnedSegments()
    first, second = CudaServerDevice(0, pinned), CudaServerDevice(1, pinned)
    first.pin(SEGMENT.ctypes.data, SEGMENT.nbytes)
    second.pin(SEGMENT.ctypes.data, SEGMENT.nbytes)
    assert calls.count("retain_primary_context") == 1
    assert calls.count("pin") == 1


def test_a_segment_that_one_gpu_could_not_pin_is_whole_once_another_has(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = PinnedSegments()
    pinned.note_failure(SEGMENT.ctypes.data, NO_MEMORY)
    assert pinned.incomplete
    CudaServerDevice(1, pinned).pin(SEGMENT.ctypes.data, SEGMENT.nbytes)
    assert not pinned.incomplete


@pytest.mark.parametrize("error", [MemoryError(), NO_MEMORY, ZeroDivisionError()])
def test_any_error_of_the_second_thread_reaches_who_joins(
    calls: list[str], error: Exception
) -> None:
    second = _SecondThread(Gpu())  # type: ignore[arg-type]

    def issue() -> None:
        raise error

    second.begin(issue)
    with pytest.raises(type(error)):
        second.join(1)
    second.begin(lambda: None)
    second.join(1)


def test_without_an_event_the_second_thread_waits_itself(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the event's last record would not wait for these copies."""
    second = _SecondThread(Gpu())  # type: ignore[arg-type]

    def fail(*_: int) -> None:
        raise NO_MEMORY

    monkeypatch.setattr(driver, "record", fail)
    second.begin(lambda: None)
    with pytest.raises(DeviceError):
        second.join(1)
    assert "synchronize" in calls


def test_a_second_thread_that_cannot_start_leaves_nobody_waiting(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = _SecondThread(Gpu())  # type: ignore[arg-type]

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            second.begin(lambda: None)
    second.begin(lambda: None)
    second.join(1)
