"""KV whose bytes follow from its keys: whoever finds a chunk knows what must be in it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.board import Board
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry

Pages = npt.NDArray[np.uint8]


def chain(*names: str) -> list[bytes]:
    """Keys of a prompt of named chunks: equal beginnings have equal keys."""
    keys = [b""]
    for name in names:
        keys.append(hashlib.sha256(keys[-1] + name.encode()).digest())
    return keys[1:]


@functools.lru_cache(maxsize=4096)
def content_of(key: bytes, geometry: Geometry) -> Pages:
    """The bytes of a chunk as they lie in the arena, shape (layers, blocks, page bytes).

    One group, one plane a layer, layers alike.
    """
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    shape = len(geometry.layers), geometry.blocks_per_chunk(0), geometry.layers[0].page_bytes
    return rng.integers(0, 256, shape, np.uint8)


def content_of_run(keys: Sequence[bytes], geometry: Geometry) -> Pages:
    """The same of consecutive chunks, block after block."""
    return np.concatenate([content_of(key, geometry) for key in keys], axis=1)


class StreamDevice(HostWorkerDevice):
    """A host device with a compute stream: what is enqueued happens when `compute` is called."""

    def __init__(self) -> None:
        self._enqueued: list[Callable[[], None]] = []

    def enqueue(self, work: Callable[[], None]) -> None:
        self._enqueued.append(work)

    def write_ticket(self, board: Board, ticket: int, stream: Any = None) -> None:
        self.enqueue(lambda: HostWorkerDevice.write_ticket(self, board, ticket))

    def detach(self, board: Board) -> None:
        self.compute()

    def compute(self) -> None:
        """Do all that is enqueued, in order."""
        while self._enqueued:
            self._enqueued.pop(0)()
