"""The scheduler's side of the connector: what to look up, load, gate, store, and hold.

One guard covers every path: the blocks of a load or a store are held in vLLM's own block pool (as
one more reference) until the worker's side says that the transfer is over. So abort, preemption,
finish and time-out, in any order, never hand a block out while it may still be read or written.

A load is *released* when vLLM may run its request, *settled* when all of it has landed. Between
the two, every step with a request that reads its blocks arms its gate: its own request, and others
that found the blocks in vLLM's prefix cache.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lamina.client import Client, Lookup, Release, ReleaseQuery
from lamina.engines.vllm.config import ConnectorSettings, RequestSettings
from lamina.engines.vllm.identity import extras_of
from lamina.engines.vllm.messages import LoadSpec, StepMetadata, StepReport, StoreSpec
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.errors import SettingsError
from lamina.keys import Extra, KeyChain, Namespace

log = logging.getLogger(__name__)

LOOKUP_WAIT_S = 300e-6
"""A lookup's answer is worth this wait: `None` costs an idle engine 1 ms, a busy one a step."""


@dataclass(frozen=True)
class _Offer:
    """What `matched_tokens` promised; it counts once blocks are allocated for it."""

    lease: int
    start_tokens: int
    release: Release


@dataclass(eq=False)
class _Tracked:
    """A request that vLLM knows."""

    request: Any
    settings: RequestSettings
    chain: KeyChain
    extras: dict[int, list[Extra]]
    may_load: bool
    may_store: bool
    lookup: Lookup | None = None
    looked_up_s: float = 0.0
    offer: _Offer | None = None
    blocks: list[int] = field(default_factory=list)
    admitted_tokens: int = 0
    """Tokens that counted as computed when the request was last scheduled anew. Others may be
    computing them in that very step, so they are confirmed only once more than they are."""
    saved_chunks: int = 0


@dataclass(eq=False)
class _Load:
    """A load whose blocks are held."""

    tracked: _Tracked
    start_tokens: int
    blocks: list[int]
    readers: dict[str, _Tracked]
    released: bool
    failed: bool = False
    over: bool = False


@dataclass(eq=False)
class _Store:
    """A store whose blocks are held."""

    tracked: _Tracked
    blocks: list[int]


class SchedulerSide:
    """Called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        client: Client,
        block_tokens: int,
        num_blocks: int,
        ranks: int = 1,
    ) -> None:
        self._settings = settings
        self.client = client
        self._block_tokens = block_tokens
        self._most_held = int(num_blocks * settings.held_blocks_share)
        self._ranks = ranks
        self._namespace: Namespace | None = None
        self._layers = 1
        self._pool: Any = None
        self._manager: Any = None
        self._tracked: dict[str, _Tracked] = {}
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._held_for_stores = 0
        self._new_loads: list[LoadSpec] = []
        self._new_stores: list[StoreSpec] = []
        self._number = 0
        self._reports = StepReport()
        self.counts = SchedulerCounts()

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool; before anything is loaded."""
        self._pool = pool

    def bind_manager(self, manager: Any) -> None:
        """vLLM's cache manager, where vLLM hands it over (from 0.32 on)."""
        self._manager = manager

    def set_identity(self, namespace: Namespace, layers: int) -> None:
        """What the worker's side found out; before this nothing is looked up or stored."""
        self._namespace = namespace
        self._layers = layers

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed though no request may be left: blocks are held."""
        return bool(self._loads or self._stores or self._new_stores)

    # Requests

    def new_request(self, request: Any) -> None:
        """Begin to look the request's prompt up, so that the answer is there when vLLM asks."""
        self.client.poll()
        if (tracked := self._track(request)) is not None:
            self._look_up(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond vLLM's own hit, and whether asynchronously.

        None while the lookup is on its way. Commits nothing: vLLM may ask again.
        """
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        tracked.offer = None
        hit = self._hit(tracked)
        if hit is None:
            return None, False
        tokens = hit - local_tokens
        if tokens <= 0:
            return 0, False
        assert tracked.lookup is not None
        assert tracked.lookup.result is not None
        query = ReleaseQuery(self._layers, tokens, request.num_tokens - hit)
        release = tracked.settings.policy.decide(query)
        tracked.offer = _Offer(tracked.lookup.result.lease, local_tokens, release)
        return tokens, release.release_after_slices > 0

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The request has `blocks`; with `tokens` > 0, load that many of the offered ones."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks)
        offer, tracked.offer = tracked.offer, None
        if tokens and offer is not None:
            self._begin_load(tracked, offer, tokens)
        elif tracked.lookup is not None:
            self._give_lease_back(tracked)
        for load in self._loads.values():
            if not load.failed and not set(load.blocks).isdisjoint(blocks):
                load.readers[request.request_id] = tracked

    def finished(self, request: Any) -> None:
        """The request is over, however: store what is left, cancel what nobody waits for."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._store_confirmed(tracked)
        own = [load for load in self._loads.values() if load.tracked is tracked]
        if any(load.released for load in own):
            # Its blocks may be in vLLM's prefix cache, and others may be reading them: let it land.
            self._give_lease_back(tracked)
        else:
            self.client.end_request(request.request_id)
        self._end_loads()

    # Steps

    def build_step(self, output: Any) -> StepMetadata:
        """The metadata of the step that `output` schedules."""
        self.client.poll()
        self._note_preempted(output.preempted_req_ids or ())
        self._note_scheduled(output.scheduled_new_reqs, output.scheduled_cached_reqs)
        scheduled = output.num_scheduled_tokens
        for name in scheduled:
            tracked = self._tracked.get(name)
            if tracked is not None:
                self._store_confirmed(tracked)
        gates = [
            number
            for number, load in self._loads.items()
            if load.released and not load.failed and not load.readers.keys().isdisjoint(scheduled)
        ]
        bad = [load.blocks for load in self._loads.values() if load.failed]
        written = set(getattr(output, "new_block_ids_to_zero", None) or ())
        loads = [self._with_ticket(load, written) for load in self._new_loads]
        stores, self._new_loads, self._new_stores = self._new_stores, [], []
        return StepMetadata(
            loads,
            stores,
            gates,
            {block for blocks in bad for block in blocks},
            output.total_num_scheduled_tokens,
        )

    def step_done(self, released: Iterable[str], report: StepReport | None) -> None:
        """What the worker's side reports of a step; before vLLM acts on it."""
        names = set(released)
        for load in self._loads.values():
            if load.tracked.request.request_id in names:
                load.released = True
        if report is None:
            return
        self._reports = self._reports.aggregate(report)
        for number in self._complete(self._reports.loads_to_recompute):
            self._recompute(self._loads[number])
        for number in self._complete(self._reports.loads_failed, at_least=1):
            self._fail(self._loads.get(number))
        for number in self._complete(self._reports.loads_over):
            self._loads[number].over = True
        self._end_loads()
        for number in self._complete(self._reports.stores_over):
            self._end_store(number)

    def reset(self) -> None:
        """vLLM's caches were reset, perhaps for other weights: a new epoch, for new requests."""
        if self._namespace is not None:
            fields = {name: getattr(self._namespace, name) for name in Namespace.__struct_fields__}
            self._namespace = Namespace(**{**fields, "epoch": secrets.randbits(63)})
        for tracked in self._tracked.values():
            tracked.may_load = tracked.may_store = False

    # Lookups

    def _track(self, request: Any) -> _Tracked | None:
        """The request's state; None when it bypasses the cache or nothing is known yet."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None or self._namespace is None:
            return tracked
        if request.prompt_embeds is not None or request.resumable:
            return None  # no token ids to name chunks by; or a prompt that is not all there yet
        try:
            settings = RequestSettings(self._settings, request.kv_transfer_params)
        except SettingsError as error:
            log.warning("request %s goes without the cache: %s", request.request_id, error)
            return None
        namespace = self._namespace
        if request.cache_salt:
            fields = {name: getattr(namespace, name) for name in Namespace.__struct_fields__}
            namespace = Namespace(**{**fields, "salt": request.cache_salt})
        tracked = _Tracked(
            request,
            settings,
            KeyChain(namespace, self._settings.chunk_tokens),
            extras_of(request, self._settings.chunk_tokens),
            settings.load and not request.skip_reading_prefix_cache,
            settings.store,
        )
        self._tracked[request.request_id] = tracked
        return tracked

    def _look_up(self, tracked: _Tracked) -> None:
        keys = tracked.chain.extend(tracked.request.all_token_ids, tracked.extras)
        if tracked.may_load and keys:
            tracked.lookup = self.client.lookup(tracked.request.request_id, keys)
            tracked.looked_up_s = time.monotonic()

    def _hit(self, tracked: _Tracked) -> int | None:
        """Leading tokens that the server holds: whole blocks, and at least one is left over."""
        if not tracked.may_load:
            return 0
        self.client.poll()
        if tracked.lookup is None or self._is_stale(tracked):
            self._look_up(tracked)
        lookup = tracked.lookup
        if lookup is None:
            return 0
        result = lookup.result
        if result is None:
            result = lookup.wait(LOOKUP_WAIT_S)
        if result is None:
            return None
        tracked.saved_chunks = max(tracked.saved_chunks, result.chunks)
        most = (tracked.request.num_tokens - 1) // self._block_tokens * self._block_tokens
        return int(min(result.chunks * self._settings.chunk_tokens, most))

    def _is_stale(self, tracked: _Tracked) -> bool:
        """Whether the lease may run out before it is used."""
        lease_ttl_s = self.client.lease_ttl_s
        return 0 < lease_ttl_s / 2 < time.monotonic() - tracked.looked_up_s

    def _give_lease_back(self, tracked: _Tracked) -> None:
        result = tracked.lookup.result if tracked.lookup is not None else None
        if result is not None and result.lease:
            self.client.end_lease(result.lease)
        tracked.lookup = None

    # Loads

    def _begin_load(self, tracked: _Tracked, offer: _Offer, tokens: int) -> None:
        first = offer.start_tokens // self._block_tokens
        blocks = tracked.blocks[first : first + tokens // self._block_tokens]
        name = tracked.request.request_id
        number = self._next_number()
        released = not offer.release.release_after_slices
        load = _Load(tracked, offer.start_tokens, blocks, {name: tracked}, released)
        self._loads[number] = load
        self._hold(blocks)
        self._new_loads.append(
            LoadSpec(number, name, offer.lease, offer.start_tokens, blocks, *offer.release, False)
        )
        tracked.lookup = None  # the load has the lease now
        self.counts.loads += 1
        self.counts.loaded_tokens += tokens

    def _with_ticket(self, load: LoadSpec, written: set[int]) -> LoadSpec:
        """A load into blocks that this step zeroes must come after the zeroing."""
        if written.isdisjoint(load.blocks):
            return load
        return LoadSpec(**{**load.__dict__, "needs_ticket": True})

    def _recompute(self, load: _Load) -> None:
        """A load failed before its request ran: the request computes instead.

        With vLLM's manager it gets other blocks. Without, it computes in these, which is why the
        worker's side then waits until the load is over (`worker.ACKNOWLEDGE_S`).
        """
        request = load.tracked.request
        load.tracked.may_load = False
        load.tracked.saved_chunks = load.start_tokens // self._settings.chunk_tokens
        load.readers.pop(request.request_id, None)  # no step of its needs this load any more
        if request.status.name not in ("WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"):
            return
        self.counts.recomputed += 1
        if self._manager is not None:
            self._manager.free(request)
            request.num_computed_tokens = 0
        else:
            request.num_computed_tokens = load.start_tokens
            # With nothing computed vLLM would look for a prefix again, but the request has its
            # blocks already and cannot adopt others.
            request.skip_reading_prefix_cache |= not load.start_tokens

    def _fail(self, load: _Load | None) -> None:
        """A load failed after release: nobody may find its blocks in the prefix cache any more.

        Requests that run end in an error, which vLLM sees to. One that was promoted but has not
        run is overlooked by vLLM: it can still compute instead, where we have the manager.
        """
        if load is None or load.failed:
            return
        load.failed = True
        self.counts.failed += 1
        bad = set(load.blocks)
        self._pool.evict_blocks(bad)
        for reader in load.readers.values():  # and what they computed on bad blocks
            first = next((i for i, block in enumerate(reader.blocks) if block in bad), None)
            if first is not None:
                self._pool.evict_blocks(set(reader.blocks[first:]))
        name = load.tracked.request.request_id
        waits = load.tracked.request.status.name in ("WAITING", "PREEMPTED")
        if waits and self._manager is not None and name in self._tracked:
            self._recompute(load)

    def _end_loads(self) -> None:
        """Release the blocks of loads that are over; bad ones when all who read them are gone.

        Until then the worker's side reports them in every step: vLLM overlooks a report about a
        request that is neither waiting for its load nor running.
        """
        for number, load in list(self._loads.items()):
            is_read = any(self._tracked.get(n) is reader for n, reader in load.readers.items())
            if load.over and not (load.failed and is_read):
                del self._loads[number]
                self._release(load.blocks)

    # Stores

    def _store_confirmed(self, tracked: _Tracked) -> None:
        """Queue a store of the full chunks that are computed, confirmed and not yet stored.

        No more blocks are held for stores than `held_blocks_share` allows: what does not fit goes
        later, or is dropped when the request is over.
        """
        request = tracked.request
        confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        if confirmed <= tracked.admitted_tokens or not tracked.may_store:
            return
        if not self._settings.store_decode:
            confirmed = min(confirmed, request.num_prompt_tokens)
        chunk_tokens = self._settings.chunk_tokens
        per_chunk = chunk_tokens // self._block_tokens
        first, full = tracked.saved_chunks, min(confirmed, request.num_tokens) // chunk_tokens
        room = max(0, self._most_held - self._held_for_stores) // per_chunk
        end = min(full, first + room) if self.client.is_usable else first
        if self._tracked.get(request.request_id) is not tracked:
            self.counts.dropped_chunks += max(0, full - max(first, end))
        if end <= first:
            return
        blocks = tracked.blocks[first * per_chunk : end * per_chunk]
        keys = tracked.chain.extend(request.all_token_ids, tracked.extras)
        number = self._next_number()
        self._hold(blocks)
        self._held_for_stores += len(blocks)
        self._stores[number] = _Store(tracked, blocks)
        parent = keys[first - 1] if first else b""
        self._new_stores.append(StoreSpec(number, parent, keys[first:end], blocks))
        self.counts.stored_chunks += end - first
        tracked.saved_chunks = end

    def _end_store(self, number: int) -> None:
        store = self._stores.pop(number)
        self._held_for_stores -= len(store.blocks)
        self._release(store.blocks)

    # Blocks

    def _note_scheduled(self, new: Any, cached: Any) -> None:
        """Note where newly scheduled requests begin, and the blocks that running ones were given;
        resumed ones got theirs all anew."""
        for data in new:
            if (tracked := self._tracked.get(data.req_id)) is not None:
                tracked.admitted_tokens = data.num_computed_tokens
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            if name in cached.resumed_req_ids:
                tracked.admitted_tokens = computed
            elif blocks is not None:
                tracked.blocks.extend(blocks[0])

    def _note_preempted(self, names: Iterable[str]) -> None:
        """A preempted request reads no load any more.

        vLLM 0.26 preempts requests whose step is under way and later delivers its token. If that
        step has read a load that may yet fail, the token is not to be trusted: have it discarded.
        """
        for name in names:
            for load in self._loads.values():
                tracked = load.readers.pop(name, None)
                if tracked is not None and hasattr(tracked.request, "async_tokens_to_discard"):
                    request = tracked.request
                    request.async_tokens_to_discard += request.num_output_placeholders
                    request.num_output_placeholders = 0

    def _hold(self, blocks: list[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def _release(self, blocks: list[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _complete(self, counts: Any, at_least: int = 0) -> list[int]:
        """Take the numbers that all ranks (or `at_least` some) have reported."""
        needed = at_least or self._ranks
        numbers = [number for number, count in counts.items() if count >= needed]
        for number in numbers:
            del counts[number]
        return numbers
