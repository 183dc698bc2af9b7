"""Copy lists: which bytes move between chunks and pages, as NumPy arrays. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lamina.geometry import BlockIds, Geometry, Int64Array, PageMap

BATCH_PIECES = 512
"""Pieces a call. On an H200 a piece costs the host 0.5 us, 1 us when its core is shared, so 512 of
64 KiB (0.6 ms of link) leave time to plan the next ones even then."""
OPENING_BATCH_PIECES = 128
"""Pieces of a transfer's first calls. A call's pieces are on the wire only when it returns: short
ones begin sooner, and while one is on the wire there is time for the next (128 of 64 KiB are
0.15 ms of link)."""
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
    the same for every group. Building one costs microseconds.
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
        self._runs_of: dict[tuple[int, int, int], CopyList] = {}
        self._step_layers = max(1, BATCH_PIECES // max(1, *(len(ids) for ids in block_ids)))

    def batches(self, first_layer: int, end_layer: int) -> Iterator[CopyList]:
        """The copies of layers `[first_layer, end_layer)` in batches.

        Planned as many layers at a time as fill a batch: the first batch does not wait for the
        plan of the last. (Pages of two layers are apart in a chunk, so nothing is left unmerged.)
        The first batches of the plan are short.
        """
        for first in range(first_layer, end_layer, self._step_layers):
            copies = self.copies(first, min(first + self._step_layers, end_layer))
            yield from batches(copies, BATCH_PIECES if first else OPENING_BATCH_PIECES)

    def copies(self, first_layer: int, end_layer: int) -> CopyList:
        """The copy list of layers `[first_layer, end_layer)`, adjacent pieces merged."""
        engine, host, size = [], [], []
        for index in range(first_layer, end_layer):
            layer = self._geometry.layers[index]
            plane_bytes = self._geometry.blocks_per_chunk(layer.group) * layer.page_bytes
            for number, plane in enumerate(self._page_map.planes[index]):
                runs = self._runs(layer.group, layer.page_bytes, plane.stride_bytes)
                offset = int(self._geometry.layer_offsets[index]) + number * plane_bytes
                engine.append(runs.engine + (self._regions[plane.region] + plane.offset_bytes))
                host.append(runs.host + offset)
                size.append(runs.size)
        if len(size) == 1:
            return CopyList(engine[0], host[0], size[0])  # merged already
        return merge_adjacent(
            CopyList(np.concatenate(engine), np.concatenate(host), np.concatenate(size))
        )

    def _runs(self, group: int, page_bytes: int, stride_bytes: int) -> CopyList:
        """The pieces of a plane: offsets in it, and addresses as if it came first in a chunk.

        The same for every layer of a group with such pages, so computed once a transfer.
        """
        key = (group, page_bytes, stride_bytes)
        if key not in self._runs_of:
            ids = self._block_ids[group]
            first = self._start_tokens // self._geometry.groups[group].block_tokens
            block = first + np.arange(len(ids), dtype=np.int64)
            chunk, within = np.divmod(block, self._geometry.blocks_per_chunk(group))
            pages = CopyList(
                ids * stride_bytes,
                self._chunk_addresses[chunk] + within * page_bytes,
                np.full(len(ids), page_bytes, np.int64),
            )
            self._runs_of[key] = merge_adjacent(pages)
        return self._runs_of[key]


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


def batches(copies: CopyList, most_pieces: int = BATCH_PIECES) -> Iterator[CopyList]:
    """Cut a copy list into runs of at most `most_pieces` pieces and about `BATCH_BYTES`."""
    count = len(copies.size)
    if 0 < count <= most_pieces and count * int(copies.size.max()) <= BATCH_BYTES:
        yield copies
        return
    start = 0
    ends = copies.size.cumsum()
    done = 0
    while start < count:
        by_bytes = int(ends.searchsorted(done + BATCH_BYTES, side="right"))
        stop = max(start + 1, min(start + most_pieces, by_bytes))
        yield CopyList(copies.engine[start:stop], copies.host[start:stop], copies.size[start:stop])
        start, done = stop, int(ends[stop - 1])
