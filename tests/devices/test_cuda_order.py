"""The CUDA device's order of things, on a GPU that does nothing before it is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.base import Direction
from lamina.devices.cuda import CudaServerDevice, CudaWorkerDevice
from lamina.devices.cuda_memory import OFFSET, CudaMemory, PinnedSegments
from lamina.devices.cuda_stream import _AHEAD_BATCHES, CudaCopyStream
from lamina.protocol import Region
from tests.devices.fake_gpu import FakeGpu

PIECES, PIECE_BYTES = 512, 8
NBYTES = PIECES * PIECE_BYTES


class Scene:
    """An engine's memory on the GPU and the server's; `copies` move all of it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.engine = np.zeros(NBYTES, np.uint8)
        self.host = np.zeros(NBYTES, np.uint8)
        self.board, self.other_board = Board.create(1), Board.create(1)
        self.device = CudaServerDevice(0, PinnedSegments())
        handle = b"h" * driver.IPC_HANDLE_BYTES
        gpu.allocations[handle] = self.engine.ctypes.data, NBYTES
        self._region = Region(handle + OFFSET.pack(0), NBYTES)
        offsets = np.arange(PIECES, dtype=np.int64) * PIECE_BYTES
        self.copies = CopyList(
            self.engine.ctypes.data + offsets,
            self.host.ctypes.data + offsets,
            np.full(PIECES, PIECE_BYTES, np.int64),
        )

    def open(self, board: Board | None = None) -> CudaMemory:
        """As the server does for each connection that registers, with a board of its own."""
        return CudaMemory(self.device, board or self.board, [self._region])

    @property
    def is_copied(self) -> bool:
        return np.array_equal(self.engine, self.host)


@pytest.fixture
def scene(gpu: FakeGpu) -> Iterator[Scene]:
    scene = Scene(gpu)
    yield scene
    scene.board.close()
    scene.other_board.close()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("direction", Direction)
def test_a_count_and_a_mark_follow_the_copies_of_both_streams(
    gpu: FakeGpu, scene: Scene, direction: Direction, order: int
) -> None:
    """Whichever stream the GPU favours."""
    source, target = scene.host, scene.engine
    if direction is Direction.STORE:
        source, target = target, source
    source[:] = np.random.default_rng(0).integers(1, 256, NBYTES, np.uint8)
    stream, memory = CudaCopyStream(scene.device, direction), scene.open()
    stream.copy(memory, scene.copies)
    stream.announce(memory, 0, 1)
    mark = stream.mark()
    assert [gpu.copies(number) for number in gpu.streams] == [0, 1, 1], "two streams share it"
    for number in [*gpu.streams, *gpu.streams][::order]:
        gpu.run(number)
        assert scene.is_copied or not (scene.board.landed(0) or stream.is_done(mark))
    assert scene.is_copied
    assert scene.board.landed(0) == 1
    assert stream.is_done(mark)
    assert target.all()


def test_the_host_runs_a_few_batches_ahead_of_the_link_and_no_more(
    gpu: FakeGpu, scene: Scene
) -> None:
    """What is enqueued cannot be taken back when its transfer is cancelled."""
    stream, memory = CudaCopyStream(scene.device, Direction.RETRIEVE), scene.open()
    few = CopyList(*(array[:1] for array in scene.copies))
    ahead = []
    for _ in range(5 * _AHEAD_BATCHES):
        stream.copy(memory, few)
        ahead.append(sum(map(gpu.copies, gpu.streams)))
    assert ahead == [min(n + 1, _AHEAD_BATCHES) for n in range(len(ahead))]


def test_a_board_is_taken_from_the_gpu_once_nothing_will_write_it_any_more(
    gpu: FakeGpu, scene: Scene
) -> None:
    worker = CudaWorkerDevice()
    worker.attach(scene.board)
    worker.write_ticket(scene.board, 7)
    assert scene.board.ticket == 0, "it is on its way"
    worker.detach(scene.board)
    assert scene.board.ticket == 7
    assert not gpu.streams[0]


def test_memory_stays_mapped_while_another_connection_uses_it(gpu: FakeGpu, scene: Scene) -> None:
    """An engine that has reconnected, whose former session has not ended yet."""
    address = scene.engine.ctypes.data
    former, latter = scene.open(), scene.open(scene.other_board)
    assert former.addresses == latter.addresses == (address,)
    former.close()
    assert gpu.opened == [address]
    latter.close()
    assert not gpu.opened
    scene.open()
    assert gpu.opened == [address]
