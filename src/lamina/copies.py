"""Copy lists: which bytes move between chunks and pages, as NumPy arrays. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lamina.geometry import BlockIds, Geometry, Int64Array, PageMap

BATCH_PIECES = 1024
"""Pieces a call: `UIO_MAXIOV` on the host, and about where a GPU's copy calls run at link speed."""
BATCH_BYTES = 32 << 20
"""Bytes a call, so that a cancelled transfer stops within a few milliseconds of link time."""


class CopyList(NamedTuple):
    """Pieces to copy, three int64 arrays of one length: two absolute addresses and a size."""

    engine: Int64Array
    host: Int64Array
    size: Int64Array

    @property
    def nbytes(self) -> int:
        return int(self.size.sum())


class CopyPlan:
    """The copies between a run of chunks and the pages of one request, slice by slice.

    `chunk_addresses` are the arena addresses of consecutive chunks of a prompt; `block_ids[group]`
    are the engine's blocks for tokens `[start_tokens, start_tokens + n)` of that run, where `n` is
    the same for every group. Building one costs microseconds; each slice is planned when asked
    for, so that the first can be on the wire before the last is planned.
    """

    def __init__(
        self,
        geometry: Geometry,
        page_map: PageMap,
        region_addresses: Sequence[int],
        chunk_addresses: Sequence[int],
        start_tokens: int,
        block_ids: Sequence[BlockIds],
    ) -> None:
        self._geometry = geometry
        self._page_map = page_map
        self._regions = region_addresses
        self._chunk_addresses = np.asarray(chunk_addresses, np.int64)
        self._start_tokens = start_tokens
        self._block_ids = [ids.astype(np.int64) for ids in block_ids]
        # Layers of one group share these, so each is computed once a transfer.
        self._host_pages_of: dict[tuple[int, int], Int64Array] = {}
        self._engine_pages_of: dict[tuple[int, int], Int64Array] = {}
        self._sizes_of: dict[tuple[int, int], Int64Array] = {}

    def copies(self, first_layer: int, end_layer: int) -> CopyList:
        """The copy list of layers `[first_layer, end_layer)`, adjacent pieces merged."""
        engine, host, size = [], [], []
        for index in range(first_layer, end_layer):
            layer = self._geometry.layers[index]
            plane_bytes = self._geometry.blocks_per_chunk(layer.group) * layer.page_bytes
            host_pages = self._host_pages(layer.group, layer.page_bytes)
            for number, plane in enumerate(self._page_map.planes[index]):
                base = self._regions[plane.region] + plane.offset_bytes
                engine.append(base + self._engine_pages(layer.group, plane.stride_bytes))
                offset = int(self._geometry.layer_offsets[index]) + number * plane_bytes
                host.append(host_pages + offset)
                size.append(self._sizes(layer.group, layer.page_bytes))
        return merge_adjacent(CopyList(_join(engine), _join(host), _join(size)))

    def _host_pages(self, group: int, page_bytes: int) -> Int64Array:
        """Addresses in the arena of the pages of a chunk's first layer and plane."""
        key = (group, page_bytes)
        if key not in self._host_pages_of:
            first = self._start_tokens // self._geometry.groups[group].block_tokens
            block = first + np.arange(len(self._block_ids[group]), dtype=np.int64)
            chunk, within = np.divmod(block, self._geometry.blocks_per_chunk(group))
            self._host_pages_of[key] = self._chunk_addresses[chunk] + within * page_bytes
        return self._host_pages_of[key]

    def _engine_pages(self, group: int, stride_bytes: int) -> Int64Array:
        """Offsets of the pages in a plane."""
        key = (group, stride_bytes)
        if key not in self._engine_pages_of:
            self._engine_pages_of[key] = self._block_ids[group] * stride_bytes
        return self._engine_pages_of[key]

    def _sizes(self, group: int, page_bytes: int) -> Int64Array:
        key = (group, page_bytes)
        if key not in self._sizes_of:
            self._sizes_of[key] = np.full(len(self._block_ids[group]), page_bytes, np.int64)
        return self._sizes_of[key]


def _join(parts: list[Int64Array]) -> Int64Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def merge_adjacent(copies: CopyList) -> CopyList:
    """Join pieces that follow each other on both sides, in the order given."""
    engine, host, size = copies
    if len(size) < 2:
        return copies
    joins = (engine[:-1] + size[:-1] == engine[1:]) & (host[:-1] + size[:-1] == host[1:])
    if not joins.any():
        return copies
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return CopyList(engine[starts], host[starts], np.add.reduceat(size, starts))


def batches(copies: CopyList) -> Iterator[CopyList]:
    """Cut a copy list into runs of at most `BATCH_PIECES` pieces and about `BATCH_BYTES`."""
    start = 0
    ends = copies.size.cumsum()
    done = 0
    while start < len(copies.size):
        by_bytes = int(ends.searchsorted(done + BATCH_BYTES, side="right"))
        stop = max(start + 1, min(start + BATCH_PIECES, by_bytes))
        yield CopyList(*(array[start:stop] for array in copies))
        start, done = stop, int(ends[stop - 1])
