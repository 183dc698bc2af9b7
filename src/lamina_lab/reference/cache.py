"""All that the reference engine does with Lamina: a template for other engines.

    begin   look a request's prompt up            hit       tokens the server holds, once known
    plan    how many of them to retrieve, and how     retrieve      retrieve them into the blocks
    gates   what a step must wait for
    failed  retrieves whose blocks hold no KV         save      store full chunks that were computed
    reap    give back blocks of ended transfers   end       the request is over

A block that a retrieve may write or a store may read is held here as well as by its request, until
the transfer is over: whatever becomes of the request, nobody else gets the block before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Batch, Client, Gate, Meters, Release, Retrieve, Store
from lamina.keys import KeyChain, Namespace
from lamina_lab.reference.blocks import BlockPool
from lamina_lab.reference.request import Request

OK = TransferStatus.OK


class _Retrieving(NamedTuple):
    """A retrieve whose blocks are held."""

    number: int
    gate: Gate
    blocks: list[int]
    tokens: int


class PrefixStore:
    """The engine's cache server, seen from its scheduler. Engine's thread only."""

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pool: BlockPool,
        block_tokens: int,
        meters: Meters,
    ) -> None:
        self.client = client
        self.meters = meters
        self._namespace = namespace
        self._pool = pool
        self._block_tokens = block_tokens
        self._chains: dict[Request, KeyChain] = {}
        self._retrieving: list[_Retrieving] = []
        self._retrieves = 0
        self._given_up: list[tuple[Retrieve, list[int]]] = []
        self._saving: list[tuple[Store, list[int]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no block is held for a transfer."""
        return not self._retrieving and not self._given_up and not self._saving

    def begin(self, request: Request) -> None:
        """Ask the server for the request's prefix; `hit` has the answer later."""
        chunk_tokens = self.client.chunk_tokens
        if chunk_tokens is not None:  # there has been a server
            keys = self._keys(request, chunk_tokens)
            request.lookup = self.client.lookup(request.name, keys)

    def hit(self, request: Request) -> int | None:
        """How many leading tokens can be retrieved; None while the answer is on its way.

        Whole blocks, and never all tokens: at least one is computed, or there is nothing to sample
        from.
        """
        if request.lookup is None:
            return 0
        result = request.lookup.result
        if result is None:
            return None
        assert self.client.chunk_tokens is not None
        request.saved_chunks = max(request.saved_chunks, result.chunks)
        most = (len(request.tokens) - 1) // self._block_tokens * self._block_tokens
        return min(result.chunks * self.client.chunk_tokens, most)

    def plan(self, request: Request, start: int, end: int, others: Batch) -> tuple[int, Release]:
        """How to retrieve tokens `[start, end)` of a hit, and where to end: at `start` to compute
        all.

        Commits nothing.
        """
        assert request.policy is not None
        left = len(request.tokens) - end
        query = self.meters.query(time.monotonic(), start, end - start, left, others)
        release = request.policy.decide(query)
        return start + release.tokens_of(query), release

    def retrieve(self, request: Request, start: int, end: int, release: Release) -> Gate | None:
        """Retrieve tokens `[start, end)` of a hit into the request's blocks; None: recompute."""
        assert request.lookup is not None
        assert request.lookup.result is not None
        blocks = request.blocks[start // self._block_tokens : end // self._block_tokens]
        retrieve = self.client.retrieve(
            request.name,
            request.lookup.result.lease,
            start,
            [np.array(blocks, np.int32)],
            release.layers_per_slice,
        )
        if retrieve is None:
            return None
        self._pool.hold(blocks)
        gate = Gate(retrieve, release.release_after_slices)
        self._retrieves += 1
        self._retrieving.append(_Retrieving(self._retrieves, gate, blocks, end - start))
        self.meters.copies.begin(self._retrieves, end - start, time.monotonic())
        return gate

    def not_needed(self, request: Request) -> None:
        """The hit is not used: end its lease."""
        result = request.lookup.result if request.lookup is not None else None
        if result is not None and result.lease:
            self.client.end_lease(result.lease)
        request.lookup = None

    def gates(self, requests: Iterable[Request]) -> list[Gate]:
        """The gates of every unsettled retrieve into a block that one of `requests` reads.

        Not just their own: another request may share blocks that are still being retrieved.
        """
        read = {block for request in requests for block in request.blocks}
        return [
            retrieve.gate for retrieve in self._retrieving if not read.isdisjoint(retrieve.blocks)
        ]

    def failed(self) -> list[tuple[Retrieve, list[int]]]:
        """Retrieves that have failed, with the blocks that hold no KV now; each only once.

        The engine must see to whoever reads the blocks. They stay held until the server agrees
        that it will not write them any more.
        """
        failed = [item for item in self._retrieving if item.gate.retrieve.outcome]
        for item in failed:
            retrieve = item.gate.retrieve
            self._retrieving.remove(item)
            self.meters.copies.end(item.number, time.monotonic())
            self._given_up.append((retrieve, item.blocks))
            if not retrieve.is_over:
                self.client.cancel(retrieve)
        return [(item.gate.retrieve, item.blocks) for item in failed]

    def save(self, request: Request) -> None:
        """Store the full chunks of the request that are computed and not stored yet."""
        chunk_tokens = self.client.chunk_tokens
        if chunk_tokens is None or not request.save:
            return
        full = request.computed_tokens // chunk_tokens
        if full <= request.saved_chunks:
            return
        keys = self._keys(request, chunk_tokens)
        first, request.saved_chunks = request.saved_chunks, full
        per_chunk = chunk_tokens // self._block_tokens
        blocks = request.blocks[first * per_chunk : full * per_chunk]
        parent = keys[first - 1] if first else b""
        ticket = self.client.write_ticket()
        ids = [np.array(blocks, np.int32)]
        store = self.client.store(parent, keys[first:full], ids, ticket)
        if store is not None:
            self._pool.hold(blocks)
            self._saving.append((store, blocks))

    def _keys(self, request: Request, chunk_tokens: int) -> list[bytes]:
        if request not in self._chains:
            self._chains[request] = KeyChain(self._namespace, chunk_tokens)
        return self._chains[request].extend(request.tokens)

    def end(self, request: Request) -> None:
        """The request has finished, was aborted or preempted: its lease and its retrieves end."""
        self.client.end_request(request.name)
        request.lookup = request.gate = None
        if request.is_over:
            self._chains.pop(request, None)

    def reap(self) -> None:
        """Release the blocks of transfers that are over; of failed retrieves after `failed`
        told."""
        self.client.poll()
        for retrieve in [
            retrieve for retrieve in self._retrieving if retrieve.gate.retrieve.outcome is OK
        ]:
            self._retrieving.remove(retrieve)
            self._pool.release(reversed(retrieve.blocks))
            nbytes = retrieve.tokens * self.meters.copies.token_bytes
            self.meters.copies.end(retrieve.number, time.monotonic(), nbytes)
        for given_up in [item for item in self._given_up if item[0].is_over]:
            self._given_up.remove(given_up)
            self._pool.release(reversed(given_up[1]))
        for store, blocks in [item for item in self._saving if item[0].is_over]:
            self._saving.remove((store, blocks))
            self._pool.release(reversed(blocks))
