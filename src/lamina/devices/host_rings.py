"""Rings in CPU memory: what a GPU's side streams do, done by two threads.

For engines on the host, and for every test of rings: what is enqueued can be held, and let go one
command at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.board import GATHERED, PLACED, Board, reached
from lamina.geometry import Allocation, BlockIds, Geometry, PageMap
from lamina.protocol import Region
from lamina.records import Shape, Span, ring_bytes

_POLL_S = 50e-6
_kept: list[list[mmap.mmap]] = []
"""The memory of rings that are closed: a server that was stopped may still write there."""
_Bytes = npt.NDArray[np.uint8]
_Command = Callable[[], bool]
"""Does something and returns True, or returns False: not yet."""


class HostStream:
    """A thread that does what is enqueued, in order. Whoever enqueues does not wait."""

    def __init__(self, name: str) -> None:
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._busy = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, command: _Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def hold(self) -> None:
        """Do nothing more, once the command in hand is done, until `step` or `go_on`."""
        with self._changed:
            self._allowed = 0
            while self._busy:
                self._changed.wait()

    def step(self, commands: int = 1) -> None:
        """While held: let so many more commands be done, as they become able to."""
        with self._changed:
            assert self._allowed is not None, "hold the stream first"
            self._allowed += commands
            self._changed.notify_all()

    def go_on(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    @property
    def enqueued(self) -> int:
        """Commands that are not done."""
        return len(self._commands)

    def synchronize(self) -> None:
        """Wait until all that is enqueued is done."""
        with self._changed:
            while self._commands and not self._stopping:
                self._changed.wait()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._stopping:
                if not self._commands or self._allowed == 0:
                    self._changed.wait()
                    continue
                self._busy = True
                self._changed.release()
                try:
                    is_done = self._commands[0]()
                finally:
                    self._changed.acquire()
                    self._busy = False
                if is_done:
                    self._commands.popleft()
                    if self._allowed:
                        self._allowed -= 1
                    self._changed.notify_all()
                else:
                    self._changed.notify_all()
                    self._changed.wait(_POLL_S)


class HostRings:
    """The rings of one worker. `place_stream` and `gather_stream` are its side streams. As those
    of a GPU, rings stay until the process ends."""

    def __init__(
        self,
        export: Callable[[Allocation], Region],
        geometry: Geometry,
        page_map: PageMap,
        allocations: Sequence[Allocation],
    ) -> None:
        self._geometry = geometry
        self._pages = [
            [
                _pages(allocations[plane.region].address + plane.offset_bytes, blocks, *sizes)
                for plane in planes
                for sizes in [(plane.stride_bytes, layer.page_bytes)]
                for blocks in [page_map.blocks[layer.group]]
            ]
            for layer, planes in zip(geometry.layers, page_map.planes, strict=True)
        ]
        self._maps = [mmap.mmap(-1, nbytes) for nbytes in ring_bytes(geometry)]
        rings = [np.frombuffer(each, np.uint8) for each in self._maps]
        self.retrieves, self.stores = rings
        first, second = (export(Allocation(each.ctypes.data, each.nbytes)) for each in rings)
        self.regions = (first, second)
        self.place_stream = HostStream("lamina-place")
        self.gather_stream = HostStream("lamina-gather")

    def place(
        self,
        board: Board,
        slot: int,
        base: int,
        span: Span,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        enqueue = self.place_stream.enqueue
        if after is not None:
            enqueue(after)
        for index, shape in enumerate(span.shapes):
            enqueue(_waits(board, slot, base + index + 1))
            ids = shape.blocks_of(self._geometry, block_ids)
            enqueue(self._moves(self.retrieves, span.positions[index], shape, ids, places=True))
            enqueue(_counts(board, PLACED, span.number(index)))

    def skip(self, board: Board, number: int) -> None:
        self.place_stream.enqueue(_counts(board, PLACED, number))

    def gather(
        self,
        board: Board,
        number: int,
        shape: Shape,
        position: int,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        enqueue = self.gather_stream.enqueue
        if after is not None:
            enqueue(after)
        enqueue(self._moves(self.stores, position, shape, block_ids, places=False))
        enqueue(_counts(board, GATHERED, number))

    def synchronize(self) -> None:
        self.place_stream.synchronize()
        self.gather_stream.synchronize()

    def close(self) -> None:
        _kept.append(self._maps)
        self.place_stream.close()
        self.gather_stream.close()

    def _moves(
        self, ring: _Bytes, position: int, shape: Shape, ids: Sequence[BlockIds], *, places: bool
    ) -> _Command:
        def move() -> bool:
            start = position % len(ring)
            record = ring[start : start + shape.nbytes].reshape(shape.chunks, -1)
            begin = 0
            for number in range(shape.first_layer, shape.end_layer):
                layer = self._geometry.layers[number]
                wanted = ids[layer.group]
                chosen = wanted >= 0
                for pages in self._pages[number]:
                    end = begin + self._geometry.blocks_per_chunk(layer.group) * layer.page_bytes
                    held = record[:, begin:end].reshape(-1, layer.page_bytes)
                    if places:
                        pages[wanted[chosen]] = held[chosen]
                    else:
                        gathered = np.zeros_like(held)
                        gathered[chosen] = pages[wanted[chosen]]
                        record[:, begin:end] = gathered.reshape(shape.chunks, -1)
                    begin = end
            return True

        return move


def _pages(address: int, blocks: int, stride_bytes: int, page_bytes: int) -> _Bytes:
    """The pages of a plane where they lie, shape (blocks, page bytes)."""
    extent = (blocks - 1) * stride_bytes + page_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, (blocks, page_bytes), (stride_bytes, 1))


def _waits(board: Board, slot: int, count: int) -> _Command:
    return lambda: reached(board.landed(slot), count)


def _counts(board: Board, slot: int, value: int) -> _Command:
    def write() -> bool:
        board.announce(slot, value)
        return True

    return write
