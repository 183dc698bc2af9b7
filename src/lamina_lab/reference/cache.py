"""All that the reference engine does with Lamina: a template for other engines.

    begin      look a request's prompt up         hit     tokens the server has, once known
    plan       how many to retrieve, and how      retrieve   into the request's blocks
    gates      what a step must wait for          failed  retrieves whose blocks hold no KV
    store      full chunks that were computed     end     the request is over
    reap       give back blocks of ended transfers

A block that a retrieve may write or a store may read is held here as well as by its request, until
the transfer is over: whatever becomes of the request, nobody else gets the block before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Batch, Client, Gate, Offer, Prefixes, Retrieve, Store
from lamina.keys import Namespace
from lamina_lab.reference.blocks import BlockPool
from lamina_lab.reference.request import Request

OK = TransferStatus.OK


class _Retrieving(NamedTuple):
    """A retrieve whose blocks are held."""

    gate: Gate
    number: int
    blocks: list[int]
    tokens: int


class Cache:
    """The engine's cache server, seen from its scheduler. Engine's thread only."""

    def __init__(self, prefixes: Prefixes, namespace: Namespace, pool: BlockPool) -> None:
        self.prefixes = prefixes
        self.client: Client = prefixes.client
        self._namespace = namespace
        self._pool = pool
        self._retrieving: list[_Retrieving] = []
        self._given_up: list[tuple[Retrieve, list[int]]] = []
        self._storing: list[tuple[Store, list[int]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no block is held for a transfer."""
        return not self._retrieving and not self._given_up and not self._storing

    def begin(self, request: Request) -> None:
        """Ask the server for the request's prefix; `hit` has the answer later."""
        if request.prefix is None:
            request.prefix = self.prefixes.begin(
                request.name, self._namespace, request.policy, may_store=request.store
            )
        request.prefix.look_up(request.tokens)

    def hit(self, request: Request) -> int | None:
        """How many leading tokens can be retrieved; None while the answer is on its way."""
        return request.prefix.hit(request.tokens) if request.prefix is not None else 0

    def plan(self, request: Request, start: int, end: int, others: Batch) -> Offer:
        """How to retrieve tokens `[start, end)` of a hit, perhaps none of them. Commits nothing."""
        assert request.prefix is not None
        total = len(request.tokens)
        return self.prefixes.offer(request.prefix, total, start, end - start, others)

    def retrieve(self, request: Request, offer: Offer) -> Gate | None:
        """Retrieve what was planned into the request's blocks; None: recompute."""
        assert request.prefix is not None
        block_tokens = self.prefixes.block_tokens
        first, number = offer.start_tokens // block_tokens, self.prefixes.next_number()
        blocks = request.blocks[first : first + offer.tokens // block_tokens]
        retrieve = self.client.retrieve(
            request.name,
            request.prefix.take_lease(),
            offer.start_tokens,
            [np.array(blocks, np.int32)],
            offer.release.layers_per_slice,
            number=number,
        )
        if retrieve is None:
            return None
        self._pool.hold(blocks)
        gate = Gate(retrieve, offer.release.release_after_slices)
        item = _Retrieving(gate, number, blocks, offer.tokens)
        self._retrieving.append(item)
        self.prefixes.meters.copies.begin(item.number, offer.tokens, self.prefixes.clock())
        return gate

    def not_needed(self, request: Request) -> None:
        """The hit is not used: end its lease."""
        if request.prefix is not None:
            request.prefix.give_back()

    def gates(self, requests: Iterable[Request]) -> list[Gate]:
        """The gates of every unsettled retrieve into a block that one of `requests` reads.

        Not just their own: another request may share blocks that are still being retrieved.
        """
        read = {block for request in requests for block in request.blocks}
        return [item.gate for item in self._retrieving if not read.isdisjoint(item.blocks)]

    def failed(self) -> list[tuple[Retrieve, list[int]]]:
        """Retrieves that have failed, with the blocks that hold no KV now; each only once.

        The engine must see to whoever reads the blocks. They stay held until the server agrees
        that it will not write them any more.
        """
        failed = [item for item in self._retrieving if item.gate.retrieve.outcome]
        for item in failed:
            retrieve = item.gate.retrieve
            self._end(item)
            self._given_up.append((retrieve, item.blocks))
            if not retrieve.is_over:
                self.client.cancel(retrieve)
        return [(item.gate.retrieve, item.blocks) for item in failed]

    def store(self, request: Request) -> None:
        """Store the full chunks of the request that are computed and not stored yet."""
        if request.prefix is None:
            return
        chunks = request.prefix.unstored(request.computed_tokens)
        if not chunks:
            return
        per_chunk = self.prefixes.chunk_tokens // self.prefixes.block_tokens
        blocks = request.blocks[chunks.start * per_chunk : chunks.stop * per_chunk]
        run = request.prefix.sent(request.tokens, chunks)
        ids = [np.array(blocks, np.int32)]
        number, ticket = self.prefixes.next_number(), self.client.write_ticket()
        store = self.client.store(run.parent, run.keys, ids, ticket, number)
        if store is not None:
            self._pool.hold(blocks)
            self._storing.append((store, blocks))

    def end(self, request: Request) -> None:
        """The request has finished, was aborted or preempted: its lease and its retrieves end."""
        if request.prefix is not None:
            request.prefix.end()
        request.gate = None

    def reap(self) -> None:
        """Release the blocks of transfers that are over; of failed retrieves after `failed`
        told."""
        self.client.poll()
        for item in [item for item in self._retrieving if item.gate.retrieve.outcome is OK]:
            self._end(item, item.tokens * self.prefixes.meters.copies.token_bytes)
            self._pool.release(reversed(item.blocks))
        for given_up in [item for item in self._given_up if item[0].is_over]:
            self._given_up.remove(given_up)
            self._pool.release(reversed(given_up[1]))
        for store, blocks in [item for item in self._storing if item[0].is_over]:
            self._storing.remove((store, blocks))
            self._pool.release(reversed(blocks))

    def _end(self, item: _Retrieving, landed_bytes: int = 0) -> None:
        self._retrieving.remove(item)
        self.prefixes.meters.copies.end(item.number, self.prefixes.clock(), landed_bytes)
