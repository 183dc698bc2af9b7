"""Rings in GPU memory, and the two side streams of the engine's process that use them.

The streams have the highest priority and wait for no other. A record costs the engine's thread one
batched memory operation and a launch. Kernels contain no wait, so they end; every wait is for a
word in host memory, which any CPU can write.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint, c_uint64
from typing import Any, NamedTuple

import numpy as np

from lamina.board import GATHERED, PLACED, Board
from lamina.devices import cuda_driver as driver
from lamina.devices import cuda_launch as launch
from lamina.devices.kernels import image_for
from lamina.errors import DeviceError
from lamina.geometry import Allocation, BlockIds, Geometry, PageMap
from lamina.protocol import Region
from lamina.records import Shape, Span, ring_bytes

_TABLE_IDS = 1 << 20
"""Block ids of transfers that are enqueued, a direction: 16 million tokens in blocks of 16."""
_WIDTHS = (16, 8, 4, 2, 1)
_pinned: list[BlockIds] = []
"""What a GPU may still read when its rings are forgotten: it stays until the process ends."""


class CudaEvent:
    """What stands for all that is enqueued on a stream so far."""

    def __init__(self, stream: int) -> None:
        self.handle = 0
        self.handle = driver.create_event()
        driver.record(self.handle, stream)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError):  # the context is gone, and the event with it
            driver.destroy_event(self.handle)


class _Run(ctypes.Structure):
    """`Run` of `kernels/pages.cu`: planes of one group and page size, in one record."""

    _fields_ = (
        ("record", c_uint64),
        ("chunk_stride_bytes", c_uint64),
        ("planes", c_uint64),
        ("block_ids", c_uint64),
        ("chunks", c_uint),
        ("plane_count", c_uint),
        ("blocks_per_chunk", c_uint),
        ("page_bytes", c_uint),
    )


class _Fetch(ctypes.Structure):
    _fields_ = (("to", c_uint64), ("source", c_uint64), ("count", c_uint))


class _Planes(NamedTuple):
    """Planes of one group and page size, one after another in a record."""

    begin_bytes: int
    address: int
    plane_count: int
    group: int
    page_bytes: int


class _Side:
    """One side stream with its kernel, and where it finds block ids."""

    def __init__(self, module: int, kernel: int) -> None:
        self.stream = launch.side_stream()
        self.kernel = kernel
        self.run = _Run()
        self.fetch = _Fetch()
        self.fetch_ids = launch.function(module, "fetch_ids")
        self.launcher = launch.Launcher(self.stream, self.run)
        self.fetcher = launch.Launcher(self.stream, self.fetch)
        self.order = launch.WriteThenWait(self.stream)
        self._staged = np.empty(_TABLE_IDS, np.int32)
        _pinned.append(self._staged)
        driver.pin(self._staged.ctypes.data, self._staged.nbytes)
        self._staged_at = driver.device_pointer(self._staged.ctypes.data)
        self._table = launch.allocate(self._staged.nbytes)
        self._next = 0
        self._in_use: deque[tuple[int, int, CudaEvent]] = deque()  # first, end, when fetched

    def write_table(self, block_ids: Sequence[BlockIds]) -> list[int]:
        """Bring block ids to the GPU, in order on the stream; where each group's begin there.

        The table is used again in stream order; the staged ids once they are fetched.
        """
        count = sum(map(len, block_ids))
        first = 0 if self._next + count > _TABLE_IDS else self._next
        while self._in_use and driver.is_recorded(self._in_use[0][2].handle):
            self._in_use.popleft()
        end = first + count
        if end > _TABLE_IDS or any(begin < end and first < e for begin, e, _ in self._in_use):
            raise DeviceError("too many blocks are on their way", "Some are recomputed")
        starts, at = [], first
        for ids in block_ids:
            self._staged[at : at + len(ids)] = ids
            starts.append(self._table + 4 * at)
            at += len(ids)
        fetch = self.fetch
        fetch.to, fetch.source, fetch.count = (
            self._table + 4 * first,
            self._staged_at + 4 * first,
            count,
        )
        self.fetcher.launch(self.fetch_ids)
        self._in_use.append((first, end, CudaEvent(self.stream)))
        self._next = end
        return starts


class CudaRings:
    """The rings of one worker, on the GPU whose context is current. They stay until its process
    ends."""

    def __init__(
        self,
        export: Callable[[Allocation], Region],
        boards: Mapping[Board, int],
        geometry: Geometry,
        page_map: PageMap,
        allocations: Sequence[Allocation],
    ) -> None:
        self._boards = boards
        self._geometry = geometry
        module = launch.module_of(image_for(*launch.compute_capability(driver.current_device())))
        retrieves, stores = _allocate(geometry)
        self._retrieve, self._retrieve_bytes = retrieves
        self._stored, self._store_bytes = stores
        self.regions = export(retrieves), export(stores)
        planes, width = _plane_table(geometry, page_map, allocations)
        self._planes_at = launch.allocate(planes.nbytes)
        self._place = _Side(module, launch.function(module, f"place_{width}"))
        self._gather = _Side(module, launch.function(module, f"gather_{width}"))
        stream = self._place.stream
        driver.copy_one(self._planes_at, planes.ctypes.data, planes.nbytes, stream, to_device=True)
        for side in (self._place, self._gather):  # loaded lazily, which must not happen in a wait
            side.write_table([np.zeros(1, np.int32)])
            side.launcher.launch(side.kernel)
        self.synchronize()
        self._first_planes = np.cumsum([0, *(len(planes) for planes in page_map.planes)])
        self._runs_of: dict[tuple[int, int], list[_Planes]] = {}

    def place(
        self,
        board: Board,
        slot: int,
        base: int,
        span: Span,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        side, words = self._place, self._boards[board]
        if after is not None:
            driver.wait_event(side.stream, after.handle)
        tables = side.write_table(block_ids)
        placed, landed = words + board.offset_bytes(PLACED), words + board.offset_bytes(slot)
        before = (span.first_number - 1) & 0xFFFF_FFFF
        for index, shape in enumerate(span.shapes):
            side.order.enqueue(placed, before, landed, (base + index + 1) & 0xFFFF_FFFF)
            record = self._retrieve + span.positions[index] % self._retrieve_bytes
            self._launch(side, shape, record, tables, shape.first_chunk)
            before = span.number(index)
        driver.write_value(side.stream, placed, before)

    def skip(self, board: Board, number: int) -> None:
        word = self._boards[board] + board.offset_bytes(PLACED)
        driver.write_value(self._place.stream, word, number)

    def gather(
        self,
        board: Board,
        number: int,
        shape: Shape,
        position: int,
        block_ids: Sequence[BlockIds],
        after: Any = None,
    ) -> None:
        side = self._gather
        if after is not None:
            driver.wait_event(side.stream, after.handle)
        tables = side.write_table(block_ids)
        self._launch(side, shape, self._stored + position % self._store_bytes, tables, 0)
        word = self._boards[board] + board.offset_bytes(GATHERED)
        driver.write_value(side.stream, word, number)

    def synchronize(self) -> None:
        driver.synchronize(self._place.stream)
        driver.synchronize(self._gather.stream)

    def close(self) -> None:
        """Nothing to do: the streams end with the context."""

    def _launch(
        self, side: _Side, shape: Shape, record: int, tables: list[int], first_chunk: int
    ) -> None:
        """Move a record whose first chunk is `first_chunk` in the tables."""
        run = side.run
        run.chunk_stride_bytes = shape.chunk_stride_bytes
        run.chunks = shape.chunks
        for planes in self._runs(shape.first_layer, shape.end_layer):
            blocks = self._geometry.blocks_per_chunk(planes.group)
            run.record = record + planes.begin_bytes
            run.planes = planes.address
            run.block_ids = tables[planes.group] + 4 * first_chunk * blocks
            run.plane_count = planes.plane_count
            run.blocks_per_chunk = blocks
            run.page_bytes = planes.page_bytes
            side.launcher.launch(side.kernel)

    def _runs(self, first_layer: int, end_layer: int) -> list[_Planes]:
        """The launches of a record of these layers."""
        key = first_layer, end_layer
        if key not in self._runs_of:
            runs: list[_Planes] = []
            begin = 0
            for number in range(first_layer, end_layer):
                layer = self._geometry.layers[number]
                address = self._planes_at + 16 * int(self._first_planes[number])
                last = runs[-1] if runs else None
                if last and (last.group, last.page_bytes) == (layer.group, layer.page_bytes):
                    runs[-1] = last._replace(plane_count=last.plane_count + layer.planes)
                else:
                    each = layer.planes, layer.group, layer.page_bytes
                    runs.append(_Planes(begin, address, *each))
                blocks = self._geometry.blocks_per_chunk(layer.group)
                begin += layer.planes * blocks * layer.page_bytes
            self._runs_of[key] = runs
        return self._runs_of[key]


def _allocate(geometry: Geometry) -> tuple[Allocation, Allocation]:
    """A retrieve ring and a store ring; smaller ones where the GPU is full."""
    for part in (1, 2, 4):
        rings: list[Allocation] = []
        try:
            for nbytes in ring_bytes(geometry, part):
                rings.append(Allocation(launch.allocate(nbytes), nbytes))
            return rings[0], rings[1]
        except DeviceError as error:
            for ring in rings:
                launch.free(ring.address)
            refused = error
    raise DeviceError(
        f"there is no GPU memory for rings of {sum(ring_bytes(geometry, 4)) >> 20} MiB: "
        f"{refused.cause}",
        "Leave the engine some less of the GPU's memory (vLLM: --gpu-memory-utilization)",
    )


def _plane_table(
    geometry: Geometry, page_map: PageMap, allocations: Sequence[Allocation]
) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], int]:
    """`Plane` of `kernels/pages.cu` for each plane, shape (planes, 2); and how many bytes all
    addresses, strides and sizes have as a common divisor, 16 at most."""
    rows = []
    aligned = [16, *map(int, geometry.layer_offsets)]
    for layer, planes in zip(geometry.layers, page_map.planes, strict=True):
        aligned.append(layer.page_bytes)
        for plane in planes:
            row = (allocations[plane.region].address + plane.offset_bytes, plane.stride_bytes)
            rows.append(row)
            aligned += row
    divisor = math.gcd(*aligned)
    return np.array(rows, np.uint64), next(width for width in _WIDTHS if divisor % width == 0)
