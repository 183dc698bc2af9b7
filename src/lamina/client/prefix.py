"""What an engine's scheduler does with the cache for each request: the same for every engine.

    prefixes = Prefixes.of(client, geometry, step_tokens)
    prefix = prefixes.begin(name, namespace, policy)   # a new request
    prefix.look_up(tokens)                             # asks the server and does not wait
    hit = prefix.hit(tokens)                           # tokens it has; None: no answer yet
    offer = prefixes.offer(prefix, ...)                # how many to retrieve, and how
    lease = prefix.take_lease()                        # the retrieve has the lease from now on
    prefix.give_back()                                 # or the hit is not used
    chunks = prefix.unstored(computed_tokens)          # full chunks that the server lacks
    run = prefix.sent(tokens, chunks)                  # parent and keys for `Client.store`

Which blocks a transfer keeps, and what happens to a request whose retrieve fails, is the engine's
affair. Nothing here blocks. All of it is for the engine's scheduling thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lamina.client.client import Client, Lookup
from lamina.client.release import Batch, Meters, Release, ReleasePolicy
from lamina.errors import UsageError
from lamina.geometry import Geometry
from lamina.keys import Extra, KeyChain, Namespace, Tokens

ALONE = Batch()


class Offer(NamedTuple):
    """How a hit would be retrieved: `tokens` of the `hit_tokens` beyond `start_tokens`, perhaps
    none. It commits nothing."""

    start_tokens: int
    hit_tokens: int
    tokens: int
    release: Release


class Run(NamedTuple):
    """Chunks to store, and the key of the chunk before them (empty at the start of a prompt)."""

    parent: bytes
    keys: list[bytes]


class Prefixes:
    """The cache as one engine's scheduler sees it.

    `step_tokens` bounds the tokens of a step, `clock` gives seconds. One number names a transfer
    of the engine everywhere, a retrieve or a store: take it from `next_number`.

    An engine that knows its `Geometry` makes it with `of`. One that learns later what its workers'
    KV is makes it so, and tells it with `set_model` before the first offer.
    """

    def __init__(
        self,
        client: Client,
        chunk_tokens: int,
        block_tokens: int,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.chunk_tokens = chunk_tokens
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens
        self.clock = clock
        self.meters = Meters(1, 1, chunk_tokens, step_tokens)
        """What `auto` reckons with. Tell it of retrieves and of steps."""
        self._numbers = itertools.count(1)

    @classmethod
    def of(
        cls,
        client: Client,
        geometry: Geometry,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> Prefixes:
        """For KV of this `geometry`."""
        prefixes = cls(client, geometry.chunk_tokens, geometry.step_tokens, step_tokens, clock)
        prefixes.set_model(len(geometry.layers), geometry.token_bytes)
        return prefixes

    def set_model(self, layers: int, token_bytes: int) -> None:
        """How many layers there are, and the KV of a token in all of them."""
        self.meters = Meters(layers, token_bytes, self.chunk_tokens, self.step_tokens)

    def next_number(self) -> int:
        """A number for a transfer: unlike that of any other of this engine."""
        return next(self._numbers)

    def begin(
        self,
        name: str,
        namespace: Namespace,
        policy: ReleasePolicy | None,
        extras: Mapping[int, list[Extra]] | None = None,
        may_store: bool = True,
    ) -> Prefix:
        """A request. Without a `policy` it retrieves nothing. `extras` are what its chunks depend
        on besides tokens, by chunk."""
        chain = KeyChain(namespace, self.chunk_tokens)
        return Prefix(self, name, chain, policy, dict(extras or {}), may_store)

    def offer(
        self,
        prefix: Prefix,
        tokens: int,
        start_tokens: int,
        hit_tokens: int,
        others: Batch = ALONE,
    ) -> Offer:
        """Ask the request's policy how to retrieve `hit_tokens` beyond `start_tokens`, the engine's
        own, of `tokens` in all. `others` are the rest of its batch. Raises `UsageError` for a
        request without a policy."""
        if prefix.policy is None:
            raise UsageError("the request has no policy", "Begin it with one, or retrieve nothing")
        left = tokens - start_tokens - hit_tokens
        query = self.meters.query(self.clock(), start_tokens, hit_tokens, left, others)
        release = prefix.policy.decide(query)
        return Offer(start_tokens, hit_tokens, release.tokens_of(query), release)


class Prefix:
    """One request's chunks: what the server has of them, and under which lease."""

    def __init__(
        self,
        prefixes: Prefixes,
        name: str,
        chain: KeyChain,
        policy: ReleasePolicy | None,
        extras: dict[int, list[Extra]],
        may_store: bool,
    ) -> None:
        self.name = name
        self.policy = policy
        self.may_retrieve = policy is not None
        self.may_store = may_store
        self.known_chunks = 0
        """Leading chunks that the server has or was sent, by its latest answer and our stores."""
        self._sent_chunks = 0
        """Where this request's own last store ends."""
        self._prefixes = prefixes
        self._client = prefixes.client
        self._chain = chain
        self._extras = extras
        self.lookup: Lookup | None = None
        """The question whose answer counts; None without one, and once its lease was taken."""
        self._looked_up_s = 0.0
        self._has_asked = False

    def look_up(self, tokens: Tokens) -> None:
        """Ask how much of `tokens` the server has, if the request may retrieve."""
        if self.may_retrieve and (keys := self._chain.extend(tokens, self._extras)):
            self.lookup = self._client.lookup(self.name, keys)
            self._looked_up_s = self._prefixes.clock()
            self._has_asked = True

    def hit(self, tokens: Tokens, wait_s: float = 0.0) -> int | None:
        """Leading tokens that can be retrieved: whole blocks, and never all, as at least one must
        be computed to sample from. None while the answer is on its way, for which it waits up to
        `wait_s`. Looks up again when the connection was lost, or the lease may soon run out.
        """
        if not self.may_retrieve:
            return 0
        self._client.poll()
        if self.lookup is not None and self.lookup.is_lost:
            self.lookup, self.known_chunks = None, self._sent_chunks
        if not self._client.is_usable:
            return 0  # a retrieve would fail
        if self.lookup is None or self._is_stale():
            self.look_up(tokens)
        if self.lookup is None:
            return 0
        result = self.lookup.result
        if result is None and wait_s:
            result = self.lookup.wait(wait_s)
        if result is None:
            return None
        self.known_chunks = max(self._sent_chunks, result.chunks)
        block_tokens = self._prefixes.block_tokens
        most = (len(tokens) - 1) // block_tokens * block_tokens
        return min(result.chunks * self._prefixes.chunk_tokens, most)

    def take_lease(self) -> int:
        """The lease of the hit: whoever takes it retrieves. Once, after `hit` has told of one;
        raises `UsageError` otherwise."""
        if not (lease := self._lease):
            raise UsageError("there is no lease to take", "Take it once, after `hit` told of a hit")
        self.lookup = None
        return lease

    def give_back(self) -> None:
        """The hit is not used: end its lease."""
        if lease := self._lease:
            self._client.end_lease(lease)
        self.lookup = None

    def recompute_from(self, tokens: int) -> None:
        """A retrieve has failed: the request computes from there and retrieves no more."""
        self.may_retrieve = False
        self.known_chunks = tokens // self._prefixes.chunk_tokens

    def unstored(self, computed_tokens: int) -> range:
        """The chunks that are full with so many tokens computed, and that the server lacks."""
        full = computed_tokens // self._prefixes.chunk_tokens
        return range(self.known_chunks, full) if self.may_store else range(0)

    def sent(self, tokens: Tokens, chunks: range) -> Run:
        """These chunks of `tokens`, the next ones, go to the server now."""
        keys = self._chain.extend(tokens, self._extras)
        self.known_chunks = self._sent_chunks = chunks.stop
        parent = keys[chunks.start - 1] if chunks.start else b""
        return Run(parent, keys[chunks.start : chunks.stop])

    def end(self) -> None:
        """The request is over: its lease ends, its retrieves are cancelled. It may begin again."""
        if self._has_asked:  # else the server has nothing of it, and perhaps no name can be sent
            self._client.end_request(self.name)
        self.lookup = None

    @property
    def _lease(self) -> int:
        result = self.lookup.result if self.lookup is not None else None
        return result.lease if result is not None else 0

    def _is_stale(self) -> bool:
        lease_ttl_s = self._client.lease_ttl_s
        return 0 < lease_ttl_s / 2 < self._prefixes.clock() - self._looked_up_s
