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


def pin_for_retrieve(index: Index, chunks: Sequence[Chunk], layout: bytes) -> Turns[array[int]]:
    """Pin leased chunks once more; return their addresses.

    Raises `RequestRefusedError`, with nothing pinned, when one has another layout.
    """
    addresses = array("q")

    def pin(part: Sequence[Chunk]) -> None:
        if any(chunk.layout != layout for chunk in part):
            raise refuse(
                "the leased chunks were stored with another geometry",
                "Make the geometry part of the namespace of the keys",
            )
        index.pin(part)
        addresses.extend([chunk.address for chunk in part])

    try:
        yield from each_part(chunks, pin)
    except RequestRefusedError:
        index.unpin(chunks[: len(addresses)])
        raise
    return addresses


class Room(NamedTuple):
    """What a store found and got: chunks pinned because they are of its chain and present, and
    chunks reserved for it, with their positions in its keys and their addresses."""

    present: list[Chunk]
    reserved: list[Chunk]
    numbers: array[int]
    addresses: array[int]


def no_room() -> Room:
    """Of a store that may reserve nothing."""
    return Room([], [], array("q"), array("q"))


def make_room(
    index: Index, geometry: Geometry, parent_key: bytes, keys: Sequence[bytes], most_chunks: int
) -> Turns[Room]:
    """Reserve what is missing of a chain of chunks, as far as there is room, `most_chunks` at most.

    What is present is pinned meanwhile, so that making room for the tail cannot evict the head. A
    chain whose parent is gone could never be found: nothing is reserved for it. Between two turns
    another store may reserve a later part of the same chain: that counts as present.
    """
    room = no_room()
    parent = index.get(parent_key) if parent_key else None
    if parent_key and parent is None:
        return room
    if parent is not None:
        index.pin([parent])
        room.present.append(parent)
    pace = Pace()
    for number, key in enumerate(keys):
        if pace.is_spent():
            yield None
        if index.get(key) is None and (
            len(room.reserved) >= most_chunks
            or not (yield from index.make_room(geometry.chunk_bytes, pace))
        ):
            break
        chunk = index.get(key)
        if chunk is not None:
            index.pin([chunk])
            room.present.append(chunk)
        else:
            chunk = index.reserve(key, parent, geometry.chunk_bytes, geometry.digest)
            assert chunk is not None, "no turn since there was room"
            room.reserved.append(chunk)
            room.numbers.append(number)
            room.addresses.append(chunk.address)
        parent = chunk
    return room


def end_room(index: Index, room: Room, is_whole: bool) -> Turns[None]:
    """Make what was reserved findable, from its head; or forget it, from its tail."""

    def commit(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.commit(chunk)

    def discard(part: Sequence[Chunk]) -> None:
        for chunk in part:
            index.discard(chunk)

    if is_whole:
        yield from each_part(room.reserved, commit, are_chunks=True)
    else:
        yield from each_part(room.reserved[::-1], discard, are_chunks=True)
    index.unpin(room.present)


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
