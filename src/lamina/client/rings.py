"""The rings of one connection: which records its transfers get, and what its device is told.

A retrieve joins its ring in one act: its records get their numbers and places, its message is sent,
and everything that the engine's device will ever do for it is enqueued. So whatever waits, waits
for something that was enqueued earlier or for the server, under a deadline. A store gets its
numbers likewise, but its records are gathered as the ring has room for them, at each `pump`: nobody
waits for them, so that may depend on the engine's next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from lamina.board import DRAINED, GATHERED, Board, reached
from lamina.client.retrieve import RingRetrieve
from lamina.client.store import RingStore
from lamina.devices.base import EngineRings
from lamina.geometry import BlockIds, Geometry, Slice
from lamina.protocol import RingPlace
from lamina.records import Shape, Span, fingerprint, lay_out, shapes


class _Numbers:
    """What a ring gives out next: a number and a position. Both only grow."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = 1
        self.position = 0

    def lay_out(self, cut: Sequence[Shape]) -> Span:
        return lay_out(cut, self.number, self.position, self.nbytes)

    def place(self, tokens: int, span: Span) -> RingPlace:
        return RingPlace(tokens, self.number, self.position, fingerprint(span.shapes))

    def take(self, span: Span) -> None:
        self.number = (span.last_number + 1) & 0xFFFF_FFFF
        self.position = span.end_position


class Rings:
    """Engine's thread. `device` makes the moves; the rings are empty when a connection begins."""

    def __init__(self, board: Board, device: EngineRings, geometry: Geometry) -> None:
        self._board = board
        self._device = device
        self._geometry = geometry
        retrieves, stores = device.regions
        self._retrieves = _Numbers(retrieves.nbytes)
        self._stores = _Numbers(stores.nbytes)
        self._gathering: deque[RingStore] = deque()
        """Stores of which not all is enqueued."""
        self._taken: deque[tuple[int, int, RingStore]] = deque()
        """Number and position of records that may not be drained yet."""

    def retrieve_span(self, start_tokens: int, tokens: int, slices: tuple[Slice, ...]) -> Span:
        """The records that a retrieve would get if it joined now."""
        first, end = self._geometry.chunk_range(start_tokens, tokens)
        cut = shapes(self._geometry, slices, end - first, self._retrieves.nbytes)
        return self._retrieves.lay_out(cut)

    def retrieve_place(self, tokens: int, span: Span) -> RingPlace:
        """Where that is, as the server is told."""
        return self._retrieves.place(tokens, span)

    def take_retrieve(self, span: Span) -> None:
        """The retrieve has joined: its message is on its way."""
        self._retrieves.take(span)

    def place(
        self,
        retrieve: RingRetrieve,
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        after: object,
    ) -> None:
        """Enqueue all of a retrieve that has joined. Raises as `EngineRings.place`."""
        wanted = [
            self._whole_chunks(group, start_tokens, ids) for group, ids in enumerate(block_ids)
        ]
        self._device.place(self._board, retrieve.slot, retrieve.base, retrieve.span, wanted, after)

    def skip(self, retrieve: RingRetrieve) -> None:
        """Pass its records without it."""
        self._device.skip(self._board, retrieve.span.last_number)

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        self._device.synchronize()

    def store_span(self, chunks: int) -> Span:
        """The records that a store of so many chunks would get if it joined now."""
        whole = self._geometry.slices(len(self._geometry.layers))
        cut = shapes(self._geometry, whole, chunks, self._stores.nbytes)
        return self._stores.lay_out(cut)

    def store_place(self, chunks: int, span: Span) -> RingPlace:
        """Where that is, as the server is told."""
        return self._stores.place(chunks * self._geometry.chunk_tokens, span)

    def join_store(self, store: RingStore) -> None:
        """The store has joined; `pump` gathers what there is room for."""
        self._stores.take(store.span)
        self._gathering.append(store)

    def pump(self) -> None:
        """Gather what has room by now, in order. Raises `DeviceError`."""
        while self._gathering:
            store = self._gathering[0]
            while not store.is_over and store.enqueued < len(store.span.shapes):
                if not self._has_room(store.span, store.enqueued):
                    return
                self._gather(store)
            self._gathering.popleft()

    def is_gathered(self, store: RingStore) -> bool:
        """Whether its pages have been read, all of them."""
        return store.enqueued == len(store.span.shapes) and self.is_read(store)

    def is_read(self, store: RingStore) -> bool:
        """Whether nothing that is enqueued reads its pages any more; more of it may follow."""
        if not store.enqueued:
            return True
        return reached(self._board.landed(GATHERED), store.span.number(store.enqueued - 1))

    def _gather(self, store: RingStore) -> None:
        index = store.enqueued
        shape, position = store.span.shapes[index], store.span.positions[index]
        number = store.span.number(index)
        ids = shape.blocks_of(self._geometry, store.block_ids)
        after = store.event if index == 0 else None
        self._device.gather(self._board, number, shape, position, ids, after)
        store.enqueued += 1
        self._taken.append((number, position, store))

    def _has_room(self, span: Span, index: int) -> bool:
        """Whether the server has drained every record whose bytes this one takes over."""
        position = span.positions[index] + span.shapes[index].nbytes - self._stores.nbytes
        drained = self._board.landed(DRAINED)
        while self._taken and (reached(drained, self._taken[0][0]) or self._taken[0][2].answered):
            self._taken.popleft()
        return not self._taken or self._taken[0][1] >= position

    def _whole_chunks(self, group: int, start_tokens: int, ids: BlockIds) -> BlockIds:
        """Block ids of whole chunks: -1 for blocks of them that are not wanted."""
        tokens = self._geometry.groups[group].block_tokens
        first, end = self._geometry.chunk_range(start_tokens, len(ids) * tokens)
        blocks = self._geometry.blocks_per_chunk(group)
        whole = np.full((end - first) * blocks, -1, np.int32)
        begin = start_tokens // tokens - first * blocks
        whole[begin : begin + len(ids)] = ids
        return whole
