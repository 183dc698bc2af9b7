"""The chunks of a transfer: those that a retrieve pins, those that a store finds or makes room for.

Used by the server's event loop only, in turns (`turns`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamina.errors import RequestRefusedError, refuse
from lamina.geometry import BlockIds, Geometry
from lamina.server.index import Chunk, Index
from lamina.server.turns import Pace, Turns, each_part
from lamina.shards import ChunkLayout, Shard


def pin_for_retrieve(
    index: Index, chunks: Sequence[Chunk], layout: ChunkLayout, column: int
) -> Turns[array[int]]:
    """Pin leased chunks once more; return the addresses of one of their columns.

    Raises `RequestRefusedError`, with nothing pinned, when one has another layout.
    """
    addresses = array("q")
    offset_bytes = layout.offsets_bytes[column]

    def pin(part: Sequence[Chunk]) -> None:
        if not all(_has_layout(chunk, layout) for chunk in part):
            raise refuse(
                "the leased chunks were stored with another geometry",
                "Make the geometry part of the namespace of the keys",
            )
        index.pin(part)
        addresses.extend([chunk.address + offset_bytes for chunk in part])

    try:
        yield from each_part(chunks, pin)
    except RequestRefusedError:
        index.unpin(chunks[: len(addresses)])
        raise
    return addresses


class Room(NamedTuple):
    """What a store found and got, all of it pinned: chunks of its chain that are there without it,
    and chunks of which it stores a column, with their positions in its keys and that column's
    addresses."""

    present: list[Chunk]
    claimed: list[Chunk]
    numbers: array[int]
    addresses: array[int]
    reserved_bytes: int
    """Of the chunks that it has made room for, which are among both."""


def no_room() -> Room:
    """Of a store that may reserve nothing."""
    return Room([], [], array("q"), array("q"), 0)


def make_room(
    index: Index,
    layout: ChunkLayout,
    shard: Shard,
    parent_key: bytes,
    keys: Sequence[bytes],
    most_chunks: int,
) -> Turns[Room]:
    """Reserve what is not there of a chain of chunks, as far as there is room, `most_chunks` at
    most; claim the shard's column wherever it is missing and this replica's to write.

    What is present is pinned meanwhile, so that making room for the tail cannot evict the head. A
    chain whose parent is gone could never be found: nothing is reserved for it. Between two turns
    another store may reserve or claim a later part of the same chain: that counts as present.
    """
    room = no_room()
    parent = index.get(parent_key) if parent_key else None
    if parent_key and parent is None:
        return room
    if parent is not None:
        index.pin([parent])
        room.present.append(parent)
    column, offset_bytes = shard.number, layout.offsets_bytes[shard.number]
    reserved, pace = 0, Pace()
    for number, key in enumerate(keys):
        if pace.is_spent():
            yield None
        if index.get(key) is None and (
            reserved >= most_chunks or not (yield from index.make_room(layout.chunk_bytes, pace))
        ):
            break
        chunk = index.get(key)
        if chunk is not None:
            index.pin([chunk])
        else:
            chunk = index.reserve(key, parent, layout)
            assert chunk is not None, "no turn since there was room"
            reserved += 1
        if shard.writes(key) and _has_layout(chunk, layout) and index.claim(chunk, column):
            room.claimed.append(chunk)
            room.numbers.append(number)
            room.addresses.append(chunk.address + offset_bytes)
        else:
            room.present.append(chunk)
        parent = chunk
    return room._replace(reserved_bytes=reserved * layout.chunk_bytes)


def end_room(index: Index, room: Room, column: int, is_whole: bool) -> Turns[None]:
    """The column that was claimed is in, from the chain's head; or it will not be: what was
    reserved for it is forgotten from its tail."""

    def commit(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.commit(chunk, column)

    def discard(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.discard(chunk, column)

    if is_whole:
        yield from each_part(room.claimed, commit, are_chunks=True)
    else:
        yield from each_part(room.claimed[::-1], discard, are_chunks=True)
    index.unpin(room.present)


def _has_layout(chunk: Chunk, layout: ChunkLayout) -> bool:
    return chunk.layout is layout or chunk.layout.digest == layout.digest


def blocks_of_chunks(
    geometry: Geometry, block_ids: Sequence[BlockIds], numbers: array[int]
) -> list[BlockIds]:
    """The blocks of some chunks of a run of full chunks, one array a group."""
    rows = np.asarray(numbers)
    chosen = []
    for group, ids in enumerate(block_ids):
        by_chunk = ids.reshape(-1, geometry.blocks_per_chunk(group))
        chosen.append(by_chunk[rows].reshape(-1))
    return chosen
