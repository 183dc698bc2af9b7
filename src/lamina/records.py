"""Records: what fills one contiguous piece of a ring. Pure arithmetic, the same on both sides.

Where pages are small, a server does not copy into them. It fills a *ring* in the engine's memory,
record by record, and the engine's own device places what has landed into the pages; a store goes
the other way. A record holds `[chunk][layer][plane][block][page bytes]` of whole chunks, so each
chunk of it is one range of the arena, of all layers of the record.

Records of a ring are numbered without gaps from 1 in the order in which transfers join (32 bits,
cyclic). A position is a count of bytes that only grows; a record lies at its position modulo the
ring's size and never wraps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lamina.errors import GeometryError
from lamina.geometry import BlockIds, Geometry, Slice

RETRIEVE_RING_BYTES = 96 << 20
STORE_RING_BYTES = 32 << 20
MAX_POSITION = 1 << 62
RECORDS_A_RING = 4
"""A record takes at most this part of its ring: while one is placed, others land."""
JOINED_PART = 6
"""Slices are joined up to this part of the largest record: a record costs its engine's thread 10 to
15 us whatever its size, and 4 MiB, as that is of a ring of 96, take 76 us of an H200's link."""
_ALIGNMENT_BYTES = 256


class Shape(NamedTuple):
    """The layers `[first_layer, end_layer)` of the chunks `[first_chunk, end_chunk)` of a transfer,
    `chunk_stride_bytes` a chunk."""

    first_layer: int
    end_layer: int
    first_chunk: int
    end_chunk: int
    chunk_stride_bytes: int

    @property
    def chunks(self) -> int:
        return self.end_chunk - self.first_chunk

    @property
    def nbytes(self) -> int:
        return self.chunks * self.chunk_stride_bytes

    def blocks_of(self, geometry: Geometry, block_ids: Sequence[BlockIds]) -> list[BlockIds]:
        """Its own of a transfer's block ids, which are of whole chunks, an array a group."""
        found = []
        for group, ids in enumerate(block_ids):
            blocks = geometry.blocks_per_chunk(group)
            found.append(ids[self.first_chunk * blocks : self.end_chunk * blocks])
        return found


class Span(NamedTuple):
    """The records of one transfer: the number of its first, their shapes and positions."""

    first_number: int
    shapes: tuple[Shape, ...]
    positions: tuple[int, ...]

    @property
    def last_number(self) -> int:
        return (self.first_number + len(self.shapes) - 1) & 0xFFFF_FFFF

    @property
    def end_position(self) -> int:
        """Where the next transfer may begin."""
        return self.positions[-1] + self.shapes[-1].nbytes

    def number(self, index: int) -> int:
        """Of its record `index`."""
        return (self.first_number + index) & 0xFFFF_FFFF


def ring_bytes(geometry: Geometry, part: int = 1) -> tuple[int, int]:
    """The sizes of a worker's retrieve ring and store ring, or `part` times smaller where memory is
    scarce; as large at least as layers of chunks need."""
    offsets = geometry.layer_offsets
    least = RECORDS_A_RING * int((offsets[1:] - offsets[:-1]).max())
    least = -(-least // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return max(RETRIEVE_RING_BYTES // part, least), max(STORE_RING_BYTES // part, least)


@lru_cache(256)
def shapes(
    geometry: Geometry, slices: tuple[Slice, ...], chunks: int, ring_bytes: int
) -> tuple[Shape, ...]:
    """Cut a transfer of whole `chunks` into records, in the order in which they move.

    A record ends where a slice does, unless slices are joined or one is cut: into runs of layers,
    and a layer along its chunks. Raises `GeometryError` when the ring is too small for a layer of a
    chunk.
    """
    most_bytes = ring_bytes // RECORDS_A_RING
    found: list[Shape] = []
    for first, end in _joined(geometry, slices, chunks, most_bytes // JOINED_PART):
        for first_layer, end_layer in _cut_layers(geometry, first, end, chunks, most_bytes):
            stride = _chunk_bytes(geometry, first_layer, end_layer)
            if stride > most_bytes:
                raise GeometryError(
                    f"a layer of a chunk takes {stride} bytes, but a ring of {ring_bytes} bytes "
                    f"has room for {most_bytes}",
                    "Use smaller chunks: start the server with a smaller --chunk-tokens",
                )
            parts = -(-chunks // (most_bytes // stride))
            step = -(-chunks // parts)
            found += (
                Shape(first_layer, end_layer, chunk, min(chunk + step, chunks), stride)
                for chunk in range(0, chunks, step)
            )
    return tuple(found)


def fingerprint(cut: Sequence[Shape]) -> int:
    """32 bits that differ where a transfer is cut otherwise: CRC-32 of its shapes."""
    return zlib.crc32(np.asarray(cut, "<i8").tobytes())


def lay_out(cut: Sequence[Shape], first_number: int, position: int, ring_bytes: int) -> Span:
    """Give records their numbers and positions: the first at `position` or soon after it."""
    positions = []
    for shape in cut:
        position = -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if position % ring_bytes + shape.nbytes > ring_bytes:
            position += ring_bytes - position % ring_bytes
        positions.append(position)
        position += shape.nbytes
    return Span(first_number, tuple(cut), tuple(positions))


def last_records(cut: Sequence[Shape], slices: Sequence[Slice]) -> tuple[int, ...]:
    """For each slice the index of the record with which all of it is there."""
    lasts = []
    index = 0
    for part in slices:
        while index + 1 < len(cut) and cut[index + 1].first_layer < part.end_layer:
            index += 1
        lasts.append(index)
    return tuple(lasts)


def _joined(
    geometry: Geometry, slices: Sequence[Slice], chunks: int, least_bytes: int
) -> Iterator[tuple[int, int]]:
    """Runs of layers of one or more slices, of `least_bytes` or more where there are so many."""
    first = slices[0].first_layer
    for part in slices:
        is_last = part is slices[-1]
        nbytes = chunks * _chunk_bytes(geometry, first, part.end_layer)
        if nbytes >= least_bytes or is_last:
            yield first, part.end_layer
            first = part.end_layer


def _cut_layers(
    geometry: Geometry, first: int, end: int, chunks: int, most_bytes: int
) -> Iterator[tuple[int, int]]:
    """Runs of the layers `[first, end)` that fit a record with all chunks; else single layers."""
    begin = first
    for layer in range(first, end):
        if layer > begin and chunks * _chunk_bytes(geometry, begin, layer + 1) > most_bytes:
            yield begin, layer
            begin = layer
    yield begin, end


def _chunk_bytes(geometry: Geometry, first_layer: int, end_layer: int) -> int:
    """Bytes of these layers in a chunk."""
    offsets = geometry.layer_offsets
    return int(offsets[end_layer] - offsets[first_layer])
