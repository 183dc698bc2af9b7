"""Which chunks the server has: lookup, pins, and eviction when there is no room.

The index is a forest: a chunk's parent is the chunk before it in its prompt. A chunk has a column
for each shard of its engine, and can be found only once all of them are in. It can be evicted when
it is unpinned and has no children, least recently used first: so a prompt loses its tail before its
head, and a head shared by others stays. One that is not whole waits like any other for somebody to
store the rest; one of which nothing is in is forgotten as soon as nobody needs its place.

    find      the longest run of whole chunks      pin / unpin   keep a run from eviction
    reserve   room for all columns of a chunk      claim         a column is about to be stored
    commit    its bytes are in                     discard       they will not be
    clear     forget all that can be forgotten

Used by the server's event loop only. What may take long is done in turns (`turns`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import msgspec

from lamina.server.arena import Arena
from lamina.server.turns import Pace, Turns, at_once, each_part, parts
from lamina.shards import ChunkLayout

_DICTS = 256
"""A dict that grows moves all of its items, for 90 ms at 700,000 chunks. Keys are hashes, so that
dicts by their first byte grow apart, each in under a millisecond."""


class Chunk(msgspec.Struct, gc=False, eq=False):
    """One chunk's place in the arena, and which columns of it are there; a bit each.

    Python's garbage collector does not see chunks (`gc=False`): it would look at all of them every
    now and then, 70 ms for 600,000. So a chunk refers to no other: to its parent by key, as a
    parent stays as long as it has children.
    """

    key: bytes
    parent_key: bytes
    """Empty without a parent."""
    address: int
    layout: ChunkLayout
    missing: int
    """Columns that are not in; 0 of a chunk that is whole."""
    claimed: int = 0
    """Those of them that are being stored."""
    children: int = 0
    pins: int = 0
    used: int = 0
    is_candidate: bool = False
    """Whether it is among the candidates for eviction."""

    @property
    def is_empty(self) -> bool:
        """Whether no column is in."""
        return self.missing == self.layout.all_columns


class Index:
    """All chunks of one arena by key. `later` gets what remains to be done of a long `unpin`, or
    where many empty chunks go at once."""

    def __init__(self, arena: Arena, later: Callable[[Turns[None]], None] = at_once) -> None:
        self._arena = arena
        self._later = later
        self._dicts: list[dict[bytes, Chunk]] = [{} for _ in range(_DICTS)]
        # Candidates for eviction as (used, number, chunk), each chunk at most once. One that was
        # used since goes back to its place when it comes up; one that is not evictable goes. None
        # of them is empty, so that this is the only way out of the index for them.
        self._candidates: list[tuple[int, int, Chunk]] = []
        self._offered = 0
        self._clock = 0
        self.pins = 0
        self.evicted = 0

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, whole or not."""
        return self._dicts[key[0]].get(key)

    def find(self, keys: Iterable[bytes]) -> list[Chunk]:
        """The longest run of whole chunks for `keys`, from the first. Pin it before awaiting."""
        run = []
        for key in keys:
            chunk = self._dicts[key[0]].get(key)
            if chunk is None or chunk.missing:
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

    def reserve(self, key: bytes, parent: Chunk | None, layout: ChunkLayout) -> Chunk | None:
        """Room for all columns of a chunk that is not there, evicting as needed (`make_room` does
        it in turns); None when there is none.

        The chunk comes pinned once, and nothing of it is claimed. `parent` must be pinned, or it
        might be evicted to make room for its own child.
        """
        assert self.get(key) is None, "reserved twice"
        nbytes = layout.chunk_bytes
        if not at_once(self.make_room(nbytes, Pace())):
            return None
        address = self._arena.allocate(nbytes)
        assert address is not None
        parent_key = parent.key if parent is not None else b""
        chunk = Chunk(key, parent_key, address, layout, layout.all_columns)
        self._dicts[key[0]][key] = chunk
        if parent is not None:
            parent.children += 1
        self.pin([chunk])
        return chunk

    def claim(self, chunk: Chunk, column: int) -> bool:
        """Whether the caller is to store a column of a chunk that it has pinned; not where the
        column is in, or somebody else stores it."""
        if not chunk.missing & ~chunk.claimed & 1 << column:
            return False
        chunk.claimed |= 1 << column
        return True

    def commit(self, chunk: Chunk, column: int) -> None:
        """All bytes of a claimed column are in. Ends the claimer's pin."""
        chunk.missing ^= 1 << column
        self._unclaim(chunk, column)

    def discard(self, chunk: Chunk, column: int) -> None:
        """A claimed column will not be stored; the next who comes may claim it. Ends the claimer's
        pin."""
        self._unclaim(chunk, column)

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
            self._let_go(chunk)

    def _unclaim(self, chunk: Chunk, column: int) -> None:
        assert chunk.claimed >> column & 1, "nobody stores the column"
        chunk.claimed ^= 1 << column
        self._unpin([chunk])

    def _is_needed(self, chunk: Chunk) -> bool:
        return bool(chunk.pins or chunk.children)

    def _let_go(self, chunk: Chunk) -> None:
        """Forget a chunk that nobody needs if it is empty, or else make it a candidate."""
        if chunk.is_candidate or self._is_needed(chunk):
            return
        if chunk.is_empty:
            self._forget(chunk)
        else:
            chunk.is_candidate = True
            self._offered += 1
            heapq.heappush(self._candidates, (chunk.used, self._offered, chunk))

    def _examine_candidate(self) -> bool:
        """Take the first candidate; evict it if it is the least recently used; whether it was."""
        used, _, chunk = heapq.heappop(self._candidates)
        chunk.is_candidate = False
        if used != chunk.used or self._is_needed(chunk):
            self._let_go(chunk)
            return False
        self._forget(chunk)
        self.evicted += 1
        return True

    def _forget(self, chunk: Chunk) -> None:
        """With those before it that are empty and that nothing else needed."""
        if (emptied := self._remove(chunk)) is not None:
            self._later(self._remove_upwards(emptied))

    def _remove_upwards(self, chunk: Chunk | None) -> Turns[None]:
        pace = Pace()
        while chunk is not None:
            if pace.is_spent():
                yield None
                if self.get(chunk.key) is not chunk or self._is_needed(chunk) or not chunk.is_empty:
                    return  # somebody used it meanwhile, and has let it go since or will
            chunk = self._remove(chunk)

    def _remove(self, chunk: Chunk) -> Chunk | None:
        """Give its memory back. Returns its parent where that can go at once, too."""
        del self._dicts[chunk.key[0]][chunk.key]
        self._arena.free(chunk.address, chunk.layout.chunk_bytes)
        if not chunk.parent_key:
            return None
        parent = self._dicts[chunk.parent_key[0]][chunk.parent_key]
        parent.children -= 1
        if parent.is_empty and not self._is_needed(parent):
            return parent
        self._let_go(parent)
        return None
