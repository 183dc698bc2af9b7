"""The scheduler's side of stores: full chunks that are computed and confirmed."""

from __future__ import annotations

from lamina.client import Prefixes
from lamina.engines.vllm.config import ConnectorSettings
from lamina.engines.vllm.messages import StoreSpec
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import NULL_BLOCK, HeldBlocks, Tracked


class Stores:
    """Stores that are queued or under way. No more blocks are held for them than `most_held`: what
    does not fit goes later, or is dropped when its request is over."""

    def __init__(
        self,
        settings: ConnectorSettings,
        prefixes: Prefixes,
        most_held: int,
        held: HeldBlocks,
        counts: SchedulerCounts,
    ) -> None:
        self._settings = settings
        self._prefixes = prefixes
        self._most_held = most_held
        self._held = held
        self._counts = counts
        self._open: dict[int, list[int]] = {}  # the blocks that each store holds
        self._held_blocks = 0
        self._queued: list[StoreSpec] = []
        self._are_given_up = False

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
        if confirmed <= tracked.admitted_tokens:
            return
        if not self._settings.store_decode:
            confirmed = min(confirmed, request.num_prompt_tokens)
        chunks = tracked.prefix.unstored(min(confirmed, request.num_tokens))
        if not chunks:
            return
        per_chunk = self._prefixes.chunk_tokens // self._prefixes.block_tokens
        room = max(0, self._most_held - self._held_blocks) // per_chunk if is_usable else 0
        if is_over:
            self._counts.dropped_chunks += max(0, len(chunks) - room)
        if room:
            self._queue(tracked, chunks[:room], per_chunk)

    def take_queued(self) -> list[StoreSpec]:
        """The stores of the step that is being built."""
        queued, self._queued = self._queued, []
        return queued

    def give_up_queued(self) -> None:
        """Stores that no step has taken yet are over."""
        for spec in self.take_queued():
            self.end(spec.number)

    def give_up_on_ranks(self) -> None:
        """Have those that are under way given up with the next step, by ranks in other
        processes."""
        self._are_given_up = bool(self._open)

    def take_given_up(self) -> bool:
        """Whether the ranks are to give up their stores before the step that is being built."""
        given_up, self._are_given_up = self._are_given_up, False
        return given_up

    def end(self, number: int) -> None:
        """The worker's side says that a store is over, or given up: no block of it is read."""
        if (blocks := self._open.pop(number, None)) is None:
            return  # given up, and told again
        self._held_blocks -= len(blocks)
        self._held.release(blocks)

    def _queue(self, tracked: Tracked, chunks: range, per_chunk: int) -> None:
        blocks = tracked.blocks_from(chunks.start * per_chunk, chunks.stop * per_chunk)
        if NULL_BLOCK in blocks or len(blocks) != len(chunks) * per_chunk:
            return  # some of it is not there any more
        run = tracked.prefix.sent(tracked.request.all_token_ids, chunks)
        self._held.hold(blocks)
        self._held_blocks += len(blocks)
        number = self._prefixes.next_number()
        self._open[number] = blocks
        self._queued.append(StoreSpec(number, run.parent, run.keys, blocks))
        self._counts.stored_chunks += len(chunks)
