"""What the server takes for an engine's memory on a GPU, and for the arena's."""

from __future__ import annotations

import numpy as np
import pytest

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.devices.cuda import CudaServerDevice
from lamina.devices.cuda_memory import OFFSET, CudaMemory, PinnedSegments
from lamina.errors import DeviceError
from lamina.protocol import Region
from tests.devices.fake_gpu import FakeGpu

ALLOCATION_BYTES = 4096
HANDLE = b"h" * driver.IPC_HANDLE_BYTES
SEGMENT_BYTES = 64
SEGMENTS = 5


def region(begin: int, nbytes: int) -> Region:
    return Region(HANDLE + OFFSET.pack(begin), nbytes)


@pytest.mark.parametrize(
    ("begin", "nbytes"), [(0, 4097), (1, 4096), (4095, 2), (4096, 1), (2**63, 1)]
)
def test_a_region_that_leaves_its_allocation_is_not_opened(
    gpu: FakeGpu, begin: int, nbytes: int
) -> None:
    """Whatever lies behind it is another's: a store would copy it, a retrieve overwrite it."""
    engine = np.zeros(ALLOCATION_BYTES, np.uint8)
    gpu.allocations[HANDLE] = engine.ctypes.data, ALLOCATION_BYTES
    device, board = CudaServerDevice(0, PinnedSegments()), Board.create(1)
    with pytest.raises(DeviceError, match="larger than its allocation"):
        CudaMemory(device, board, [region(0, ALLOCATION_BYTES), region(begin, nbytes)])
    assert not gpu.opened, "the mapping of the good region is given back"
    memory = CudaMemory(device, board, [region(1, ALLOCATION_BYTES - 1), region(4095, 1)])
    assert memory.addresses == (engine.ctypes.data + 1, engine.ctypes.data + 4095)
    memory.close()
    board.close()


@pytest.fixture
def pinned(gpu: FakeGpu) -> PinnedSegments:
    pinned = PinnedSegments()
    for number in range(SEGMENTS):
        pinned.add(1000 + number * SEGMENT_BYTES, SEGMENT_BYTES)
    return pinned


def bytes_of(copies: CopyList) -> list[tuple[int, int]]:
    """Which byte goes where, in no order."""
    pieces = zip(*(array.tolist() for array in copies), strict=True)
    return sorted((engine + n, host + n) for engine, host, size in pieces for n in range(size))


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, 64)],
        [(0, 63, 1), (7, 64, 1)],
        [(0, 63, 2)],
        [(0, 1, 64), (500, 100, 20)],
        [(0, 0, 128), (200, 128, 192)],
        [(3, 60, 200), (300, 0, 60)],
        [(0, 0, 320)],
    ],
)
def test_no_piece_lies_across_two_segments_of_the_arena(
    pinned: PinnedSegments, pieces: list[tuple[int, int, int]]
) -> None:
    """The driver refuses a copy across two registrations. A piece: where in the engine's memory and
    in the arena it begins, and its size."""
    engine, host, size = np.array(pieces, np.int64).T
    copies = CopyList(engine, 1000 + host, size)
    split = pinned.split(copies)
    first, last = split.host - 1000, split.host - 1000 + split.size - 1
    assert (first // SEGMENT_BYTES == last // SEGMENT_BYTES).all()
    assert (split.size > 0).all()
    assert bytes_of(split) == bytes_of(copies)
