"""The scheduler's side of the connector: requests, lookups, and the metadata of each step.

What becomes of a hit is decided in `planning`; `retrieves` and `stores` see transfers through, and
`tracked.HeldBlocks` keeps their blocks from being handed out meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from lamina.client import Client, Prefixes
from lamina.engines.vllm.config import ConnectorSettings, RequestSettings
from lamina.engines.vllm.identity import Identity, check_texts, extras_of
from lamina.engines.vllm.messages import (
    StepMetadata,
    StepReport,
    TransferState,
)
from lamina.engines.vllm.planning import Planner, prompt_tokens
from lamina.engines.vllm.ranks import UnlikeRanksError, joined
from lamina.engines.vllm.retrieves import Retrieves
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.stores import Stores
from lamina.engines.vllm.tracked import HeldBlocks, Tracked
from lamina.errors import LaminaError
from lamina.keys import Namespace

log = logging.getLogger(__name__)

_LOOK_EVERY = 8
"""Steps until a request that decodes is looked at again for chunks to store; and so long at most
until what a step computes is confirmed, however many are under way."""
LOOKUP_WAIT_S = 300e-6
"""A lookup's answer is worth this wait: `None` costs an idle engine 1 ms, a busy one a step."""
ADAPTER_WAIT_S = 1.0
"""A request waits so long until its adapter's files are read, which vLLM must do too."""


class SchedulerSide:
    """Called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        client: Client,
        identity: Identity,
        block_tokens: int,
        num_blocks: int,
        step_tokens: int,
        ranks: int = 1,
    ) -> None:
        """`step_tokens` is the most that a step computes."""
        self._settings = settings
        self.client = client
        self._identity = identity
        self._ranks = ranks
        self._namespace: Namespace | None = None
        """None until all of the identity is known, and while it is not known after a reset."""
        self._waits_for_epoch = False
        self._tracked: dict[str, Tracked] = {}
        self._reports = StepReport()
        self._steps = 0
        self._prompts: dict[str, int] = {}
        """Requests with parts of prompts in late steps, and the step until which to look at
        them."""
        self.counts = SchedulerCounts()
        self.held = HeldBlocks()
        most_held = int(num_blocks * settings.held_blocks_share)
        self._prefixes = Prefixes(client, settings.chunk_tokens, block_tokens, step_tokens)
        self.stores = Stores(settings, self._prefixes, most_held, self.held, self.counts)
        timeout_s = settings.retrieve_timeout_ms / 1000
        self.retrieves = Retrieves(self._prefixes, self.held, self.counts, self._tracked, timeout_s)
        self._planner = Planner(self._prefixes, self.counts, ranks)

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool; before anything is retrieved."""
        self.held.bind(pool)

    def bind_manager(self, manager: Any) -> None:
        """vLLM's cache manager, where vLLM hands it over (from 0.32 on)."""
        self.retrieves.bind_manager(manager)

    def find_identity(self) -> None:
        """Take what is known by now; before all is, nothing is looked up or stored."""
        if not self._identity.is_known and (told := self.client.workers(self._ranks)) is not None:
            try:
                workers = joined(told)
            except UnlikeRanksError as error:
                self.client.note_trouble(str(error))
                return
            if workers is not None:
                self._identity.workers_told(workers)
                self._prefixes.set_model(workers.layers, workers.token_bytes)
        self._namespace = self._identity.namespace()

    def is_tracked(self, request_id: str) -> bool:
        """Whether steps of the request are gated where it reads a retrieve in flight."""
        return request_id in self._tracked

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed though no request may be left: blocks are held."""
        return bool(self.retrieves.open) or not self.stores.is_idle

    # Requests

    def new_request(self, request: Any) -> None:
        """Begin to look the request's prompt up, so that the answer is there when vLLM asks."""
        self.client.poll()
        if self._namespace is None:
            self.find_identity()
        if (tracked := self._track(request)) is not None:
            tracked.prefix.look_up(request.all_token_ids)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be retrieved beyond vLLM's own hit, and whether asynchronously.

        None while the lookup is on its way, or what names the request's KV is being found out.
        Commits nothing: vLLM may ask again.
        """
        tracked = self._track(request)
        if tracked is None:
            return (None, False) if self._is_worth_waiting(request) else (0, False)
        tracked.offer = None
        hit = tracked.prefix.hit(request.all_token_ids, LOOKUP_WAIT_S)
        if hit is None:
            return None, False
        beyond = hit - local_tokens
        if beyond <= 0:
            return 0, False
        others = self._planner.batch(tracked, self._tracked)
        offer = self._prefixes.offer(
            tracked.prefix, request.num_tokens, local_tokens, beyond, others
        )
        tracked.offer = offer
        return offer.tokens, offer.tokens > 0 and offer.release.release_after_slices > 0

    def allocated(self, request: Any, table: Any, tokens: int) -> None:
        """The request has the blocks of `table` (vLLM's `KVCacheBlocks`); with `tokens` > 0,
        retrieve that many: those that were offered."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.table = table
        offer, tracked.offer = tracked.offer, None
        if tokens and offer is not None:
            self._planner.committed(tracked, offer, self.retrieves.begin(tracked, offer))
        else:
            if offer is not None:
                self._planner.committed(tracked, offer, None)
            tracked.prefix.give_back()
        self.retrieves.note_reader(tracked)

    def finished(self, request: Any) -> None:
        """The request is over, however: store what is left, cancel what nobody waits for."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._store_confirmed(tracked)
        self._planner.forget(tracked.name)
        if self.retrieves.is_released(tracked):
            # Its blocks may be in vLLM's prefix cache, and others may be reading them: let it land.
            tracked.prefix.give_back()
        else:
            tracked.prefix.end()
        self.retrieves.end()

    # Steps

    def build_step(self, output: Any) -> StepMetadata:
        """The metadata of the step that `output` schedules."""
        self.client.poll()
        self.retrieves.note_preempted(output.preempted_req_ids or ())
        self._note_scheduled(output.scheduled_new_reqs, output.scheduled_cached_reqs)
        scheduled = output.num_scheduled_tokens
        prompts = prompt_tokens(output)
        self._store_of_step(scheduled, prompts)
        gates = self.retrieves.gates(scheduled)
        self._steps += 1
        if output.total_num_scheduled_tokens:
            self._planner.step_built(self._steps, output, prompts, bool(gates))
        written = set(getattr(output, "new_block_ids_to_zero", None) or ())
        asks = self._waits_for_epoch and self._identity.epochs.current is None
        self._waits_for_epoch = False
        return StepMetadata(
            self._steps,
            self.retrieves.take_new(written),
            self.stores.take_queued(),
            gates,
            self.retrieves.bad_blocks(),
            output.total_num_scheduled_tokens,
            self.retrieves.take_cancelled(),
            self.stores.take_given_up(),
            self._identity.epochs.resets if asks else 0,
        )

    def step_done(self, released: Iterable[str], report: StepReport | None) -> None:
        """What the worker's side reports of a step; before vLLM acts on it."""
        self.retrieves.release(set(released))
        if report is None:
            return
        if report.step:
            self._planner.step_over(report.step)
        self._planner.landed(report.accounts)
        reports = self._reports = self._reports.aggregate(replace(report, accounts=[]))
        self._take_weights()
        # Without vLLM's manager the request computes in the same blocks: none may be written still.
        needed = 1 if self.retrieves.recomputes_elsewhere else self._ranks
        for number in reports.take(TransferState.RECOMPUTED, needed):
            self._planner.retrieve_failed(number)
            self.retrieves.recompute(number)
        for number in reports.take(TransferState.FAILED, 1):
            self._planner.retrieve_failed(number)
            self.retrieves.fail(number)
        for number in reports.take(TransferState.OVER, self._ranks):
            if (retrieve := self.retrieves.open.get(number)) is not None:
                retrieve.is_over = True
            else:
                self.stores.end(number)
        self.retrieves.end()

    def reset(self, forget: bool) -> None:
        """vLLM's prefix cache was reset, with `forget` ours too; perhaps for other weights.

        A new epoch for new requests, unless the weights turn out to be the same and nothing is to
        be forgotten. Nothing of before is retrieved or stored any more.
        """
        self._identity.epochs.reset(forget)
        self._namespace = self._identity.namespace()
        for tracked in self._tracked.values():
            tracked.prefix.may_retrieve = tracked.prefix.may_store = False

    # Lookups

    def _track(self, request: Any) -> Tracked | None:
        """The request's state; None while nothing is known yet.

        One that goes without the cache is tracked too: in vLLM's own it may find blocks that a
        retrieve still fills."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None or self._namespace is None:
            return tracked
        settings = self._settings_of(request)
        namespace = self._namespace
        if request.cache_salt and (settings.retrieve or settings.store):
            namespace = msgspec.structs.replace(namespace, salt=request.cache_salt)
        if (lora := request.lora_request) is not None:
            adapter = self._identity.adapters.identity(lora)
            if adapter is None and self._is_worth_waiting(request):
                return None
            if adapter is None:
                settings = self._without()
            namespace = msgspec.structs.replace(namespace, adapter=adapter or "unknown")
        may_retrieve = settings.retrieve and not request.skip_reading_prefix_cache
        prefix = self._prefixes.begin(
            request.request_id,
            namespace,
            settings.policy if may_retrieve else None,
            extras_of(request, self._settings.chunk_tokens),
            settings.store,
        )
        tracked = Tracked(request, prefix)
        self._tracked[request.request_id] = tracked
        return tracked

    def _settings_of(self, request: Any) -> RequestSettings:
        without = self._without()
        if request.prompt_embeds is not None or request.resumable:
            return without  # no token ids to name chunks by; or a prompt that is not all there yet
        try:
            check_texts(request)
            return RequestSettings(self._settings, request.kv_transfer_params)
        except Exception as error:  # users write it: whatever it is, the engine serves on
            is_told = isinstance(error, LaminaError)
            name = ascii(request.request_id)[1:-1]
            log.warning("request %s goes without the cache: %s", name, error, exc_info=not is_told)
            return without

    def _without(self) -> RequestSettings:
        """Those of a request that goes without the cache."""
        return RequestSettings(self._settings, {"lamina.retrieve": False, "lamina.store": False})

    def _is_worth_waiting(self, request: Any) -> bool:
        """Whether it will soon be known what names the request's KV."""
        if self._namespace is None:
            self.find_identity()
            self._waits_for_epoch = self._identity.is_known and self._namespace is None
            return self._waits_for_epoch or self._namespace is not None
        lora = request.lora_request
        return lora is not None and self._identity.adapters.is_being_read(lora, ADAPTER_WAIT_S)

    def _store_confirmed(self, tracked: Tracked) -> None:
        is_over = self._tracked.get(tracked.name) is not tracked
        self.stores.store_confirmed(tracked, is_over, self.client.is_usable)

    # Steps, in detail

    def _store_of_step(self, scheduled: Mapping[str, int], prompts: Iterable[str]) -> None:
        """Store what is confirmed of prompts, at every step until all of it is, and of a part of
        those that decode: each of hundreds has a chunk more once in hundreds of steps."""
        names = list(scheduled)
        self._prompts.update(dict.fromkeys(prompts, self._steps + _LOOK_EVERY))
        some = names[self._steps % _LOOK_EVERY :: _LOOK_EVERY]
        looked_at = dict.fromkeys([*self._prompts, *some])
        if self._prompts:
            self._prompts = {n: until for n, until in self._prompts.items() if until > self._steps}
        chunk_tokens = self._settings.chunk_tokens
        for name in looked_at:
            tracked = self._tracked.get(name)
            if tracked is not None and (
                tracked.request.num_computed_tokens
                >= (tracked.prefix.known_chunks + 1) * chunk_tokens
            ):
                self._store_confirmed(tracked)

    def _note_scheduled(self, new: Any, cached: Any) -> None:
        """Note where requests begin that are scheduled anew, for the first time or again."""
        starts = {data.req_id: data.num_computed_tokens for data in new}
        if cached.resumed_req_ids:  # in few steps
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    starts[name] = computed
        for name, computed in starts.items():
            if (tracked := self._tracked.get(name)) is not None:
                tracked.admitted_tokens = computed

    def _take_weights(self) -> None:
        """What all ranks say of their weights since the last reset."""
        resets = self._identity.epochs.resets
        told = [change for reset, change in self._reports.weights if reset == resets]
        if len(told) >= self._ranks:
            self._reports.weights.clear()
            self._identity.epochs.looked(resets, told[: self._ranks])
            self._namespace = self._identity.namespace()
