"""Which chunks the server has: lookup, pins, and eviction when there is no room.

The index is a forest: a chunk's parent is the chunk before it in its prompt. A chunk can be found
only once it is whole, and evicted only when it is whole, unpinned and has no children, least
recently used first: so a prompt loses its tail before its head, and a head shared by others stays.

    find      the longest run of whole chunks       pin / unpin   keep a run from eviction
    reserve   room for a chunk about to be stored   commit        all its bytes are in
    discard   they never will be                    clear         forget all that can be forgotten

Used by the server's event loop only. What may take long is done in turns (`turns`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import msgspec

from lamina.server.arena import Arena
from lamina.server.turns import Pace, Turns, at_once, each_part, parts

_SHARDS = 256
"""A dict that grows moves all of its items, for 90 ms at 700,000 chunks. Keys are hashes, so that
shards by their first byte grow apart, each in under a millisecond."""


class Chunk(msgspec.Struct, gc=False, eq=False):
    """One chunk's place in the arena. `layout` is the digest of its geometry.

    Python's garbage collector does not see chunks (`gc=False`): it would look at all of them every
    now and then, 70 ms for 600,000. So a chunk refers to no other: to its parent by key, and by
    number, as another chunk may have come to have that key.
    """

    key: bytes
    number: int
    """Unlike any other chunk's."""
    parent_key: bytes
    parent_number: int
    """0 without a parent."""
    address: int
    nbytes: int
    layout: bytes
    children: int = 0
    pins: int = 0
    used: int = 0
    whole: bool = False
    is_candidate: bool = False
    """Whether it is among the candidates for eviction."""


class Index:
    """All chunks of one arena by key. `later` gets what remains to be done of a long `unpin`."""

    def __init__(self, arena: Arena, later: Callable[[Turns[None]], None] = at_once) -> None:
        self._arena = arena
        self._later = later
        self._shards: list[dict[bytes, Chunk]] = [{} for _ in range(_SHARDS)]
        # Candidates for eviction as (used, number, chunk), each chunk at most once. One that was
        # used since goes back to its place when it comes up; one that is not evictable goes.
        self._candidates: list[tuple[int, int, Chunk]] = []
        self._offered = 0
        self._given_out = 0
        self._clock = 0
        self.pins = 0
        self.evicted = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, whole or still being stored."""
        return self._shards[key[0]].get(key)

    def find(self, keys: Iterable[bytes]) -> list[Chunk]:
        """The longest run of whole chunks for `keys`, from the first. Pin it before awaiting."""
        run = []
        for key in keys:
            chunk = self._shards[key[0]].get(key)
            if chunk is None or not chunk.whole:
                break
            run.append(chunk)
        return run

    def find_and_pin(self, keys: Sequence[bytes]) -> Turns[list[Chunk]]:
        """The same of many keys, pinned as they are found."""
        run: list[Chunk] = []
        for number, part in enumerate(parts(keys)):
            if number:
                yield None
            found = self.find(part)
            self.pin(found)
            run += found
            if len(found) < len(part):
                break
        return run

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Keep chunks from eviction; pins add up."""
        for chunk in chunks:
            chunk.pins += 1
        self.pins += len(chunks)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Undo one `pin`; the chunks count as used now. Those of a long run are unpinned in turns,
        and the caller must not change `chunks` any more."""
        self._later(each_part(chunks, self._unpin))

    def make_room(self, nbytes: int, pace: Pace) -> Turns[bool]:
        """Evict until a chunk of `nbytes` fits; whether it does now, until the next turn.

        While the arena still fills, nothing is evicted: memory is on its way.
        """
        while not self._arena.fits(nbytes):
            if not self._arena.is_filled or not self._candidates:
                return False
            self._examine_candidate()
            if pace.is_spent():
                yield None
        return True

    def reserve(self, key: bytes, parent: Chunk | None, nbytes: int, layout: bytes) -> Chunk | None:
        """Room for a chunk that is not there, evicting as needed (`make_room` does it in turns);
        None when there is none.

        The chunk comes pinned once and is not found before `commit`. `parent` must be pinned, or it
        might be evicted to make room for its own child.
        """
        assert self.get(key) is None, "reserved twice"
        if not at_once(self.make_room(nbytes, Pace())):
            return None
        address = self._arena.allocate(nbytes)
        assert address is not None
        parent_key, parent_number = (parent.key, parent.number) if parent else (b"", 0)
        self._given_out += 1
        chunk = Chunk(key, self._given_out, parent_key, parent_number, address, nbytes, layout)
        self._shards[key[0]][key] = chunk
        if parent is not None:
            parent.children += 1
        self.pin([chunk])
        return chunk

    def commit(self, chunk: Chunk) -> None:
        """All bytes of a reserved chunk are in: it can be found. Ends the pin of `reserve`."""
        chunk.whole = True
        self._unpin([chunk])

    def discard(self, chunk: Chunk) -> None:
        """A reserved chunk will not become whole: forget it. Ends the pin of `reserve`.

        Another store may still count it as present in its chain; nobody reads it.
        """
        self.pins -= 1
        chunk.pins -= 1
        self._forget(chunk)

    def clear(self) -> Turns[int]:
        """Evict every chunk that can be and was not used since the call; return how many."""
        until, cleared, pace = self._clock, 0, Pace()
        while self._candidates and self._candidates[0][0] <= until:
            cleared += self._examine_candidate()
            if pace.is_spent():
                yield None
        return cleared

    def _unpin(self, chunks: Sequence[Chunk]) -> None:
        self._clock += 1
        self.pins -= len(chunks)
        for chunk in chunks:
            assert chunk.pins > 0, "unpinned more often than pinned"
            chunk.pins -= 1
            chunk.used = self._clock
            self._offer(chunk)

    def _is_evictable(self, chunk: Chunk) -> bool:
        return chunk.whole and not chunk.pins and not chunk.children

    def _offer(self, chunk: Chunk) -> None:
        """Make a chunk a candidate, if it is evictable and none yet."""
        if chunk.is_candidate or not self._is_evictable(chunk):
            return
        chunk.is_candidate = True
        self._offered += 1
        heapq.heappush(self._candidates, (chunk.used, self._offered, chunk))

    def _examine_candidate(self) -> bool:
        """Take the first candidate; evict it if it is the least recently used; whether it was."""
        used, _, chunk = heapq.heappop(self._candidates)
        chunk.is_candidate = False
        if used != chunk.used or not self._is_evictable(chunk):
            self._offer(chunk)
            return False
        self._forget(chunk)
        self.evicted += 1
        return True

    def _forget(self, chunk: Chunk) -> None:
        del self._shards[chunk.key[0]][chunk.key]
        self._arena.free(chunk.address, chunk.nbytes)
        parent = self.get(chunk.parent_key) if chunk.parent_number else None
        if parent is not None and parent.number == chunk.parent_number:
            parent.children -= 1
            self._offer(parent)
