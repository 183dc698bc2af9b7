"""Which chunks the server holds: lookup, pins, and eviction when there is no room.

The index is a forest: a chunk's parent is the chunk before it in its prompt. A chunk can be found
only once it is whole, and evicted only when it is whole, unpinned and has no children, least
recently used first: so a prompt loses its tail before its head, and a head shared by others stays.

    find      the longest run of whole chunks       pin / unpin   keep a run from eviction
    reserve   room for a chunk about to be stored   commit        all its bytes are in
    discard   they never will be                    clear         forget all that can be forgotten

Used by the server's event loop only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from lamina.server.arena import Arena


class Chunk:
    """One chunk's place in the arena. `layout` is the digest of its geometry."""

    __slots__ = (
        "address",
        "children",
        "key",
        "layout",
        "nbytes",
        "parent",
        "pins",
        "used",
        "whole",
    )

    def __init__(
        self, key: bytes, parent: Chunk | None, address: int, nbytes: int, layout: bytes
    ) -> None:
        self.key = key
        self.parent = parent
        self.address = address
        self.nbytes = nbytes
        self.layout = layout
        self.children = 0
        self.pins = 0
        self.used = 0
        self.whole = False


class Index:
    """All chunks of one arena by key."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._chunks: dict[bytes, Chunk] = {}
        # Candidates for eviction as (used, number, chunk). An entry is out of date when the chunk
        # was used since or is not evictable any more; it is dropped when it comes up.
        self._candidates: list[tuple[int, int, Chunk]] = []
        self._number = 0
        self._clock = 0
        self.pins = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, whole or still being stored."""
        return self._chunks.get(key)

    def find(self, keys: Iterable[bytes]) -> list[Chunk]:
        """The longest run of whole chunks for `keys`, from the first. Pin it before awaiting."""
        run = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or not chunk.whole:
                break
            run.append(chunk)
        return run

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Keep chunks from eviction; pins add up."""
        for chunk in chunks:
            chunk.pins += 1
        self.pins += len(chunks)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Undo one `pin`; the chunks count as used now."""
        self._clock += 1
        self.pins -= len(chunks)
        for chunk in chunks:
            assert chunk.pins > 0, "unpinned more often than pinned"
            chunk.pins -= 1
            chunk.used = self._clock
            self._offer(chunk)

    def reserve(self, key: bytes, parent: Chunk | None, nbytes: int, layout: bytes) -> Chunk | None:
        """Room for a chunk that is not held yet, evicting as needed; None when there is none.

        The chunk comes pinned once and is not found before `commit`. `parent` must be pinned, or it
        might be evicted to make room for its own child. While the arena still fills, nothing is
        evicted: memory is on its way.
        """
        assert key not in self._chunks, "reserved twice"
        while (address := self._arena.allocate(nbytes)) is None:
            if not self._arena.is_filled or not self._evict_one():
                return None
        chunk = self._chunks[key] = Chunk(key, parent, address, nbytes, layout)
        if parent is not None:
            parent.children += 1
        self.pin([chunk])
        return chunk

    def commit(self, chunk: Chunk) -> None:
        """All bytes of a reserved chunk are in: it can be found. Ends the pin of `reserve`."""
        chunk.whole = True
        self.unpin([chunk])

    def discard(self, chunk: Chunk) -> None:
        """A reserved chunk will not become whole: forget it. Ends the pin of `reserve`.

        Another store may still hold it as present in its chain; nobody reads it.
        """
        self.pins -= 1
        chunk.pins -= 1
        self._forget(chunk)

    def clear(self) -> int:
        """Evict every chunk that can be; return how many."""
        before = len(self._chunks)
        while self._evict_one():
            pass
        return before - len(self._chunks)

    def _is_evictable(self, chunk: Chunk) -> bool:
        return chunk.whole and not chunk.pins and not chunk.children

    def _offer(self, chunk: Chunk) -> None:
        if not self._is_evictable(chunk):
            return
        self._number += 1
        heapq.heappush(self._candidates, (chunk.used, self._number, chunk))
        if len(self._candidates) > 2 * len(self._chunks) + 1024:
            self._candidates = [entry for entry in self._candidates if self._is_current(entry)]
            heapq.heapify(self._candidates)

    def _is_current(self, entry: tuple[int, int, Chunk]) -> bool:
        used, _, chunk = entry
        held = self._chunks.get(chunk.key) is chunk
        return held and used == chunk.used and self._is_evictable(chunk)

    def _evict_one(self) -> bool:
        while self._candidates:
            entry = heapq.heappop(self._candidates)
            if self._is_current(entry):
                self._forget(entry[2])
                self.evicted += 1
                return True
        return False

    def _forget(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        self._arena.free(chunk.address, chunk.nbytes)
        if chunk.parent is not None:
            chunk.parent.children -= 1
            self._offer(chunk.parent)
