"""Stores, lookups, ends of leases and clears whose turns come in any order.

What is found is whole and stays while it is pinned; a store becomes findable from its head; counts
add up after every turn, and all of it comes back to zero.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.geometry import Geometry, Group, Layer
from lamina.server import turns
from lamina.server.arena import Arena
from lamina.server.chunks import Room, end_room, make_room
from lamina.server.index import Chunk, Index
from lamina.server.leases import Lease, LeaseTable
from lamina.server.turns import Turns, at_once

GEOMETRY = Geometry(16, (Group(16),), (Layer("0", 0, 1, mmap.PAGESIZE),))
ROOM = 10
PROMPTS = ["abcdefgh", "abcdxyz", "mnopq", "abc", "mnrs", "u", "v"]
TTL_S = 10.0


def keys_of(prompt: str) -> list[bytes]:
    return [prompt[: n + 1].encode() for n in range(len(prompt))]


class Interleaved(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(turns, "CHUNKS_PER_TURN", 2)
        self._patch.setattr(turns, "KEYS_PER_TURN", 3)
        self.arena = Arena(ROOM * GEOMETRY.chunk_bytes)
        self.arena.extend(self.arena.capacity_bytes)
        self.index = Index(self.arena, self.later)
        self.now_s = 0.0
        self.leases = LeaseTable(self.index, TTL_S, lambda: self.now_s, self.later)
        self.works: list[tuple[Turns[Any], Callable[[Any], None]]] = []
        self.rooms: list[Room] = []
        self.ending: list[Room] = []
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

    @rule(prompt=st.sampled_from(PROMPTS), first=st.integers(0, 3), most=st.integers(1, ROOM))
    def store(self, prompt: str, first: int, most: int) -> None:
        keys = keys_of(prompt)
        first = min(first, len(keys) - 1)
        parent = keys[first - 1] if first else b""
        self.begin(make_room(self.index, GEOMETRY, parent, keys[first:], most), self.rooms.append)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_store(self, data: st.DataObject, is_whole: bool) -> None:
        room = self.rooms.pop(data.draw(st.integers(0, len(self.rooms) - 1)))
        self.ending.append(room)
        self.begin(
            end_room(self.index, room, is_whole),
            lambda _: self.ending.remove(room),
        )

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
        return [chunk for shard in self.index._shards for chunk in shard.values()]

    @invariant()
    def counts_add_up(self) -> None:
        chunks = self.chunks()
        assert len(self.index) == len(chunks)
        assert self.index.pins >= sum(chunk.pins for chunk in chunks)
        taken = sum(chunk.nbytes for chunk in chunks)
        assert self.arena.free_bytes == self.arena.capacity_bytes - taken
        for chunk in chunks:
            children = [c for c in chunks if c.parent_number == chunk.number]
            assert chunk.children == len(children)
        candidates = [entry[2] for entry in self.index._candidates]
        assert len(set(candidates)) == len(candidates), "a candidate twice"
        assert {chunk for chunk in chunks if self.index._is_evictable(chunk)} <= set(candidates)

    @invariant()
    def what_is_leased_is_there(self) -> None:
        live = [lease for lease in self.granted if lease.number in self.leases._leases]
        for lease in live:
            for chunk in lease.chunks:
                assert chunk.whole
                assert chunk.pins > 0
                assert self.index.get(chunk.key) is chunk

    @invariant()
    def stores_become_findable_from_their_head(self) -> None:
        for room in self.ending:
            whole = [chunk.whole for chunk in room.reserved]
            assert whole == sorted(whole, reverse=True)

    def teardown(self) -> None:
        def finish() -> None:
            while self.works:
                self.go_on(0)

        try:
            finish()
            for room in self.rooms:
                self.begin(end_room(self.index, room, True), lambda _: None)
            for owner in "st":
                self.leases.end_owner(owner)
            finish()
            assert self.index.pins == len(self.leases) == 0
            assert not any(chunk.pins for chunk in self.chunks())
            at_once(self.index.clear())
            assert len(self.index) == 0
            assert self.arena.free_bytes == self.arena.capacity_bytes
        finally:
            self._patch.undo()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(
    derandomize=True, deadline=None, max_examples=120, stateful_step_count=40
)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """One with room for ten chunks, two of which are done a turn."""
    monkeypatch.setattr(turns, "CHUNKS_PER_TURN", 2)
    monkeypatch.setattr(turns, "KEYS_PER_TURN", 2)
    arena = Arena(ROOM * GEOMETRY.chunk_bytes)
    arena.extend(arena.capacity_bytes)
    return Index(arena)


def save(index: Index, prompt: str) -> None:
    room = at_once(make_room(index, GEOMETRY, b"", keys_of(prompt), ROOM))
    at_once(end_room(index, room, True))


def test_a_store_is_found_as_far_as_its_turns_have_come(index: Index) -> None:
    keys = keys_of("abcde")
    room = at_once(make_room(index, GEOMETRY, b"", keys, ROOM))
    assert [len(index.find(keys)) for _ in end_room(index, room, True)] == [2, 4]
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
    one = make_room(index, GEOMETRY, b"", keys, ROOM)
    next(one)
    other = at_once(make_room(index, GEOMETRY, b"", keys, ROOM))
    room = at_once(one)
    assert [chunk.key for chunk in (*room.reserved, *other.reserved)] == keys
    assert len(room.reserved) < len(keys)
    assert list(room.numbers) == list(range(len(room.reserved)))
    assert list(room.addresses) == [chunk.address for chunk in room.reserved]
    at_once(end_room(index, other, True))
    assert index.find(keys) == []
    at_once(end_room(index, room, True))
    assert len(index.find(keys)) == len(keys)
    assert index.pins == 0
