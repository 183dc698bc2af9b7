"""Stores, lookups, ends of leases and clears whose turns come in any order.

What is found is whole and stays while it is pinned; a store becomes findable from its head; counts
add up after every turn, and all of it comes back to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.server import turns
from lamina.server.arena import Arena
from lamina.server.chunks import Room, end_room, make_room
from lamina.server.index import Chunk, Index
from lamina.server.leases import Lease, LeaseTable
from lamina.server.turns import Turns, at_once
from lamina.shards import ALONE, ChunkLayout, Shard
from tests.support.layouts import layout_of

LAYOUT = layout_of()
ROOM = 10
"""Pages of the arena."""
PROMPTS = ["abcdefgh", "abcdxyz", "mnopq", "abc", "mnrs", "u", "v"]
TTL_S = 10.0


def keys_of(prompt: str) -> list[bytes]:
    return [prompt[: n + 1].encode() for n in range(len(prompt))]


class Interleaved(RuleBasedStateMachine):
    RANKS: ClassVar[list[tuple[ChunkLayout, Shard]]] = [(LAYOUT, ALONE)]
    """Whoever stores."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(turns, "CHUNKS_PER_TURN", 2)
        self._patch.setattr(turns, "KEYS_PER_TURN", 3)
        self.arena = Arena(ROOM * LAYOUT.chunk_bytes)
        self.arena.extend(self.arena.capacity_bytes)
        self.index = Index(self.arena, self.later)
        self.now_s = 0.0
        self.leases = LeaseTable(self.index, TTL_S, lambda: self.now_s, self.later)
        self.works: list[tuple[Turns[Any], Callable[[Any], None]]] = []
        self.rooms: list[tuple[Room, int]] = []
        self.ending: list[tuple[Room, int]] = []
        self.granted: list[Lease] = []

    def later(self, work: Turns[None]) -> None:
        self.begin(work, lambda _: None)

    def begin(self, work: Turns[Any], done: Callable[[Any], None]) -> None:
        """The first part at once, as the server does."""
        self.works.append((work, done))
        self.go_on(len(self.works) - 1)

    def go_on(self, number: int) -> None:
        work, done = self.works[number]
        try:
            next(work)
        except StopIteration as end:
            self.works = [known for known in self.works if known[0] is not work]
            done(end.value)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        first=st.integers(0, 3),
        most=st.integers(0, ROOM),
        data=st.data(),
    )
    def store(self, prompt: str, first: int, most: int, data: st.DataObject) -> None:
        layout, shard = data.draw(st.sampled_from(self.RANKS))
        keys = keys_of(prompt)
        first = min(first, len(keys) - 1)
        parent = keys[first - 1] if first else b""

        def got(room: Room) -> None:
            assert room.reserved_bytes <= most * layout.chunk_bytes
            for chunk in room.claimed:
                assert shard.writes(chunk.key)
                assert chunk.layout.digest == layout.digest
                assert self.index.get(chunk.key) is chunk
            self.rooms.append((room, shard.number))

        self.begin(make_room(self.index, layout, shard, parent, keys[first:], most), got)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_store(self, data: st.DataObject, is_whole: bool) -> None:
        entry = self.rooms.pop(data.draw(st.integers(0, len(self.rooms) - 1)))
        room, column = entry
        self.ending.append(entry)

        def ended(_: None) -> None:
            self.ending.remove(entry)
            assert not is_whole or not any(c.missing >> column & 1 for c in room.claimed)

        self.begin(end_room(self.index, room, column, is_whole), ended)

    @rule(prompt=st.sampled_from(PROMPTS), owner=st.sampled_from("st"), name=st.sampled_from("123"))
    def lookup(self, prompt: str, owner: str, name: str) -> None:
        keys = keys_of(prompt)

        def grant(chunks: list[Chunk]) -> None:
            assert [chunk.key for chunk in chunks] == keys[: len(chunks)]
            self.granted.append(self.leases.grant("e", owner, name, chunks))

        self.begin(self.index.find_and_pin(keys), grant)

    @rule(name=st.sampled_from("123"))
    def end_request(self, name: str) -> None:
        self.leases.end_request("e", name)

    @rule(owner=st.sampled_from("st"))
    def leave(self, owner: str) -> None:
        self.leases.end_owner(owner)

    @rule(passed_s=st.integers(1, 6))
    def expire(self, passed_s: int) -> None:
        self.now_s += passed_s
        self.leases.expire()

    @rule()
    def clear(self) -> None:
        held = len(self.index)

        def done(cleared: int) -> None:
            assert 0 <= cleared <= held

        self.begin(self.index.clear(), done)

    @precondition(lambda self: self.works)
    @rule(data=st.data(), count=st.integers(1, 4))
    def turns(self, data: st.DataObject, count: int) -> None:
        work = self.works[data.draw(st.integers(0, len(self.works) - 1))]
        for _ in range(count):
            if work in self.works:
                self.go_on(self.works.index(work))

    def chunks(self) -> list[Chunk]:
        return [chunk for chunks in self.index._dicts for chunk in chunks.values()]

    @invariant()
    def counts_add_up(self) -> None:
        chunks = self.chunks()
        assert len(self.index) == len(chunks)
        assert self.index.pins >= sum(chunk.pins for chunk in chunks)
        taken = sum(chunk.layout.chunk_bytes for chunk in chunks)
        assert self.arena.free_bytes == self.arena.capacity_bytes - taken
        for chunk in chunks:
            children = [c for c in chunks if c.parent_key == chunk.key]
            assert chunk.children == len(children)
        candidates = [entry[2] for entry in self.index._candidates]
        assert len(set(candidates)) == len(candidates), "a candidate twice"
        assert {c for c in chunks if not (c.is_empty or c.pins or c.children)} <= set(candidates)

    @invariant()
    def nobody_stores_a_column_twice(self) -> None:
        claims = [(chunk, column) for room, column in self.rooms for chunk in room.claimed]
        assert len(set(claims)) == len(claims)
        for chunk, column in claims:
            assert self.index.get(chunk.key) is chunk
            assert chunk.missing & chunk.claimed & 1 << column

    @invariant()
    def what_is_leased_is_there(self) -> None:
        live = [lease for lease in self.granted if lease.number in self.leases._leases]
        for lease in live:
            for chunk in lease.chunks:
                assert not chunk.missing
                assert chunk.pins > 0
                assert self.index.get(chunk.key) is chunk

    @invariant()
    def stores_become_findable_from_their_head(self) -> None:
        for room, column in self.ending:
            whole = [not chunk.missing >> column & 1 for chunk in room.claimed]
            assert whole == sorted(whole, reverse=True)

    def teardown(self) -> None:
        def finish() -> None:
            while self.works:
                self.go_on(0)

        try:
            finish()
            for room, column in self.rooms:
                self.begin(end_room(self.index, room, column, True), lambda _: None)
            for owner in "st":
                self.leases.end_owner(owner)
            finish()
            assert self.index.pins == len(self.leases) == 0
            assert not any(chunk.pins or chunk.claimed for chunk in self.chunks())
            assert all(chunk.children or not chunk.is_empty for chunk in self.chunks())
            at_once(self.index.clear())
            finish()
            assert len(self.index) == 0
            assert self.arena.free_bytes == self.arena.capacity_bytes
            self.check_that_all_together_store_a_prompt()
        finally:
            self._patch.undo()

    def check_that_all_together_store_a_prompt(self) -> None:
        for digest in {layout.digest for layout, _ in self.RANKS}:
            ranks = [(ours, shard) for ours, shard in self.RANKS if ours.digest == digest]
            keys = keys_of("ab")
            for layout, shard in ranks:
                room = at_once(make_room(self.index, layout, shard, b"", keys, ROOM))
                at_once(end_room(self.index, room, shard.number, True))
            while self.works:
                self.go_on(0)
            assert len(self.index.find(keys)) == len(keys)
            at_once(self.index.clear())
            while self.works:
                self.go_on(0)


class InterleavedRanks(Interleaved):
    """Two engines whose chunks are alike, one of them with replicas, and one that cuts them
    otherwise."""

    RANKS: ClassVar[list[tuple[ChunkLayout, Shard]]] = [
        *((layout_of(1, 2), Shard(n, 2, replica, 3)) for n in range(2) for replica in range(3)),
        *((layout_of(1, 2), Shard(n, 2)) for n in range(2)),
        *((layout_of(1, 1, 1, 1), Shard(n, 4)) for n in range(4)),
    ]


TestInterleaved = Interleaved.TestCase
TestInterleavedRanks = InterleavedRanks.TestCase
TestInterleavedRanks.settings = settings(
    derandomize=True, deadline=None, max_examples=200, stateful_step_count=40
)
TestInterleaved.settings = settings(
    derandomize=True, deadline=None, max_examples=120, stateful_step_count=40
)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """One with room for ten chunks, two of which are done a turn."""
    monkeypatch.setattr(turns, "CHUNKS_PER_TURN", 2)
    monkeypatch.setattr(turns, "KEYS_PER_TURN", 2)
    arena = Arena(ROOM * LAYOUT.chunk_bytes)
    arena.extend(arena.capacity_bytes)
    return Index(arena)


def save(index: Index, prompt: str) -> None:
    room = at_once(make_room(index, LAYOUT, ALONE, b"", keys_of(prompt), ROOM))
    at_once(end_room(index, room, 0, True))


def test_a_store_is_found_as_far_as_its_turns_have_come(index: Index) -> None:
    keys = keys_of("abcde")
    room = at_once(make_room(index, LAYOUT, ALONE, b"", keys, ROOM))
    assert [len(index.find(keys)) for _ in end_room(index, room, 0, True)] == [2, 4]
    assert len(index.find(keys)) == 5


def test_what_a_lookup_has_found_stays_while_it_goes_on(index: Index) -> None:
    save(index, "abcdef")
    lookup = index.find_and_pin(keys_of("abcdef"))
    next(lookup)
    assert at_once(index.clear()) == 4
    assert [chunk.key for chunk in at_once(lookup)] == keys_of("ab")
    assert index.pins == 2


def test_a_clear_leaves_what_was_used_or_stored_since_it_began(index: Index) -> None:
    save(index, "abcdef")
    save(index, "xy")
    one, two = index.clear(), index.clear()
    next(one)
    next(two)
    used = index.find(keys_of("xy"))
    index.pin(used)
    index.unpin(used)
    save(index, "mn")
    cleared = at_once(one) + at_once(two)
    assert cleared == 6
    assert [len(index.find(keys_of(prompt))) for prompt in ("abcdef", "xy", "mn")] == [0, 2, 2]


def test_two_stores_of_one_prompt_share_what_the_other_has_reserved_meanwhile(
    index: Index,
) -> None:
    keys = keys_of("abcdefgh")
    one = make_room(index, LAYOUT, ALONE, b"", keys, ROOM)
    next(one)
    other = at_once(make_room(index, LAYOUT, ALONE, b"", keys, ROOM))
    room = at_once(one)
    assert [chunk.key for chunk in (*room.claimed, *other.claimed)] == keys
    assert len(room.claimed) < len(keys)
    assert list(room.numbers) == list(range(len(room.claimed)))
    assert list(room.addresses) == [chunk.address for chunk in room.claimed]
    at_once(end_room(index, other, 0, True))
    assert index.find(keys) == []
    at_once(end_room(index, room, 0, True))
    assert len(index.find(keys)) == len(keys)
    assert index.pins == 0
