"""Who runs in the next step, on which blocks, and what happens to those who cannot."""

from __future__ import annotations

from typing import NamedTuple

from lamina.client import Batch, Retrieve
from lamina.keys import KeyChain, Namespace
from lamina_lab.reference.blocks import BlockPool
from lamina_lab.reference.cache import Cache
from lamina_lab.reference.request import Request, State


class Work(NamedTuple):
    """Compute `tokens` more tokens of a request."""

    request: Request
    tokens: int


class Scheduler:
    """First come, first served; running requests before waiting ones; the latest is preempted."""

    def __init__(
        self,
        pool: BlockPool,
        cache: Cache | None,
        namespace: Namespace,
        block_tokens: int,
        max_step_tokens: int,
    ) -> None:
        self.pool = pool
        self._cache = cache
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._max_step_tokens = max_step_tokens
        self._block_keys: dict[Request, KeyChain] = {}
        self.waiting: list[Request] = []  # WAITING and PREEMPTED, in order of arrival
        self.retrieving: list[Request] = []
        self.running: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """All that are not over."""
        return self.running + self.retrieving + self.waiting

    def add(self, request: Request) -> None:
        """Queue a request and begin to look its prefix up."""
        self._block_keys[request] = KeyChain(self._namespace, self._block_tokens)
        self.waiting.append(request)
        self._look_up(request)

    def schedule(self) -> list[Work]:
        """Pick the work of one step; moves requests between states."""
        budget = self._max_step_tokens
        work: list[Work] = []
        for request in list(self.running):
            tokens = min(budget, len(request.tokens) - request.computed_tokens)
            if tokens and request.state is State.RUNNING and self._grow(request, tokens, work):
                work.append(Work(request, tokens))
                budget -= tokens
        self._promote()
        for request in list(self.waiting):
            if not budget or not self._admit(request):
                continue
            if request.state is State.RUNNING:
                tokens = min(budget, len(request.tokens) - request.computed_tokens)
                work.append(Work(request, tokens))
                budget -= tokens
        return work

    def computed(self, request: Request, tokens: int) -> None:
        """Note that a step has computed `tokens` more; its full blocks can be shared now."""
        request.computed_tokens += tokens
        self._cache_blocks(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it begins again from what is cached."""
        self._give_back(request, State.PREEMPTED)
        self.waiting.insert(0, request)
        self._look_up(request)

    def finish(self, request: Request, state: State) -> None:
        """End a request as FINISHED or ABORTED, in whatever state it is."""
        self._give_back(request, state)
        del self._block_keys[request]

    def recompute(self, retrieve: Retrieve, bad_blocks: list[int]) -> list[Request]:
        """A retrieve failed: nobody may read its blocks; return who has to begin again.

        They get other blocks, since the server may still write these until it agrees.
        """
        self.pool.evict(bad_blocks)
        affected = [r for r in self.requests if not set(bad_blocks).isdisjoint(r.blocks)]
        for request in affected:
            owns = request.gate is not None and request.gate.retrieve is retrieve
            request.failures += owns
            if owns and request.prefix is not None:
                request.prefix.may_retrieve = False
            self._give_back(request, State.WAITING)
            self.waiting.insert(0, request)
        return affected

    def _look_up(self, request: Request) -> None:
        if self._cache is not None:
            self._cache.begin(request)

    def _promote(self) -> None:
        """Release retrieving requests whose gates have opened.

        A retrieve that failed just now opens its gate too: the step then settles it as failed.
        """
        for request in list(self.retrieving):
            assert request.gate is not None
            if not request.gate.is_released:
                continue
            self.retrieving.remove(request)
            self._run(request)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its blocks and a state; False when it must wait longer."""
        hit = self._cache.hit(request) if self._cache is not None else 0
        if hit is None:
            return False
        keys = self._block_keys[request].extend(request.tokens)
        shared = self.pool.find(keys[: (len(request.tokens) - 1) // self._block_tokens])
        self.pool.hold(shared)
        fresh = self.pool.allocate(self._blocks_for(len(request.tokens)) - len(shared))
        if fresh is None:
            self.pool.release(reversed(shared))
            return False
        request.blocks = shared + fresh
        request.computed_tokens = len(shared) * self._block_tokens
        request.hit_tokens = 0
        self.waiting.remove(request)
        if hit > request.computed_tokens and self._retrieve(request, hit):
            request.state = State.RETRIEVING
            self.retrieving.append(request)
            return True
        if request.gate is None and self._cache is not None:
            self._cache.not_needed(request)
        self._run(request)
        return True

    def _retrieve(self, request: Request, hit: int) -> bool:
        """Retrieve the request's hit as its policy says; whether it must wait for its release."""
        assert self._cache is not None
        start = request.computed_tokens
        offer = self._cache.plan(request, start, hit, self._others())
        if not offer.tokens:
            self._cache.prefixes.meters.copies.skipped()
            return False
        request.gate = self._cache.retrieve(request, offer)
        if request.gate is None:
            return False
        request.hit_tokens = offer.tokens
        request.computed_tokens = start + offer.tokens
        return offer.release.release_after_slices > 0

    def _others(self) -> Batch:
        """Who is delayed when this step waits; the request that is asked about is in no list."""
        return Batch.of(
            (len(r.tokens) - r.computed_tokens for r in self.running),
            (len(r.tokens) - r.computed_tokens for r in self.retrieving),
            len(self.waiting),
            self._max_step_tokens,
        )

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        self.running.append(request)
        self._cache_blocks(request)

    def _cache_blocks(self, request: Request) -> None:
        full = request.computed_tokens // self._block_tokens
        keys = self._block_keys[request].extend(request.tokens)[:full]
        self.pool.cache(keys, request.blocks[:full])

    def _grow(self, request: Request, tokens: int, work: list[Work]) -> bool:
        """Make room for a running request's next tokens, preempting the latest if need be."""
        needed = self._blocks_for(request.computed_tokens + tokens) - len(request.blocks)
        while needed > 0:
            fresh = self.pool.allocate(needed)
            if fresh is not None:
                request.blocks += fresh
                break
            victim = self.running[-1]
            work[:] = [item for item in work if item.request is not victim]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _give_back(self, request: Request, state: State) -> None:
        for queue in (self.waiting, self.retrieving, self.running):
            if request in queue:
                queue.remove(request)
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.computed_tokens = 0
        request.state = state
        if self._cache is not None:
            self._cache.end(request)
