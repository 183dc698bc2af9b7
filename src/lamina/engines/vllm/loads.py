"""The scheduler's side of loads, from their begin to the release of their blocks.

A load is *released* when vLLM may run its request, *settled* when all of it has landed. Between
the two, every step with a request that reads its blocks arms its gate: its own request, and others
that found the blocks in vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamina.engines.vllm.messages import LoadSpec
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import HeldBlocks, Offer, Tracked


@dataclass(eq=False)
class Load:
    """A load whose blocks are held."""

    tracked: Tracked
    start_tokens: int
    blocks: list[int]
    readers: dict[str, Tracked]
    released: bool
    failed: bool = False
    over: bool = False
    recomputed: bool = False
    """Its request computes instead."""

    @property
    def is_gate(self) -> bool:
        """Whether steps that read its blocks must wait for its slices."""
        return self.released and not self.failed


class Loads:
    """Loads whose blocks are held, by number; `tracked` are the requests that vLLM knows."""

    def __init__(
        self,
        block_tokens: int,
        chunk_tokens: int,
        held: HeldBlocks,
        counts: SchedulerCounts,
        tracked: Mapping[str, Tracked],
    ) -> None:
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._held = held
        self._counts = counts
        self._tracked = tracked
        self._manager: Any = None
        self._new: list[LoadSpec] = []
        self._number = 0
        self.open: dict[int, Load] = {}

    def bind_manager(self, manager: Any) -> None:
        """vLLM's cache manager, where vLLM hands it over (from 0.32 on)."""
        self._manager = manager

    @property
    def recomputes_elsewhere(self) -> bool:
        """Whether a request whose load failed gets other blocks."""
        return self._manager is not None

    def begin(self, tracked: Tracked, offer: Offer) -> int:
        """Load what was offered into the request's blocks; returns the load's number."""
        first = offer.start_tokens // self._block_tokens
        blocks = tracked.blocks_from(first, first + offer.tokens // self._block_tokens)
        release = offer.release
        self._number += 1
        self.open[self._number] = Load(
            tracked,
            offer.start_tokens,
            blocks,
            {tracked.name: tracked},
            released=not release.release_after_slices,
        )
        self._held.hold(blocks)
        self._new.append(
            LoadSpec(
                self._number,
                tracked.name,
                offer.lease,
                offer.start_tokens,
                blocks,
                release.layers_per_slice,
                release.release_after_slices,
                needs_ticket=False,
            )
        )
        self._counts.loads += 1
        self._counts.loaded_tokens += offer.tokens
        return self._number

    def note_reader(self, tracked: Tracked) -> None:
        """The request was given its blocks: it may read loads that are under way."""
        for load in self.open.values():
            if load.failed or load.readers.get(tracked.name) is tracked:
                continue
            if not set(load.blocks).isdisjoint(tracked.blocks):
                load.readers[tracked.name] = tracked

    def take_new(self, written: set[int]) -> list[LoadSpec]:
        """The loads of the step that is being built; those into blocks that it zeroes (`written`)
        must come after the zeroing."""
        new, self._new = self._new, []
        return [
            spec if written.isdisjoint(spec.blocks) else replace(spec, needs_ticket=True)
            for spec in new
        ]

    def gates(self, scheduled: Container[str]) -> list[int]:
        """The loads that a step of these requests must wait for."""
        return [
            number
            for number, load in self.open.items()
            if load.is_gate and any(name in scheduled for name in load.readers)
        ]

    def bad_blocks(self) -> set[int]:
        """Blocks that hold no KV though vLLM may count on it."""
        return {block for load in self.open.values() if load.failed for block in load.blocks}

    def release(self, names: Container[str]) -> None:
        """vLLM may run these requests from now on."""
        for load in self.open.values():
            if load.tracked.name in names:
                load.released = True

    def is_released(self, tracked: Tracked) -> bool:
        """Whether others may be reading a load of this request."""
        return any(load.tracked is tracked and load.released for load in self.open.values())

    def note_preempted(self, names: Iterable[str]) -> None:
        """A preempted request reads no load any more.

        vLLM 0.26 preempts requests whose step is under way and later delivers its token. If that
        step has read a load that may yet fail, the token is not to be trusted: have it discarded.
        """
        for name in names:
            for load in self.open.values():
                tracked = load.readers.pop(name, None)
                if tracked is not None and hasattr(tracked.request, "async_tokens_to_discard"):
                    request = tracked.request
                    request.async_tokens_to_discard += request.num_output_placeholders
                    request.num_output_placeholders = 0

    def recompute(self, number: int) -> None:
        """A load failed before its request ran, on one rank or on several: the request computes."""
        load = self.open.get(number)
        if load is not None and not load.recomputed:
            self._recompute(load)

    def fail(self, number: int) -> None:
        """A load failed after release: nobody may find its blocks in the prefix cache any more.

        Requests that run end in an error, which vLLM sees to. One that was promoted but has not
        run is overlooked by vLLM: it can still compute instead, where we have the manager.
        """
        load = self.open.get(number)
        if load is None or load.failed:
            return
        load.failed = True
        self._counts.failed += 1
        bad = set(load.blocks)
        self._held.evict(bad)
        for reader in load.readers.values():  # and what they computed on bad blocks
            blocks = reader.blocks
            first = next((i for i, block in enumerate(blocks) if block in bad), None)
            if first is not None:
                self._held.evict(blocks[first:])
        waits = load.tracked.request.status.name in ("WAITING", "PREEMPTED")
        if waits and self._manager is not None and load.tracked.name in self._tracked:
            self._recompute(load)

    def end(self) -> None:
        """Release the blocks of loads that are over; bad ones when all who read them are gone.

        Until then the worker's side reports them in every step: vLLM overlooks a report about a
        request that is neither waiting for its load nor running.
        """
        for number, load in list(self.open.items()):
            is_read = any(self._tracked.get(n) is reader for n, reader in load.readers.items())
            if load.over and not (load.failed and is_read):
                del self.open[number]
                self._held.release(load.blocks)

    def _recompute(self, load: Load) -> None:
        """With vLLM's manager the request gets other blocks. Without, it computes in these, which
        is why the worker's side then waits until the load is over (`worker.ACKNOWLEDGE_S`).
        """
        request = load.tracked.request
        load.recomputed = True
        load.tracked.may_load = False
        load.tracked.saved_chunks = load.start_tokens // self._chunk_tokens
        load.readers.pop(request.request_id, None)  # no step of its needs this load any more
        if request.status.name not in ("WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"):
            return
        self._counts.recomputed += 1
        if self._manager is not None:
            self._manager.free(request)
            request.num_computed_tokens = 0
        else:
            request.num_computed_tokens = load.start_tokens
            # With nothing computed vLLM would look for a prefix again, but the request has its
            # blocks already and cannot adopt others.
            request.skip_reading_prefix_cache |= not load.start_tokens
