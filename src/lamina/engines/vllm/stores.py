"""The scheduler's side of stores: full chunks that are computed and confirmed."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.engines.vllm.config import ConnectorSettings
from lamina.engines.vllm.messages import StoreSpec
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import NULL_BLOCK, HeldBlocks, Tracked


@dataclass(eq=False)
class _Store:
    """A store whose blocks are held."""

    tracked: Tracked
    blocks: list[int]


class Stores:
    """Stores that are queued or under way. No more blocks are held for them than `most_held`: what
    does not fit goes later, or is dropped when its request is over."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_tokens: int,
        most_held: int,
        held: HeldBlocks,
        counts: SchedulerCounts,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._most_held = most_held
        self._held = held
        self._counts = counts
        self._open: dict[int, _Store] = {}
        self._held_blocks = 0
        self._queued: list[StoreSpec] = []
        self._number = 0

    @property
    def is_idle(self) -> bool:
        return not self._open

    def store_confirmed(self, tracked: Tracked, is_over: bool, is_usable: bool) -> None:
        """Queue a store of the full chunks that are confirmed and not yet stored.

        `is_over`: this is the request's last chance. Without a server that `is_usable` nothing is
        stored.
        """
        request = tracked.request
        confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        if confirmed <= tracked.admitted_tokens or not tracked.may_store:
            return
        if not self._settings.store_decode:
            confirmed = min(confirmed, request.num_prompt_tokens)
        chunk_tokens = self._settings.chunk_tokens
        first, full = tracked.saved_chunks, min(confirmed, request.num_tokens) // chunk_tokens
        if full <= first:
            return
        per_chunk = chunk_tokens // self._block_tokens
        room = max(0, self._most_held - self._held_blocks) // per_chunk
        end = min(full, first + room) if is_usable else first
        if is_over:
            self._counts.dropped_chunks += full - end
        if end > first:
            self._queue(tracked, first, end, per_chunk)

    def take_queued(self) -> list[StoreSpec]:
        """The stores of the step that is being built."""
        queued, self._queued = self._queued, []
        return queued

    def give_up_queued(self) -> None:
        """Stores that no step has taken yet are over."""
        for spec in self.take_queued():
            self.end(spec.number)

    def end(self, number: int) -> None:
        """The worker's side says that a store is over, or given up: no block of it is read."""
        store = self._open.pop(number, None)
        if store is None:
            return  # given up, and told again
        self._held_blocks -= len(store.blocks)
        self._held.release(store.blocks)

    def _queue(self, tracked: Tracked, first: int, end: int, per_chunk: int) -> None:
        blocks = tracked.blocks_from(first * per_chunk, end * per_chunk)
        if NULL_BLOCK in blocks or len(blocks) != (end - first) * per_chunk:
            return  # some of it is not there any more
        keys = tracked.chain.extend(tracked.request.all_token_ids, tracked.extras)
        self._held.hold(blocks)
        self._held_blocks += len(blocks)
        self._number += 1
        self._open[self._number] = _Store(tracked, blocks)
        parent = keys[first - 1] if first else b""
        self._queued.append(StoreSpec(self._number, parent, keys[first:end], blocks))
        self._counts.stored_chunks += end - first
        tracked.saved_chunks = tracked.stored_chunks = end
