"""The scheduler's side of retrieves, from their begin to the release of their blocks.

A retrieve is *released* when vLLM may run its request, *settled* when all of it has landed. Between
the two, every step with a request that reads its blocks arms its gate: its own request, and others
that found the blocks in vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamina.client import Offer, Prefixes
from lamina.engines.vllm.messages import RetrieveSpec, TransferState
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import HeldBlocks, Tracked


@dataclass(eq=False)
class HeldRetrieve:
    """A retrieve whose blocks are held. One that `is_over` stays as long as somebody reads blocks
    that it has left bad."""

    tracked: Tracked
    start_tokens: int
    blocks: list[int]
    readers: dict[str, Tracked]
    state: TransferState
    is_over: bool = False

    @property
    def is_gate(self) -> bool:
        """Whether steps that read its blocks must wait for its slices."""
        return self.state is TransferState.RELEASED

    @property
    def has_failed(self) -> bool:
        """Whether its blocks hold no KV though vLLM may count on it."""
        return self.state is TransferState.FAILED


class Retrieves:
    """Retrieves whose blocks are held, by number; `tracked` are the requests that vLLM knows."""

    def __init__(
        self,
        prefixes: Prefixes,
        held: HeldBlocks,
        counts: SchedulerCounts,
        tracked: Mapping[str, Tracked],
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._prefixes = prefixes
        self._held = held
        self._counts = counts
        self._tracked = tracked
        self._manager: Any = None
        self._new: list[RetrieveSpec] = []
        self._cancelled: list[int] = []
        self.open: dict[int, HeldRetrieve] = {}

    def bind_manager(self, manager: Any) -> None:
        """vLLM's cache manager, where vLLM hands it over (from 0.32 on)."""
        self._manager = manager

    @property
    def recomputes_elsewhere(self) -> bool:
        """Whether a request whose retrieve failed gets other blocks."""
        return self._manager is not None

    def begin(self, tracked: Tracked, offer: Offer) -> int:
        """Retrieve what was offered into the request's blocks; returns the retrieve's number."""
        block_tokens = self._prefixes.block_tokens
        first = offer.start_tokens // block_tokens
        blocks = tracked.blocks_from(first, first + offer.tokens // block_tokens)
        lease = tracked.prefix.take_lease()  # raises before anything is held
        release, number = offer.release, self._prefixes.next_number()
        is_waited_for = release.release_after_slices > 0
        self.open[number] = HeldRetrieve(
            tracked,
            offer.start_tokens,
            blocks,
            {tracked.name: tracked},
            TransferState.WAITING if is_waited_for else TransferState.RELEASED,
        )
        self._held.hold(blocks)
        self._new.append(
            RetrieveSpec(
                number,
                tracked.name,
                lease,
                offer.start_tokens,
                blocks,
                release.layers_per_slice,
                release.release_after_slices,
                needs_ticket=False,
                deadline_s=self._prefixes.clock() + self._timeout_s,
            )
        )
        self._counts.retrieves += 1
        self._counts.retrieved_tokens += offer.tokens
        return number

    def note_reader(self, tracked: Tracked) -> None:
        """The request was given its blocks: it may read retrieves that are under way."""
        for retrieve in self.open.values():
            if retrieve.has_failed or retrieve.readers.get(tracked.name) is tracked:
                continue
            if not set(retrieve.blocks).isdisjoint(tracked.blocks):
                retrieve.readers[tracked.name] = tracked

    def take_new(self, written: set[int]) -> list[RetrieveSpec]:
        """The retrieves of the step that is being built; those into blocks that it zeroes
        (`written`) must come after the zeroing."""
        new, self._new = self._new, []
        return [
            spec if written.isdisjoint(spec.blocks) else replace(spec, needs_ticket=True)
            for spec in new
        ]

    def take_cancelled(self) -> list[int]:
        """Retrieves that failed on one rank and are to be given up by all."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def gates(self, scheduled: Container[str]) -> list[int]:
        """The retrieves that a step of these requests must wait for."""
        return [
            number
            for number, retrieve in self.open.items()
            if retrieve.is_gate and any(name in scheduled for name in retrieve.readers)
        ]

    def bad_blocks(self) -> set[int]:
        """Blocks that hold no KV though vLLM may count on it."""
        return {
            block
            for retrieve in self.open.values()
            if retrieve.has_failed
            for block in retrieve.blocks
        }

    def release(self, names: Container[str]) -> None:
        """vLLM may run these requests from now on."""
        for retrieve in self.open.values():
            if retrieve.tracked.name in names and retrieve.state is TransferState.WAITING:
                retrieve.state = TransferState.RELEASED

    def is_released(self, tracked: Tracked) -> bool:
        """Whether others may be reading a retrieve of this request."""
        return any(
            retrieve.tracked is tracked and (retrieve.is_gate or retrieve.has_failed)
            for retrieve in self.open.values()
        )

    def note_preempted(self, names: Iterable[str]) -> None:
        """A preempted request reads no retrieve any more.

        vLLM 0.26 preempts requests whose step is under way and later delivers its token. If that
        step has read a retrieve that may yet fail, the token is not to be trusted: have it
        discarded."""
        for name in names:
            for retrieve in self.open.values():
                tracked = retrieve.readers.pop(name, None)
                if tracked is not None and hasattr(tracked.request, "async_tokens_to_discard"):
                    request = tracked.request
                    request.async_tokens_to_discard += request.num_output_placeholders
                    request.num_output_placeholders = 0

    def recompute(self, number: int) -> None:
        """A retrieve failed before its request ran, on one rank or on several: the request
        computes."""
        retrieve = self.open.get(number)
        if retrieve is None or retrieve.tracked.name not in retrieve.readers:
            return  # it does already
        if not retrieve.has_failed:
            retrieve.state = TransferState.RECOMPUTED
        self._cancelled.append(number)
        self._recompute(retrieve)

    def fail(self, number: int) -> None:
        """A retrieve failed after release: nobody may find its blocks in the prefix cache any more.

        Requests that run end in an error, which vLLM sees to. One that was promoted but has not
        run is overlooked by vLLM: it can still compute instead, where we have the manager.
        """
        retrieve = self.open.get(number)
        if retrieve is None or retrieve.state >= TransferState.RECOMPUTED:
            return
        retrieve.state = TransferState.FAILED
        self._counts.failed += 1
        bad = set(retrieve.blocks)
        self._held.evict(bad)
        for reader in retrieve.readers.values():  # and what they computed on bad blocks
            blocks = reader.blocks
            first = next((i for i, block in enumerate(blocks) if block in bad), None)
            if first is not None:
                self._held.evict(blocks[first:])
        tracked = retrieve.tracked
        waits = tracked.request.status.name in ("WAITING", "PREEMPTED")
        if waits and self._manager is not None and tracked.name in self._tracked:
            self._recompute(retrieve)

    def end(self) -> None:
        """Release the blocks of retrieves that are over; bad ones when all who read them are gone.

        Until then the worker's side reports them in every step: vLLM overlooks a report about a
        request that is neither waiting for its retrieve nor running.
        """
        for number, retrieve in list(self.open.items()):
            is_read = any(self._tracked.get(n) is reader for n, reader in retrieve.readers.items())
            if retrieve.is_over and not (retrieve.has_failed and is_read):
                del self.open[number]
                self._held.release(retrieve.blocks)

    def _recompute(self, retrieve: HeldRetrieve) -> None:
        """With vLLM's manager the request gets other blocks. Without, it computes in these, which
        is why the worker's side then waits until the retrieve is over (`worker.ACKNOWLEDGE_S`).
        """
        request = retrieve.tracked.request
        retrieve.tracked.prefix.recompute_from(retrieve.start_tokens)
        retrieve.readers.pop(request.request_id, None)  # no step of its needs this one any more
        if request.status.name not in ("WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"):
            return
        self._counts.recomputed += 1
        if self._manager is not None:
            self._manager.free(request)
            request.num_computed_tokens = 0
        else:
            request.num_computed_tokens = retrieve.start_tokens
            # With nothing computed vLLM would look for a prefix again, but the request has its
            # blocks already and cannot adopt others.
            request.skip_reading_prefix_cache |= not retrieve.start_tokens
