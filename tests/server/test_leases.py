"""Leases: whose they are, when they end, and that every pin is undone."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import ErrorCode, RequestRefusedError
from lamina.server.arena import Arena
from lamina.server.index import Chunk, Index
from lamina.server.leases import Lease, LeaseTable
from lamina.shards import Shard
from tests.support.layouts import layout_of

TTL_S = 10.0
CHUNKS = 4


class Table:
    """A lease table over an index of four chunks, on virtual time."""

    def __init__(self) -> None:
        arena = Arena(CHUNKS * mmap.PAGESIZE)
        arena.extend(arena.capacity_bytes)
        self.index = Index(arena)
        self.chunks: list[Chunk] = []
        for number in range(CHUNKS):
            chunk = self.index.reserve(bytes([number]), None, layout_of())
            assert chunk is not None
            assert self.index.claim(chunk, 0)
            self.index.commit(chunk, 0)
            self.chunks.append(chunk)
        self.now_s = 100.0
        self.leases = LeaseTable(self.index, TTL_S, lambda: self.now_s)

    def grant(self, engine: str, owner: str, request: str, chunks: list[Chunk]) -> Lease:
        self.index.pin(chunks)
        return self.leases.grant(engine, owner, request, chunks)

    def pins(self) -> list[int]:
        return [chunk.pins for chunk in self.chunks]


@pytest.fixture
def table() -> Iterator[Table]:
    """A table whose pins are back to zero once all owners are gone."""
    table = Table()
    yield table
    for owner in ("s1", "s2"):
        table.leases.end_owner(owner)
    assert len(table.leases) == 0
    assert table.pins() == [0] * CHUNKS
    assert table.index.pins == 0


def refused(table: Table, engine: str, number: int) -> None:
    with pytest.raises(RequestRefusedError, match=f"there is no lease {number}") as caught:
        table.leases.get(engine, number)
    assert caught.value.code is ErrorCode.UNKNOWN_LEASE
    assert "look the prompt up again, or recompute" in caught.value.remedy


def test_a_lease_pins_its_chunks_until_it_is_ended(table: Table) -> None:
    lease = table.grant("e", "s1", "r", table.chunks[:2])
    assert table.leases.get("e", lease.number) == lease
    assert lease.chunks == tuple(table.chunks[:2])
    assert table.pins() == [1, 1, 0, 0]
    table.leases.end("e", lease.number)
    assert table.pins() == [0, 0, 0, 0]
    refused(table, "e", lease.number)


def test_ending_a_lease_twice_or_an_unknown_one_does_nothing(table: Table) -> None:
    lease = table.grant("e", "s1", "r", table.chunks[:1])
    other = table.grant("e", "s1", "q", table.chunks[:1])
    table.leases.end("e", lease.number)
    table.leases.end("e", lease.number)
    table.leases.end("e", 999)
    table.leases.end_request("e", "unknown")
    table.leases.end_owner("unknown")
    assert table.pins() == [1, 0, 0, 0]
    assert table.leases.get("e", other.number) == other


def test_a_lease_runs_out_when_its_time_is_up_and_not_before(table: Table) -> None:
    first = table.grant("e", "s1", "r", table.chunks[:1])
    table.now_s += 4
    second = table.grant("e", "s1", "q", table.chunks[1:2])
    table.now_s += 5.5
    assert table.leases.expire() == 0
    table.now_s += 0.5
    assert table.leases.expire() == 1
    refused(table, "e", first.number)
    assert table.leases.get("e", second.number) == second
    assert table.pins() == [0, 1, 0, 0]
    table.now_s += 100
    assert table.leases.expire() == 1
    assert table.leases.expire() == 0
    assert table.index.pins == 0


def test_a_requests_new_lease_takes_the_place_of_its_old_one(table: Table) -> None:
    old = table.grant("e", "s1", "r", table.chunks[:3])
    new = table.grant("e", "s1", "r", table.chunks[:1])
    assert table.pins() == [1, 0, 0, 0]
    assert len(table.leases) == 1
    refused(table, "e", old.number)
    assert table.leases.get("e", new.number) == new


def test_a_replaced_lease_does_not_expire_in_the_place_of_the_new_one(table: Table) -> None:
    table.grant("e", "s1", "r", table.chunks[:1])
    table.now_s += 9
    new = table.grant("e", "s1", "r", table.chunks[:1])
    table.now_s += 9
    assert table.leases.expire() == 0
    assert table.leases.get("e", new.number) == new


def test_chunks_stay_pinned_while_a_lease_on_them_is_replaced(table: Table) -> None:
    """Otherwise an eviction between the two could take them."""
    lowest: list[int] = []
    unpin = table.index.unpin

    def observed(chunks: tuple[Chunk, ...]) -> None:
        unpin(chunks)
        lowest.append(min(chunk.pins for chunk in chunks))

    table.grant("e", "s1", "r", table.chunks)
    table.index.unpin = observed  # type: ignore[method-assign,assignment]
    table.grant("e", "s1", "r", table.chunks)
    assert lowest == [1]


def test_requests_of_one_name_in_two_engines_are_two_requests(table: Table) -> None:
    one = table.grant("e", "s1", "r", table.chunks[:1])
    two = table.grant("f", "s2", "r", table.chunks[:1])
    assert table.pins() == [2, 0, 0, 0]
    table.leases.end_request("e", "r")
    refused(table, "e", one.number)
    assert table.leases.get("f", two.number) == two


def test_another_engines_lease_is_as_good_as_none(table: Table) -> None:
    lease = table.grant("e", "s1", "r", table.chunks[:1])
    refused(table, "f", lease.number)
    table.leases.end("f", lease.number)
    table.leases.end_request("f", "r")
    assert table.leases.get("e", lease.number) == lease
    assert table.pins() == [1, 0, 0, 0]


def test_any_process_of_an_engine_may_use_the_engines_leases(table: Table) -> None:
    lease = table.grant("e", "s1", "r", table.chunks[:1])
    again = table.grant("e", "s2", "r", table.chunks[:1])
    refused(table, "e", lease.number)
    table.leases.end_owner("s1")
    assert table.leases.get("e", again.number) == again


def test_the_leases_of_a_dead_owner_end_and_no_others(table: Table) -> None:
    for request in "abc":
        table.grant("e", "s1", request, table.chunks[:2])
    kept = table.grant("e", "s2", "d", table.chunks[1:])
    table.leases.end_owner("s1")
    assert len(table.leases) == 1
    assert table.leases.get("e", kept.number) == kept
    assert table.pins() == [0, 1, 1, 1]


def test_a_lease_number_is_never_used_again(table: Table) -> None:
    numbers = set()
    for _ in range(5):
        lease = table.grant("e", "s1", "r", table.chunks[:1])
        numbers.add(lease.number)
        table.leases.end("e", lease.number)
    assert len(numbers) == 5
    assert 0 not in numbers, "0 means that nothing was found"


steps = st.one_of(
    st.tuples(
        st.just("grant"),
        st.sampled_from(["s1", "s2"]),
        st.sampled_from("ab"),
        st.integers(1, CHUNKS),
    ),
    st.tuples(st.just("end"), st.integers(1, 12)),
    st.tuples(st.just("end_request"), st.sampled_from("ab")),
    st.tuples(st.just("end_owner"), st.sampled_from(["s1", "s2"])),
    st.tuples(st.just("wait"), st.integers(1, 6)),
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25))
def test_pins_are_always_those_of_the_live_leases(actions: list[tuple[str, ...]]) -> None:
    table = Table()
    live: dict[int, tuple[str, str, int, float]] = {}  # number → owner, request, chunks, end

    def forget(which: list[int]) -> None:
        for number in which:
            del live[number]

    for what, *values in actions:
        if what == "grant":
            owner, request, count = values
            lease = table.grant("e", owner, request, table.chunks[: int(count)])
            forget([n for n, known in live.items() if known[1] == request])
            live[lease.number] = (owner, request, int(count), table.now_s + TTL_S)
        elif what == "end":
            table.leases.end("e", int(values[0]))
            live.pop(int(values[0]), None)
        elif what == "end_request":
            table.leases.end_request("e", values[0])
            forget([n for n, known in live.items() if known[1] == values[0]])
        elif what == "end_owner":
            table.leases.end_owner(values[0])
            forget([n for n, known in live.items() if known[0] == values[0]])
        else:
            table.now_s += int(values[0])
            over = [n for n, known in live.items() if known[3] <= table.now_s]
            assert table.leases.expire() == len(over)
            forget(over)
        expected = [sum(known[2] > n for known in live.values()) for n in range(CHUNKS)]
        assert table.pins() == expected
        assert len(table.leases) == len(live)


def test_a_lease_ends_once_each_rank_has_ended_a_retrieve(table: Table) -> None:
    lease = table.grant("e", "s1", "r", table.chunks[:2])
    ranks = [Shard(number, 2, replica, 2) for number in range(2) for replica in range(2)]
    for shard in (*ranks[:3], *ranks[:3]):
        table.leases.end_of_rank("e", lease.number, shard)
        assert table.leases.get("e", lease.number) is lease
    table.leases.end_of_rank("f", lease.number, ranks[3])
    assert table.pins() == [1, 1, 0, 0], "another engine's rank"
    table.leases.end_of_rank("e", lease.number, ranks[3])
    refused(table, "e", lease.number)
    table.leases.end_of_rank("e", lease.number, ranks[3])
    assert table.pins() == [0] * CHUNKS
