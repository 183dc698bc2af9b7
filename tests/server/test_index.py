"""The index: what can be found, what is evicted first, and that counts come back to zero."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.server.arena import Arena
from lamina.server.index import Chunk, Index
from lamina.server.turns import CHUNKS_PER_TURN, Turns, at_once
from lamina.shards import ChunkLayout
from tests.support.layouts import layout_of

LAYOUT = layout_of()
CHUNK_BYTES = mmap.PAGESIZE


def index_of(chunks: int) -> Index:
    """An index with room for this many chunks."""
    arena = Arena(chunks * CHUNK_BYTES)
    arena.extend(arena.capacity_bytes)
    return Index(arena)


def reserve(
    index: Index, key: bytes, parent: Chunk | None, layout: ChunkLayout = LAYOUT
) -> Chunk | None:
    """Reserve a chunk and claim its first column."""
    chunk = index.reserve(key, parent, layout)
    assert chunk is None or index.claim(chunk, 0)
    return chunk


def add(index: Index, key: bytes, parent: Chunk | None = None) -> Chunk:
    """Store a chunk; its parent is pinned meanwhile, as a store does."""
    held = [parent] if parent is not None else []
    index.pin(held)
    chunk = reserve(index, key, parent)
    assert chunk is not None
    index.commit(chunk, 0)
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
    chunk = reserve(index, b"filler%d" % filler, None)
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
    assert reserve(index, b"x", None) is None
    assert held(index, "abcx") == "ab"
    index.pin([b])
    index.unpin([b])
    assert reserve(index, b"x", None) is None, "pins add up"
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
    chunk = reserve(index, b"b", head)
    assert chunk is not None
    tail = add(index, b"c", chunk)
    assert index.get(b"b") is chunk
    assert index.find([b"a", b"b", b"c"]) == [head]
    assert index.find([b"b"]) == []
    index.commit(chunk, 0)
    assert index.find([b"a", b"b", b"c"]) == [head, chunk, tail]
    assert index.pins == 0


def test_a_reserved_chunk_is_not_evicted() -> None:
    index = index_of(1)
    assert reserve(index, b"a", None) is not None
    assert reserve(index, b"b", None) is None
    assert at_once(index.clear()) == 0


def test_a_discarded_chunk_leaves_no_trace_and_its_parent_can_go() -> None:
    index = index_of(2)
    head = add(index, b"a")
    chunk = reserve(index, b"b", head)
    assert chunk is not None
    index.discard(chunk, 0)
    assert (len(index), index.pins, index.evicted) == (1, 0, 0)
    assert index.get(b"b") is None
    assert add(index, b"b", head) is not chunk, "it can be stored again"
    assert at_once(index.clear()) == 2


def test_a_chunk_that_becomes_a_leaf_twice_is_evicted_once() -> None:
    index = index_of(2)
    head = add(index, b"a")
    for _ in range(2):
        chunk = reserve(index, b"b", head)
        assert chunk is not None
        index.discard(chunk, 0)
    assert at_once(index.clear()) == 1
    assert (len(index), index.evicted) == (0, 1)


def test_a_chunk_discarded_while_another_store_holds_it_keeps_the_pins_in_balance() -> None:
    """Two stores of one prompt: the second holds what the first has reserved, and the first
    fails. The second then unpins what it held."""
    index = index_of(2)
    chunk = reserve(index, b"a", None)
    assert chunk is not None
    index.pin([chunk])
    index.discard(chunk, 0)
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
    assert reserve(index, b"b", None) is None
    assert held(index, "ab") == "a"
    arena.extend(CHUNK_BYTES)
    add(index, b"b")
    evict(index, 0)
    assert held(index, "ab") == "b"


def test_as_many_small_chunks_go_as_a_large_one_needs() -> None:
    index = index_of(4)
    chain = add_chain(index, "abcd")
    touch(index, *chain)
    large = reserve(index, b"L", None, layout_of(2))
    assert large is not None
    assert held(index, "abcd") == "ab"
    assert index.evicted == 2


def test_clear_forgets_all_but_what_is_pinned_or_on_its_way() -> None:
    index = index_of(6)
    chain = add_chain(index, "abc")
    add_chain(index, "d")
    index.pin([chain[1]])
    assert reserve(index, b"e", None) is not None
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
        chunk = reserve(index, b"b", head)
        assert chunk is not None
        index.discard(chunk, 0)
        index.unpin([head])
    assert len(index._candidates) <= 2 * len(index) + 1024


@dataclass(eq=False)
class Node:
    """What the model knows of a chunk."""

    chunk: Chunk
    parent: Node | None
    missing: set[int]
    claimed: set[int] = field(default_factory=set)
    pins: int = 1
    used: int = 0


class IndexAgainstModel(RuleBasedStateMachine):
    """A naive reference: a list of nodes, searched from end to end each time."""

    ROOM = 6
    LAYOUTS = (layout_of(1), layout_of(*[1] * 2), layout_of(*[1] * 3))

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of(self.ROOM)
        self.nodes: list[Node] = []
        self.pinned: list[list[Node]] = []
        self.claims: list[tuple[Node, int]] = []
        self.clock = 0

    def children(self, node: Node) -> list[Node]:
        return [n for n in self.nodes if n.parent is node]

    def columns(self, node: Node) -> int:
        return len(node.chunk.layout.offsets_bytes)

    def is_empty(self, node: Node) -> bool:
        return len(node.missing) == self.columns(node)

    def unneeded(self) -> list[Node]:
        return [n for n in self.nodes if not n.pins and not self.children(n)]

    def free(self) -> int:
        return self.ROOM - sum(map(self.columns, self.nodes))

    def forget_empty(self) -> None:
        while empty := [n for n in self.unneeded() if self.is_empty(n)]:
            self.nodes = [n for n in self.nodes if n not in empty]

    def some(self, data: st.DataObject, nodes: list[Node]) -> Node:
        return nodes[data.draw(st.integers(0, len(nodes) - 1))]

    def unpin_node(self, node: Node) -> None:
        node.pins -= 1
        node.used = self.clock

    @rule(name=st.integers(0, 8), layout=st.sampled_from(LAYOUTS), data=st.data())
    def reserve(self, name: int, layout: ChunkLayout, data: st.DataObject) -> None:
        key = b"%d" % name
        if any(n.chunk.key == key for n in self.nodes):
            return
        wants_parent = data.draw(st.booleans(), "wants a parent")
        parent = self.some(data, self.nodes) if self.nodes and wants_parent else None
        if parent is not None:
            self.index.pin([parent.chunk])
            parent.pins += 1
        behind = parent.chunk if parent is not None else None
        before = self.index.evicted
        chunk = self.index.reserve(key, behind, layout)
        for _ in range(self.index.evicted - before):
            candidates = self.unneeded()
            oldest = min(n.used for n in candidates)
            gone = [n for n in candidates if self.index.get(n.chunk.key) is not n.chunk]
            self.nodes.remove(next(n for n in gone if n.used == oldest))
            self.forget_empty()
        if chunk is None:
            assert not self.unneeded(), "something could have gone"
        else:
            self.nodes.append(Node(chunk, parent, set(range(len(layout.offsets_bytes)))))
            self.pinned.append([self.nodes[-1]])
        if parent is not None:
            self.clock += 1
            self.index.unpin([parent.chunk])
            self.unpin_node(parent)
            self.forget_empty()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        node = self.some(data, self.nodes)
        column = data.draw(st.integers(0, self.columns(node) - 1))
        self.index.pin([node.chunk])
        node.pins += 1
        is_free = column in node.missing - node.claimed
        assert self.index.claim(node.chunk, column) == is_free
        if is_free:
            node.claimed.add(column)
            self.claims.append((node, column))
        else:
            self.pinned.append([node])

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_store(self, data: st.DataObject, succeeds: bool) -> None:
        node, column = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        self.clock += 1
        node.claimed.remove(column)
        if succeeds:
            node.missing.remove(column)
        (self.index.commit if succeeds else self.index.discard)(node.chunk, column)
        self.unpin_node(node)
        self.forget_empty()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        run = [self.some(data, self.nodes)]
        while (parent := run[0].parent) is not None:
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
        self.forget_empty()

    @rule(names=st.lists(st.integers(0, 9), max_size=4))
    def find(self, names: list[int]) -> None:
        by_key = {n.chunk.key: n for n in self.nodes if not n.missing}
        expected = []
        for key in (b"%d" % name for name in names):
            if key not in by_key:
                break
            expected.append(by_key[key].chunk)
        assert self.index.find([b"%d" % name for name in names]) == expected

    @rule()
    def clear(self) -> None:
        cleared = 0
        while leaves := self.unneeded():
            cleared += len(leaves)
            self.nodes = [n for n in self.nodes if n not in leaves]
            self.forget_empty()
        assert at_once(self.index.clear()) == cleared

    @invariant()
    def agrees(self) -> None:
        assert len(self.index) == len(self.nodes)
        assert self.index.pins == sum(n.pins for n in self.nodes)
        assert self.index._arena.free_bytes == self.free() * CHUNK_BYTES
        for node in self.nodes:
            chunk = node.chunk
            assert self.index.get(chunk.key) is chunk
            assert chunk.pins == node.pins
            assert chunk.missing == sum(1 << column for column in node.missing)
            assert chunk.claimed == sum(1 << column for column in node.claimed)
            assert chunk.children == len(self.children(node))

    def teardown(self) -> None:
        for run in self.pinned:
            self.index.unpin([n.chunk for n in run])
        for node, column in self.claims:
            self.index.commit(node.chunk, column)
        assert self.index.pins == 0
        at_once(self.index.clear())
        assert len(self.index) == 0
        arena = self.index._arena
        assert arena.free_bytes == arena.capacity_bytes, "memory was not given back"


TestIndex = IndexAgainstModel.TestCase
TestIndex.settings = settings(
    derandomize=True, deadline=None, max_examples=80, stateful_step_count=40
)


def test_a_tail_keeps_the_place_of_its_discarded_head_which_is_stored_again_there() -> None:
    """A store ends well whose parent was another store's that failed: its tail has no head then.
    Once the head is stored anew, the tail is found again; neither keeps the other's memory."""
    index = index_of(4)
    head = reserve(index, b"head", None)
    assert head is not None
    index.pin([head])  # the other store holds it as present
    tail = reserve(index, b"tail", head)
    assert tail is not None
    index.discard(head, 0)
    index.commit(tail, 0)
    index.unpin([head])
    assert index.find([b"head", b"tail"]) == []
    assert index.get(b"head") is head
    index.pin([head])
    assert index.claim(head, 0)
    index.commit(head, 0)
    assert index.find([b"head", b"tail"]) == [head, tail]
    assert index.pins == 0
    assert at_once(index.clear()) == 2
    assert len(index) == 0
    rooms = [reserve(index, bytes([number]), None) is not None for number in range(5)]
    assert rooms == [*[True] * 4, False]


def test_the_place_of_a_discarded_head_goes_with_its_tail() -> None:
    index = index_of(2)
    head = reserve(index, b"head", None)
    assert head is not None
    tail = add(index, b"tail", head)
    index.discard(head, 0)
    assert index.get(b"tail") is tail
    large = reserve(index, b"L", None, layout_of(2))
    assert large is not None, "one of which nothing is in was kept"
    assert held(index, "L") == "L"
    assert (len(index), index.evicted) == (1, 1)


TWO = layout_of(1, 1)


def test_a_chunk_is_found_once_all_of_its_columns_are_in() -> None:
    index = index_of(2)
    chunk = index.reserve(b"a", None, TWO)
    assert chunk is not None
    index.pin([chunk])
    assert index.claim(chunk, 0)
    assert not index.claim(chunk, 0), "two stores of one column"
    assert index.claim(chunk, 1)
    index.commit(chunk, 1)
    assert index.find([b"a"]) == []
    index.commit(chunk, 0)
    assert index.find([b"a"]) == [chunk]
    assert index.pins == 0
    index.pin([chunk])
    assert not index.claim(chunk, 1), "what is in would be written again"
    index.unpin([chunk])


def test_a_chunk_of_which_a_column_is_in_waits_for_the_rest_and_goes_in_its_turn() -> None:
    index = index_of(4)
    first = reserve(index, b"a", None, TWO)
    assert first is not None
    index.commit(first, 0)
    add(index, b"b")
    index.pin([first])
    assert index.claim(first, 1)
    index.discard(first, 1)
    assert held(index, "ab") == "ab"
    large = index.reserve(b"L", None, TWO)
    assert large is not None
    assert held(index, "ab") == "a", "it was used after the other"
    assert index.reserve(b"M", None, TWO) is not None
    assert (held(index, "ab"), index.evicted) == ("", 2)


def test_a_chunk_that_nobody_claims_goes_with_its_last_pin() -> None:
    index = index_of(2)
    chunk = index.reserve(b"a", None, TWO)
    assert chunk is not None
    index.pin([chunk])
    index.unpin([chunk])
    assert len(index) == 1
    index.unpin([chunk])
    assert (len(index), index.pins, index.evicted) == (0, 0, 0)
    assert index.reserve(b"b", None, TWO) is not None


class Later:
    """What the index leaves for later turns."""

    def __init__(self) -> None:
        self.works: list[Turns[None]] = []

    def add(self, work: Turns[None]) -> None:
        if next(work, self) is not self:
            self.works.append(work)

    def finish(self) -> None:
        while self.works:
            at_once(self.works.pop())


def empties(length: int) -> tuple[Index, Later, list[Chunk]]:
    """A run of chunks of which nothing is in, kept by the last, which is pinned once."""
    later, arena = Later(), Arena(length * CHUNK_BYTES)
    arena.extend(arena.capacity_bytes)
    index = Index(arena, later.add)
    run: list[Chunk] = []
    for number in range(length):
        chunk = index.reserve(number.to_bytes(4, "little"), run[-1] if run else None, LAYOUT)
        assert chunk is not None
        run.append(chunk)
    for chunk in run[:-1]:
        index.unpin([chunk])
    assert len(index) == length
    return index, later, run


def test_many_empty_chunks_go_in_turns() -> None:
    length = 3 * CHUNKS_PER_TURN
    index, later, run = empties(length)
    index.unpin(run[-1:])
    assert length - len(index) == CHUNKS_PER_TURN
    later.finish()
    assert len(index) == 0
    assert index._arena.free_bytes == index._arena.capacity_bytes


@pytest.mark.parametrize("use", ["pinned", "stored", "pinned and let go", "gone and back"])
def test_an_empty_chunk_that_is_used_between_two_turns_is_freed_once_if_at_all(use: str) -> None:
    index, later, run = empties(2 * CHUNKS_PER_TURN)
    index.unpin(run[-1:])
    next_to_go = run[CHUNKS_PER_TURN - 1]
    assert len(index) == CHUNKS_PER_TURN
    index.pin([next_to_go])
    if use == "stored":
        assert index.claim(next_to_go, 0)
        index.commit(next_to_go, 0)
    elif use != "pinned":
        index.unpin([next_to_go])
    again = index.reserve(next_to_go.key, None, LAYOUT) if use == "gone and back" else None
    later.finish()
    kept = {"pinned": CHUNKS_PER_TURN, "stored": CHUNKS_PER_TURN, "gone and back": 1}.get(use, 0)
    assert len(index) == kept
    assert index._arena.capacity_bytes - index._arena.free_bytes == kept * CHUNK_BYTES
    if again is not None:
        assert index.get(again.key) is again
