"""The two ways to an engine's KV: straight into its pages, or through rings that it empties itself.

Which one a worker has, it says when it registers: with a page map, or without. Everything that
depends on it is here: what its requests must name, and the routes of its transfers.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from lamina import protocol
from lamina.board import Board
from lamina.copies import CopyPlan
from lamina.devices.base import EngineMemory
from lamina.errors import refuse
from lamina.geometry import BlockIds, Geometry, PageMap, check_block_ids
from lamina.records import Shape, shapes
from lamina.server.chunks import Room, blocks_of_chunks
from lamina.server.routes import (
    DirectRoute,
    RecordRows,
    RetrieveRoute,
    Ring,
    Route,
    StoreRoute,
)


class Ways(Protocol):
    """Used by the event loop. Raise `GeometryError` or `RequestRefusedError`."""

    def check_retrieve(self, geometry: Geometry, request: protocol.Retrieve, chunks: int) -> int:
        """Look at what a retrieve of leased `chunks` names; returns how many blocks it fills."""

    def retrieve(
        self, geometry: Geometry, request: protocol.Retrieve, addresses: array[int]
    ) -> Route:
        """The route of a retrieve of chunks at `addresses`."""

    def check_store(self, geometry: Geometry, request: protocol.Store) -> int:
        """Look at what a store names; returns the tokens that it covers."""

    def store(self, geometry: Geometry, request: protocol.Store, room: Room) -> Route | None:
        """The route of a store into what it has claimed; None where there is nothing to do."""


def ways_of(request: protocol.Register, memory: EngineMemory, board: Board) -> Ways:
    """Those to the memory that a worker registers."""
    if request.page_map is not None:
        return DirectWays(request.page_map, memory, board)
    retrieves, stores = request.regions
    return RingWays(
        Ring(memory.addresses[0], retrieves.nbytes, board),
        Ring(memory.addresses[1], stores.nbytes, board),
    )


class DirectWays:
    """Between chunks and pages, block by block."""

    def __init__(self, page_map: PageMap, memory: EngineMemory, board: Board) -> None:
        self._page_map = page_map
        self._memory = memory
        self._board = board

    def check_retrieve(self, geometry: Geometry, request: protocol.Retrieve, chunks: int) -> int:
        if request.ring is not None:
            raise refuse("the worker has no ring", "Name the blocks")
        block_ids = _unpack(request.block_ids)
        covered = chunks * geometry.chunk_tokens
        check_block_ids(geometry, self._page_map, request.start_tokens, covered, block_ids)
        geometry.slices(request.layers_per_slice)
        return sum(map(len, block_ids))

    def retrieve(
        self, geometry: Geometry, request: protocol.Retrieve, addresses: array[int]
    ) -> Route:
        block_ids = _unpack(request.block_ids)
        plan = CopyPlan(
            geometry,
            self._page_map,
            self._memory.addresses,
            addresses,
            request.start_tokens,
            block_ids,
        )
        slices = geometry.slices(request.layers_per_slice)
        return DirectRoute(plan, slices, self._board, request.ticket, request.slot, request.base)

    def check_store(self, geometry: Geometry, request: protocol.Store) -> int:
        if request.ring is not None:
            raise refuse("the worker has no ring", "Name the blocks")
        covered = len(request.keys) * geometry.chunk_tokens
        block_ids = _unpack(request.block_ids)
        return check_block_ids(geometry, self._page_map, 0, covered, block_ids)

    def store(self, geometry: Geometry, request: protocol.Store, room: Room) -> Route | None:
        if not room.claimed:
            return None
        block_ids = blocks_of_chunks(geometry, _unpack(request.block_ids), room.numbers)
        regions = self._memory.addresses
        plan = CopyPlan(geometry, self._page_map, regions, room.addresses, 0, block_ids)
        return DirectRoute(plan, geometry.slices(len(geometry.layers)), self._board, request.ticket)


class RingWays:
    """Through a retrieve ring and a store ring; blocks are the engine's own affair."""

    def __init__(self, retrieves: Ring, stores: Ring) -> None:
        self._retrieves = retrieves
        self._stores = stores

    def check_retrieve(self, geometry: Geometry, request: protocol.Retrieve, chunks: int) -> int:
        if request.ring is None or request.ticket is not None:
            raise refuse("the worker has rings", "Name a place in its retrieve ring, and no ticket")
        start, tokens = request.start_tokens, request.ring.tokens
        step = geometry.step_tokens
        if (
            start < 0
            or start % step
            or tokens % step
            or not 0 < tokens <= chunks * geometry.chunk_tokens - start
        ):
            raise refuse(
                f"a transfer of {tokens} tokens from token {start} of {chunks} chunks",
                f"Transfer whole blocks of {step} tokens of what is leased",
            )
        _shapes_of_retrieve(geometry, request, self._retrieves)
        return sum(tokens // group.block_tokens for group in geometry.groups)

    def retrieve(
        self, geometry: Geometry, request: protocol.Retrieve, addresses: array[int]
    ) -> Route:
        assert request.ring is not None
        span = self._retrieves.join(
            _shapes_of_retrieve(geometry, request, self._retrieves), request.ring
        )
        first, end = geometry.chunk_range(request.start_tokens, request.ring.tokens)
        rows = RecordRows(geometry, addresses[first:end])
        return RetrieveRoute(self._retrieves, span, rows, request.slot, request.base)

    def check_store(self, geometry: Geometry, request: protocol.Store) -> int:
        if request.ring is None:
            raise refuse("the worker has rings", "Name a place in its store ring")
        self._stores.check(self._cut(geometry, request), request.ring)  # nothing is reserved yet
        return request.ring.tokens

    def store(self, geometry: Geometry, request: protocol.Store, room: Room) -> Route | None:
        """Also where nothing is claimed: the engine waits until its records are drained."""
        assert request.ring is not None
        span = self._stores.join(self._cut(geometry, request), request.ring)
        return StoreRoute(self._stores, span, RecordRows(geometry, room.addresses, room.numbers))

    def _cut(self, geometry: Geometry, request: protocol.Store) -> tuple[Shape, ...]:
        """The records of a store."""
        whole = geometry.slices(len(geometry.layers))
        return shapes(geometry, whole, len(request.keys), self._stores.nbytes)


def _unpack(packed: tuple[bytes, ...]) -> list[BlockIds]:
    """The block ids of a transfer, one array a group."""
    return [protocol.unpack_block_ids(ids) for ids in packed]


def _shapes_of_retrieve(
    geometry: Geometry, request: protocol.Retrieve, ring: Ring
) -> tuple[Shape, ...]:
    assert request.ring is not None
    first, end = geometry.chunk_range(request.start_tokens, request.ring.tokens)
    slices = geometry.slices(request.layers_per_slice)
    return shapes(geometry, slices, end - first, ring.nbytes)
