"""What an engine's scheduler does with the cache for a request: hits, leases, what is unstored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lamina.client import (
    Batch,
    FixedPolicy,
    Geometry,
    Group,
    Layer,
    LookupResult,
    Namespace,
    Prefix,
    Prefixes,
    Release,
    ReleaseQuery,
    UsageError,
    chunk_keys,
)

CHUNK, BLOCK = 16, 4
NAMESPACE = Namespace(model="m", weights="w", dtype="d", geometry=b"g")
TOKENS = list(range(100))  # six full chunks
KEYS = chunk_keys(NAMESPACE, CHUNK, TOKENS)


@dataclass
class Lookup:
    """A question; the test answers it."""

    result: LookupResult | None
    is_lost: bool = False
    answered_late: LookupResult | None = None

    def wait(self, timeout_s: float) -> LookupResult | None:
        self.result = self.answered_late
        return self.result


@dataclass
class Client:
    """The part of a client that prefixes use. Every lookup finds `chunks` under a new lease."""

    chunks: int | None = 3
    is_usable: bool = True
    lease_ttl_s: float = 60.0
    asked: list[tuple[str, int]] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def poll(self) -> None:
        pass

    def lookup(self, request: str, keys: Sequence[bytes]) -> Lookup:
        self.asked.append((request, len(keys)))
        lease = len(self.asked)
        found = None if self.chunks is None else LookupResult(self.chunks, lease)
        self.lookups.append(Lookup(found))
        return self.lookups[-1]

    def end_lease(self, lease: int) -> None:
        self.given_back.append(lease)

    def end_request(self, request: str) -> None:
        self.ended.append(request)


class Noting:
    """`FixedPolicy` that keeps what it was asked."""

    def __init__(self, *release: int) -> None:
        self._policy = FixedPolicy(*release)
        self.queries: list[ReleaseQuery] = []

    def decide(self, query: ReleaseQuery) -> Release:
        self.queries.append(query)
        return self._policy.decide(query)


@dataclass
class World:
    client: Client
    prefixes: Prefixes
    now_s: float = 0.0

    def begin(self, **options: Any) -> Prefix:
        options = {"policy": FixedPolicy(1), **options}
        return self.prefixes.begin("r", NAMESPACE, **options)


@pytest.fixture
def world() -> World:
    client: Any = Client()
    made: World
    made = World(client, Prefixes(client, CHUNK, BLOCK, 512, clock=lambda: made.now_s))
    return made


@pytest.mark.parametrize(
    ("tokens", "hit"),
    [(100, 48), (49, 48), (48, 44), (20, 16), (17, 16), (16, 12)],
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(
    world: World, tokens: int, hit: int
) -> None:
    world.client.chunks = min(3, tokens // CHUNK)
    assert world.begin().hit(TOKENS[:tokens]) == hit


def test_it_is_not_known_before_the_answer_and_waits_only_if_told_to(world: World) -> None:
    world.client.chunks = None
    prefix = world.begin()
    prefix.look_up(TOKENS)
    assert prefix.hit(TOKENS) is None
    assert prefix.hit(TOKENS, wait_s=1e-3) is None
    world.client.lookups[0].answered_late = LookupResult(2, 7)
    assert prefix.hit(TOKENS) is None
    assert prefix.hit(TOKENS, wait_s=1e-3) == 32
    assert len(world.client.asked) == 1


def test_without_a_policy_nothing_is_asked_or_ended(world: World) -> None:
    prefix = world.begin(policy=None)
    prefix.look_up(TOKENS)
    assert prefix.hit(TOKENS) == 0
    prefix.end()
    assert not world.client.asked
    assert not world.client.ended


def test_without_a_server_there_is_no_hit(world: World) -> None:
    world.client.is_usable = False
    assert world.begin().hit(TOKENS) == 0
    assert not world.client.asked


def test_a_lost_connection_is_asked_again_over_the_next_one(world: World) -> None:
    """And what the lost server had counts no more, but what this request has sent since."""
    prefix = world.begin()
    assert prefix.hit(TOKENS) == 48
    assert prefix.known_chunks == 3
    world.client.lookups[0].is_lost = True
    world.client.chunks = 0
    assert prefix.hit(TOKENS) == 0
    assert prefix.known_chunks == 0
    assert len(world.client.asked) == 2


def test_a_lease_that_may_run_out_before_it_is_used_is_replaced(world: World) -> None:
    prefix = world.begin()
    prefix.hit(TOKENS)
    world.now_s = 30.0
    prefix.hit(TOKENS)
    assert len(world.client.asked) == 1
    world.now_s = 30.1
    prefix.hit(TOKENS)
    assert len(world.client.asked) == 2
    assert prefix.take_lease() == 2


def test_a_lease_is_taken_or_given_back_once(world: World) -> None:
    taken, unused = world.begin(), world.begin()
    taken.hit(TOKENS)
    assert taken.take_lease() == 1
    taken.give_back()
    assert not world.client.given_back
    unused.hit(TOKENS)
    unused.give_back()
    unused.give_back()
    assert world.client.given_back == [2]
    for prefix in (taken, unused, world.begin()):
        with pytest.raises(UsageError, match="no lease to take"):
            prefix.take_lease()


def test_a_miss_has_no_lease_to_give_back(world: World) -> None:
    world.client.chunks = 0
    prefix = world.begin()
    world.client.lookup = lambda *_: Lookup(LookupResult(0, 0))  # type: ignore[method-assign]
    assert prefix.hit(TOKENS) == 0
    prefix.give_back()
    assert not world.client.given_back


def test_what_is_unstored_are_full_chunks_that_the_server_lacks(world: World) -> None:
    prefix = world.begin()
    assert prefix.unstored(31) == range(1)
    prefix.hit(TOKENS)
    assert not prefix.unstored(3 * CHUNK)
    assert prefix.unstored(5 * CHUNK + 1) == range(3, 5)
    run = prefix.sent(TOKENS, range(3, 5))
    assert run == (KEYS[2], KEYS[3:5])
    assert prefix.unstored(6 * CHUNK) == range(5, 6)
    assert not world.begin(may_store=False).unstored(100)


def test_the_first_chunk_has_no_parent(world: World) -> None:
    assert world.begin().sent(TOKENS, range(2)) == (b"", KEYS[:2])


def test_what_was_sent_is_known_whatever_the_next_lookup_finds(world: World) -> None:
    """A store may still be on its way: its chunks are not sent again."""
    prefix = world.begin()
    prefix.sent(TOKENS, range(4))
    world.client.chunks = 1
    assert prefix.hit(TOKENS) == CHUNK
    assert prefix.known_chunks == 4


def test_after_a_failed_retrieve_it_computes_and_stores_what_it_computes(world: World) -> None:
    prefix = world.begin()
    prefix.hit(TOKENS)
    prefix.take_lease()
    prefix.recompute_from(CHUNK)
    assert prefix.hit(TOKENS) == 0
    assert prefix.unstored(3 * CHUNK) == range(1, 3)
    prefix.end()
    assert world.client.ended == ["r"]


def test_extras_change_keys(world: World) -> None:
    from lamina.client import Extra

    extras = {1: [Extra("mm", "image", 3)]}
    run = world.begin(extras=extras).sent(TOKENS, range(2))
    assert run.keys[0] == KEYS[0]
    assert run.keys[1] != KEYS[1]


def test_an_offer_asks_the_policy_and_commits_nothing(world: World) -> None:
    world.prefixes.set_model(8, 1000)
    policy = Noting(2, 0)
    prefix = world.begin(policy=policy)
    prefix.hit(TOKENS)
    offer = world.prefixes.offer(prefix, len(TOKENS), 8, 40, Batch(decoding=2))
    (query,) = policy.queries
    assert (query.layers, query.retrieve_tokens, query.compute_tokens) == (8, 40, 52)
    assert query.batch.decoding == 2
    assert (offer.start_tokens, offer.hit_tokens, offer.tokens) == (8, 40, 40)
    assert offer.release[:2] == (2, 0)
    assert prefix.take_lease() == 1


def test_who_knows_its_geometry_says_it_once(world: World) -> None:
    """Blocks of two groups: transfers lie on whole blocks of both. A page of three bytes, so that
    the bytes of a token are rounded up."""
    geometry = Geometry(
        CHUNK, (Group(BLOCK), Group(8)), (Layer("a", 0, 2, 100), Layer("b", 1, 1, 3))
    )
    prefixes = Prefixes.of(world.prefixes.client, geometry, 512, clock=lambda: world.now_s)
    assert (prefixes.chunk_tokens, prefixes.block_tokens, prefixes.step_tokens) == (CHUNK, 8, 512)
    assert prefixes.meters.copies.token_bytes == -(-(2 * 4 * 100 + 2 * 3) // CHUNK) == 51
    policy = Noting(5)
    prefix = prefixes.begin("r", NAMESPACE, policy)
    assert prefix.hit(TOKENS[:16]) == 8
    offer = prefixes.offer(prefix, 16, 0, 8)
    (query,) = policy.queries
    assert (query.layers, query.batch, offer.release.layers_per_slice) == (2, Batch(), 2)


def test_who_has_no_policy_is_offered_nothing(world: World) -> None:
    with pytest.raises(UsageError, match="has no policy"):
        world.prefixes.offer(world.begin(policy=None), 100, 0, 48)


def test_numbers_of_transfers_are_unlike_each_other(world: World) -> None:
    numbers = [world.prefixes.next_number() for _ in range(100)]
    assert len(set(numbers)) == 100


def test_a_batch_of_what_is_left() -> None:
    batch = Batch.of([1, 300, 1, 900, 0], [40, 50], 3, 512)
    assert batch == Batch(3, 2, 512, 2, 90, 3)
    assert batch.running == 5
