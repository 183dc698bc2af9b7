"""Batches that two threads issue: whole, in order, and over when they are said to be."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.base import Direction
from lamina.devices.cuda import CudaServerDevice
from lamina.devices.cuda_memory import PinnedSegments
from lamina.devices.cuda_stream import CudaCopyStream
from lamina.errors import DeviceError
from lamina_lab.known.content import POISON, Pages, equal_layers
from lamina_lab.known.memory import CudaKvSpace
from tests.support.lane import NoMemory
from tests.support.wait import eventually

PIECE_BYTES, PIECES = 32 << 10, 512


class Pieces:
    """Host memory to copy from, GPU memory to copy to, and how."""

    def __init__(self) -> None:
        self.space = CudaKvSpace(equal_layers(1, PIECE_BYTES), PIECES)
        self.device = CudaServerDevice(0, PinnedSegments())
        self.stream = CudaCopyStream(self.device, Direction.RETRIEVE)
        rng = np.random.default_rng(0)
        self.host = rng.integers(0, 256, PIECES * PIECE_BYTES, np.uint8)
        self.device.pin(self.host.ctypes.data, self.host.nbytes)
        offsets = np.arange(PIECES, dtype=np.int64) * PIECE_BYTES
        self.order = rng.permutation(PIECES)
        self.copies = CopyList(
            self.space.addresses[0] + offsets,
            self.host.ctypes.data + offsets[self.order],
            np.full(PIECES, PIECE_BYTES, np.int64),
        )

    def wait(self) -> None:
        mark = self.stream.mark()
        eventually(lambda: self.stream.is_done(mark))

    def read(self) -> Pages:
        return self.space.read(0, range(PIECES)).reshape(PIECES, -1)


@pytest.fixture
def pieces() -> Iterator[Pieces]:
    pieces = Pieces()
    assert pieces.device.can_batch
    yield pieces
    driver.unpin(pieces.host.ctypes.data)


def test_a_batch_issued_by_two_threads_is_whole_once_its_mark_is_done(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    copy_batch = driver.copy_batch

    def note(*arguments: int, to_device: bool) -> None:
        threads.append(threading.current_thread().name)
        copy_batch(*arguments, to_device=to_device)

    monkeypatch.setattr(driver, "copy_batch", note)
    for _ in range(20):
        pieces.space.poison(range(PIECES))
        pieces.stream.copy(NoMemory(), pieces.copies)
        pieces.wait()
        expected = pieces.host.reshape(PIECES, -1)[pieces.order]
        assert np.array_equal(pieces.read(), expected)
    assert threads.count("lamina-second") == 20, "an idle link was not fed by two threads"


def test_a_fault_of_the_second_thread_is_an_error_of_the_copy(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_batch = driver.copy_batch

    def break_second(*arguments: int, to_device: bool) -> None:
        if threading.current_thread().name == "lamina-second":
            raise DeviceError("the second half failed", "See the driver's log")
        copy_batch(*arguments, to_device=to_device)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "copy_batch", break_second)
        with pytest.raises(DeviceError, match="the second half failed"):
            pieces.stream.copy(NoMemory(), pieces.copies)
    pieces.wait()
    pieces.space.poison(range(PIECES))
    pieces.stream.copy(NoMemory(), pieces.copies)
    pieces.wait()
    assert np.array_equal(pieces.read(), pieces.host.reshape(PIECES, -1)[pieces.order])


def test_a_fault_of_the_first_thread_leaves_nothing_of_the_second_behind(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half is not given up: the transfer ends only once that has landed too."""
    copy_batch = driver.copy_batch

    def break_first(*arguments: int, to_device: bool) -> None:
        if threading.current_thread().name != "lamina-second":
            raise DeviceError("the first half failed", "See the driver's log")
        copy_batch(*arguments, to_device=to_device)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "copy_batch", break_first)
        with pytest.raises(DeviceError, match="the first half failed"):
            pieces.stream.copy(NoMemory(), pieces.copies)
    pieces.wait()
    landed = pieces.read()
    expected = pieces.host.reshape(PIECES, -1)[pieces.order]
    assert np.array_equal(landed[PIECES // 2 :], expected[PIECES // 2 :])
    assert (landed[: PIECES // 2] == POISON).all()
