"""The index: what can be found, what is evicted first, and that counts come back to zero."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.server.arena import Arena
from lamina.server.index import Chunk, Index
from lamina.server.turns import at_once

LAYOUT = b"layout"
CHUNK_BYTES = mmap.PAGESIZE


def index_of(chunks: int) -> Index:
    """An index with room for this many chunks."""
    arena = Arena(chunks * CHUNK_BYTES)
    arena.extend(arena.capacity_bytes)
    return Index(arena)


def add(index: Index, key: bytes, parent: Chunk | None = None) -> Chunk:
    """Store a chunk; its parent is pinned meanwhile, as a store does."""
    held = [parent] if parent is not None else []
    index.pin(held)
    chunk = index.reserve(key, parent, CHUNK_BYTES, LAYOUT)
    assert chunk is not None
    index.commit(chunk)
    index.unpin(held)
    return chunk


def add_chain(index: Index, keys: str, parent: Chunk | None = None) -> list[Chunk]:
    """A prompt of one chunk per letter."""
    chain = []
    for key in keys:
        parent = add(index, key.encode(), parent)
        chain.append(parent)
    return chain


def touch(index: Index, *chunks: Chunk) -> None:
    index.pin(chunks)
    index.unpin(chunks)


def evict(index: Index, filler: int) -> Chunk:
    """Make room for one more chunk, which stays pinned."""
    chunk = index.reserve(b"filler%d" % filler, None, CHUNK_BYTES, LAYOUT)
    assert chunk is not None
    return chunk


def held(index: Index, keys: str) -> str:
    return "".join(key for key in keys if index.get(key.encode()))


def test_a_prompt_loses_its_tail_before_its_head() -> None:
    index = index_of(3)
    chain = add_chain(index, "abc")
    touch(index, *chain)
    for number, left in enumerate(["ab", "a", ""]):
        evict(index, number)
        assert held(index, "abc") == left
    assert index.evicted == 3


def test_a_tail_goes_before_its_head_even_when_the_head_was_used_long_ago() -> None:
    index = index_of(3)
    chain = add_chain(index, "abc")
    touch(index, chain[2])
    evict(index, 0)
    assert held(index, "abc") == "ab"


def test_a_head_that_prompts_share_stays_until_its_last_tail_is_gone() -> None:
    index = index_of(4)
    head = add_chain(index, "a")
    one, two, three = (add_chain(index, key, head[0]) for key in "bcd")
    touch(index, *head, *one, *two, *three)
    for number, left in enumerate(["acd", "ad", "a", ""]):
        evict(index, number)
        assert held(index, "abcd") == left


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = index_of(4)
    chunks = {key: add(index, key.encode()) for key in "abcd"}
    for key in "cabd":
        touch(index, chunks[key])
    for number, left in enumerate(["abd", "bd", "d", ""]):
        evict(index, number)
        assert held(index, "abcd") == left


def test_what_is_pinned_is_not_evicted_nor_what_it_follows() -> None:
    index = index_of(3)
    b = add_chain(index, "abc")[1]
    index.pin([b])
    evict(index, 0)
    assert held(index, "abc") == "ab", "the tail behind the pin can go"
    assert index.reserve(b"x", None, CHUNK_BYTES, LAYOUT) is None
    assert held(index, "abcx") == "ab"
    index.pin([b])
    index.unpin([b])
    assert index.reserve(b"x", None, CHUNK_BYTES, LAYOUT) is None, "pins add up"
    index.unpin([b])
    evict(index, 1)
    assert held(index, "abc") == "a"


def test_unpinning_more_often_than_pinning_is_a_fault() -> None:
    index = index_of(1)
    chunk = add(index, b"a")
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        index.unpin([chunk])


def test_a_reserved_chunk_is_not_found_before_it_is_committed() -> None:
    index = index_of(3)
    head = add(index, b"a")
    chunk = index.reserve(b"b", head, CHUNK_BYTES, LAYOUT)
    assert chunk is not None
    tail = add(index, b"c", chunk)
    assert index.get(b"b") is chunk
    assert index.find([b"a", b"b", b"c"]) == [head]
    assert index.find([b"b"]) == []
    index.commit(chunk)
    assert index.find([b"a", b"b", b"c"]) == [head, chunk, tail]
    assert index.pins == 0


def test_a_reserved_chunk_is_not_evicted() -> None:
    index = index_of(1)
    assert index.reserve(b"a", None, CHUNK_BYTES, LAYOUT) is not None
    assert index.reserve(b"b", None, CHUNK_BYTES, LAYOUT) is None
    assert at_once(index.clear()) == 0


def test_a_discarded_chunk_leaves_no_trace_and_its_parent_can_go() -> None:
    index = index_of(2)
    head = add(index, b"a")
    chunk = index.reserve(b"b", head, CHUNK_BYTES, LAYOUT)
    assert chunk is not None
    index.discard(chunk)
    assert (len(index), index.pins, index.evicted) == (1, 0, 0)
    assert index.get(b"b") is None
    assert add(index, b"b", head) is not chunk, "it can be stored again"
    assert at_once(index.clear()) == 2


def test_a_chunk_that_becomes_a_leaf_twice_is_evicted_once() -> None:
    index = index_of(2)
    head = add(index, b"a")
    for _ in range(2):
        chunk = index.reserve(b"b", head, CHUNK_BYTES, LAYOUT)
        assert chunk is not None
        index.discard(chunk)
    assert at_once(index.clear()) == 1
    assert (len(index), index.evicted) == (0, 1)


def test_a_chunk_discarded_while_another_store_holds_it_keeps_the_pins_in_balance() -> None:
    """Two stores of one prompt: the second holds what the first has reserved, and the first
    fails. The second then unpins what it held."""
    index = index_of(2)
    chunk = index.reserve(b"a", None, CHUNK_BYTES, LAYOUT)
    assert chunk is not None
    index.pin([chunk])
    index.discard(chunk)
    assert index.find([b"a"]) == []
    index.unpin([chunk])
    assert index.pins == 0


def test_find_gives_the_longest_run_from_the_first_key() -> None:
    index = index_of(4)
    chain = add_chain(index, "abc")
    assert index.find([b"a", b"b", b"c", b"d"]) == chain
    assert index.find([b"a", b"x", b"c"]) == chain[:1]
    assert index.find([b"x", b"a", b"b"]) == []
    assert index.find([]) == []


def test_nothing_is_evicted_while_the_arena_still_fills() -> None:
    arena = Arena(2 * CHUNK_BYTES)
    arena.extend(CHUNK_BYTES)
    index = Index(arena)
    add(index, b"a")
    assert index.reserve(b"b", None, CHUNK_BYTES, LAYOUT) is None
    assert held(index, "ab") == "a"
    arena.extend(CHUNK_BYTES)
    add(index, b"b")
    evict(index, 0)
    assert held(index, "ab") == "b"


def test_as_many_small_chunks_go_as_a_large_one_needs() -> None:
    index = index_of(4)
    chain = add_chain(index, "abcd")
    touch(index, *chain)
    large = index.reserve(b"L", None, 2 * CHUNK_BYTES, LAYOUT)
    assert large is not None
    assert held(index, "abcd") == "ab"
    assert index.evicted == 2


def test_clear_forgets_all_but_what_is_pinned_or_on_its_way() -> None:
    index = index_of(6)
    chain = add_chain(index, "abc")
    add_chain(index, "d")
    index.pin([chain[1]])
    assert index.reserve(b"e", None, CHUNK_BYTES, LAYOUT) is not None
    assert at_once(index.clear()) == 2
    assert held(index, "abcde") == "abe", "the head of what is pinned stays with it"
    index.unpin([chain[1]])
    assert at_once(index.clear()) == 2


def test_the_eviction_candidates_stay_bounded_under_many_touches() -> None:
    index = index_of(8)
    chains = [add_chain(index, keys) for keys in ("abcd", "efgh")]
    longest = 0
    for number in range(100_000):
        touch(index, *chains[number % 2])
        longest = max(longest, len(index._candidates))
    assert longest <= 2 * len(index) + 1024
    evict(index, 0)
    assert held(index, "abcdefgh") == "abcefgh", "the order survived"


def test_the_eviction_candidates_stay_bounded_when_stores_fail_again_and_again() -> None:
    index = index_of(2)
    head = add(index, b"a")
    for _ in range(10_000):
        index.pin([head])
        chunk = index.reserve(b"b", head, CHUNK_BYTES, LAYOUT)
        assert chunk is not None
        index.discard(chunk)
        index.unpin([head])
    assert len(index._candidates) <= 2 * len(index) + 1024


@dataclass(eq=False)
class Node:
    """What the model knows of a chunk."""

    chunk: Chunk
    parent: Node | None
    whole: bool = False
    pins: int = 1
    used: int = 0


class IndexAgainstModel(RuleBasedStateMachine):
    """A naive reference: a list of nodes, searched from end to end each time."""

    ROOM = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of(self.ROOM)
        self.nodes: list[Node] = []
        self.pinned: list[list[Node]] = []
        self.clock = 0

    def children(self, node: Node) -> list[Node]:
        return [n for n in self.nodes if n.parent is node]

    def evictable(self) -> list[Node]:
        return [n for n in self.nodes if n.whole and not n.pins and not self.children(n)]

    def some(self, data: st.DataObject, nodes: list[Node]) -> Node:
        return nodes[data.draw(st.integers(0, len(nodes) - 1))]

    def unpin_node(self, node: Node) -> None:
        node.pins -= 1
        node.used = self.clock

    @rule(name=st.integers(0, 8), data=st.data())
    def reserve(self, name: int, data: st.DataObject) -> None:
        key = b"%d" % name
        if any(n.chunk.key == key for n in self.nodes):
            return
        wants_parent = data.draw(st.booleans(), "wants a parent")
        parent = self.some(data, self.nodes) if self.nodes and wants_parent else None
        if parent is not None:
            self.index.pin([parent.chunk])
            parent.pins += 1
        candidates = self.evictable()
        is_full = len(self.nodes) == self.ROOM
        behind = parent.chunk if parent is not None else None
        chunk = self.index.reserve(key, behind, CHUNK_BYTES, LAYOUT)
        assert (chunk is None) == (is_full and not candidates)
        gone = [n for n in self.nodes if self.index.get(n.chunk.key) is not n.chunk]
        assert len(gone) == (is_full and chunk is not None)
        for node in gone:
            assert node in candidates
            assert node.used == min(n.used for n in candidates)
            self.nodes.remove(node)
        if chunk is not None:
            self.nodes.append(Node(chunk, parent))
        if parent is not None:
            self.clock += 1
            self.index.unpin([parent.chunk])
            self.unpin_node(parent)

    @precondition(lambda self: any(not n.whole for n in self.nodes))
    @rule(data=st.data(), succeeds=st.booleans())
    def end_store(self, data: st.DataObject, succeeds: bool) -> None:
        node = self.some(data, [n for n in self.nodes if not n.whole])
        if succeeds:
            self.clock += 1
            self.index.commit(node.chunk)
            node.whole = True
            self.unpin_node(node)
        elif node.pins == 1:
            self.index.discard(node.chunk)
            self.nodes.remove(node)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        run = [self.some(data, self.nodes)]
        while (parent := run[0].parent) is not None and parent in self.nodes:
            run.insert(0, parent)
        self.index.pin([n.chunk for n in run])
        for node in run:
            node.pins += 1
        self.pinned.append(run)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        run = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.clock += 1
        self.index.unpin([n.chunk for n in run])
        for node in run:
            self.unpin_node(node)

    @rule(names=st.lists(st.integers(0, 9), max_size=4))
    def find(self, names: list[int]) -> None:
        by_key = {n.chunk.key: n for n in self.nodes if n.whole}
        expected = []
        for key in (b"%d" % name for name in names):
            if key not in by_key:
                break
            expected.append(by_key[key].chunk)
        assert self.index.find([b"%d" % name for name in names]) == expected

    @rule()
    def clear(self) -> None:
        before = len(self.nodes)
        while leaves := self.evictable():
            self.nodes = [n for n in self.nodes if n not in leaves]
        assert at_once(self.index.clear()) == before - len(self.nodes)

    @invariant()
    def agrees(self) -> None:
        assert len(self.index) == len(self.nodes)
        assert self.index.pins == sum(n.pins for n in self.nodes)
        for node in self.nodes:
            assert self.index.get(node.chunk.key) is node.chunk
            assert (node.chunk.pins, node.chunk.whole) == (node.pins, node.whole)
            assert node.chunk.children == len(self.children(node))

    def teardown(self) -> None:
        for run in self.pinned:
            self.index.unpin([n.chunk for n in run])
        for node in self.nodes:
            if not node.whole:
                self.index.commit(node.chunk)
        assert self.index.pins == 0
        assert at_once(self.index.clear()) == len(self.nodes)
        arena_is_whole = self.index.reserve(b"all", None, self.ROOM * CHUNK_BYTES, LAYOUT)
        assert arena_is_whole, "memory of forgotten chunks was not given back"


TestIndex = IndexAgainstModel.TestCase
TestIndex.settings = settings(
    derandomize=True, deadline=None, max_examples=80, stateful_step_count=40
)


def test_the_tail_of_a_discarded_chunk_serves_its_successor_and_goes_like_any_other() -> None:
    """A store ends well whose parent was another store's that failed: its tail has no head then.
    Once the head is stored anew, the tail is found again; neither keeps the other's memory."""
    index = index_of(4)
    head = index.reserve(b"head", None, CHUNK_BYTES, LAYOUT)
    assert head is not None
    index.pin([head])  # the other store holds it as present
    tail = index.reserve(b"tail", head, CHUNK_BYTES, LAYOUT)
    assert tail is not None
    index.discard(head)
    index.commit(tail)
    index.unpin([head])
    assert index.find([b"head", b"tail"]) == []
    again = index.reserve(b"head", None, CHUNK_BYTES, LAYOUT)
    assert again is not None
    index.commit(again)
    assert index.find([b"head", b"tail"]) == [again, tail]
    assert index.pins == 0
    assert at_once(index.clear()) == 2
    assert len(index) == 0
    assert [index.reserve(bytes([n]), None, CHUNK_BYTES, LAYOUT) is not None for n in range(5)] == [
        *[True] * 4,
        False,
    ]
