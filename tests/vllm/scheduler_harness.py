"""vLLM's real scheduler with both real sides of the connector; model, memory and server are toys.

`Rig` turns the engine's loop as vLLM does: schedule, run, abort, update, with one more step under
way where scheduling is asynchronous. `ScriptedClient` is the client of both sides; its retrieves
and stores move only when a test or a waiting forward says so. After every scheduling pass the rig
asserts that no block is handed out while a retrieve writes it or a store reads it. Memory is real
enough to be wrong: a token's KV names its whole prefix, and a request that reads anything else
samples `WRONG`, which must never come out."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lamina.engines.vllm.connector import LaminaConnector
from lamina.engines.vllm.messages import StepMetadata
from lamina.engines.vllm.scheduler import SchedulerSide
from lamina.shards import Shard
from tests.vllm.scheduler_config import NAMES, engine_config, kv_config
from tests.vllm.scheduler_drafts import NO_DRAFT, Drafter, Part
from tests.vllm.scripted_client import BLOCK, LAYERS, ScriptedClient, Text, ToyModel

MODES = ("sync", "async", "async-v2")
"""Scheduler with runner V1; AsyncScheduler with V1; AsyncScheduler as for runner V2."""
HAS_SYNC_FLAG = "has_sync_kv_loads" in SchedulerOutput.__dataclass_fields__
"""From 0.32 on vLLM calls `start_load_kv` before the forward only if this is set."""
HANDS_OVER_MANAGER = hasattr(KVConnectorBase_V1, "bind_kv_cache_manager")
"""From 0.32 on a request that waits can be given other blocks."""
RANKS = int(os.environ.get("LAMINA_TEST_RANKS", "1"))
"""Of an engine, unless a test says how many it has."""
WRONG = 1
PATIENCE = 1_000


class Step(NamedTuple):
    """One pass: what was scheduled, told to the worker's side, and came out."""

    output: Any
    told: StepMetadata
    result: Any
    written: set[int]
    drafts: dict[str, list[int]]
    """What is proposed for the next step."""

    @property
    def requests(self) -> dict[str, int]:
        return dict(self.output.num_scheduled_tokens)

    @property
    def released(self) -> set[str]:
        kv = self.result.kv_connector_output
        return set(kv.finished_recving or ()) if kv is not None else set()


class Rig:
    """An engine with `blocks` blocks of which one is vLLM's null block. With `drafts` it
    speculates: its `drafter` proposes up to so many tokens."""

    def __init__(
        self,
        mode: str,
        blocks: int = 64,
        policy: str = "fail",
        step_tokens: int = 512,
        settings: dict[str, Any] | None = None,
        ranks: int = RANKS,
        stages: Sequence[range] = (),
        drafts: int = 0,
    ) -> None:
        """`stages` are the layers of pipeline stages, one rank each, in place of `ranks` that have
        all of them."""
        self.blocks = blocks
        self.model = ToyModel()
        self.drafter = Drafter(self.model, drafts)
        self.clients: list[ScriptedClient] = []
        layers_of = list(stages) or [range(LAYERS)] * ranks
        ranks = len(layers_of)
        for own_layers in layers_of:
            kv = np.zeros((LAYERS, blocks * BLOCK), np.int64)
            first = self.clients[0] if self.clients else None
            client = ScriptedClient(self.model, kv, self._check_target, first, own_layers)
            self.clients.append(client)
        self.client = self.clients[0]
        self.memory = self.client.memory
        self._is_async = mode != "sync"
        config = engine_config(
            self._is_async,
            blocks,
            policy,
            step_tokens,
            {"pipeline_parallel": bool(stages), **(settings or {})},
            drafts,
        )
        config.parallel_config.world_size = ranks
        config.parallel_config.pipeline_parallel_size = max(1, len(stages))
        memory = kv_config(blocks)
        scheduler_class = config.scheduler_config.get_scheduler_cls()
        module = "lamina.engines.vllm.connector"
        with (
            mock.patch(f"{module}.Client", return_value=self.client),
            mock.patch(f"{module}.device_of", return_value=self.client),
            set_current_vllm_config(config),
        ):
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=memory,
                block_size=BLOCK,
                hash_block_size=BLOCK,
                structured_output_manager=StructuredOutputManager(config),
                log_stats=True,
            )
            # Whatever vLLM's attention is, its class is what is looked at.
            layers = {name: Attention.__new__(Attention) for name in NAMES}
            config.compilation_config.static_forward_context.update(layers)
            self.workers = [
                LaminaConnector(config, KVConnectorRole.WORKER, memory) for _ in self.clients
            ]
        for rank, client in enumerate(self.clients):
            with (
                mock.patch(f"{module}.Client", return_value=client),
                mock.patch(f"{module}.device_of", return_value=client),
                mock.patch(f"{module}.shard_of", return_value=Shard(rank, ranks)),
            ):
                names = NAMES[client.layers.start : client.layers.stop]
                kv_caches = {n: torch.zeros(blocks, 2, BLOCK, 64) for n in names}
                self.workers[rank].register_kv_caches(kv_caches)
        self.worker = self.workers[0]
        self._aggregator = KVOutputAggregator(ranks)
        self.scheduler.use_v2_model_runner = mode == "async-v2"
        self.connector = self.scheduler.connector
        self.side.find_identity()
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self._depth = config.max_concurrent_batches
        self._queue: deque[Step] = deque()
        self._tables: dict[str, set[int]] = {}  # blocks of all requests after the last pass
        self._computed: dict[str, int] = {}  # tokens, without drafts that were rejected
        self.full_graph = False
        """Whether the next forwards fire no layer hooks."""
        self.steps: list[Step] = []
        self.texts: dict[str, Text] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.requests: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        """The connector's own statistics."""

    # What a test does

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 4,
        resumable: bool = False,
        params: Any = None,
        salt: str | None = None,
        **options: Any,
    ) -> None:
        """Add a request; `options` become `lamina.*` of its `kv_transfer_params`, unless these
        `params` are they."""
        if params is None:
            params = {f"lamina.{key}": value for key, value in options.items()}
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        self.texts[name] = Text(self.model, prompt)
        self.tokens[name] = []
        request = Request(
            name, list(prompt), sampling, None, cache_salt=salt, block_hasher=self._hasher
        )
        request.resumable = resumable
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, *names: str) -> None:
        for request in map(self.scheduler.requests.get, names):
            if request is not None and not request.is_finished():
                self.ended[request.request_id] = "ABORT"
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def hold(self, prompt: list[int], chunks: int | None = None) -> None:
        """Let the server hold the first chunks of a prompt."""
        self.client.hold(self.side._namespace, prompt, chunks)

    def step(self, abort_if: Callable[[Step], Iterable[str]] = lambda step: ()) -> None:
        """Turn the loop until an output is taken; `abort_if` names who is aborted right before."""
        while self.scheduler.has_requests():
            executed = self._schedule()
            if len(self._queue) >= self._depth or not (executed or self.scheduler.has_requests()):
                break
        if self._queue:
            self.abort(*abort_if(self._queue[0]))
            self._complete()

    def catch_up(self) -> None:
        """Take the outputs of all steps under way."""
        while self._queue:
            self._complete()

    def until(self, condition: Callable[[], Any], **options: Any) -> None:
        """Step until `condition`, which must come."""
        for _ in range(PATIENCE):
            if condition():
                return
            self.step(**options)
        raise AssertionError("it never came")

    def run(self, *names: str) -> None:
        """Step until these requests have ended."""
        self.until(lambda: all(name in self.ended for name in names))

    def close(self) -> None:
        """Let all transfers end; then nothing may be left over, and each request got its tokens."""
        for client in self.clients:
            client.is_swift = True
        self.until(lambda: not self.scheduler.has_requests() and not self._queue)
        assert self.free == self.blocks - 1, "blocks are lost"
        assert not self.client.leases, "a lease is left over"
        assert not self.connector.has_pending_push_work()
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        for name, request in self.requests.items():
            if self.ended[name] == "LENGTH":
                assert len(self.tokens[name]) == request.max_tokens, f"{name} lacks tokens"

    # What a test looks at

    @property
    def side(self) -> SchedulerSide:
        side: SchedulerSide = self.connector._scheduler
        return side

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def status(self, name: str) -> str:
        return str(self.scheduler.requests[name].status.name)

    def cached(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are in the prefix cache."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return [block for block in blocks if pool.blocks[block].block_hash is not None]

    def blocks_of(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def steps_of(self, name: str) -> list[Step]:
        return [step for step in self.steps if name in step.requests]

    def releases(self, name: str) -> int:
        return sum(name in step.released for step in self.steps)

    # The toy engine

    def _schedule(self) -> bool:
        output = self.scheduler.schedule()
        namespace = self.side._namespace
        if namespace is not None and namespace not in self.client.namespaces:
            self.client.namespaces.append(namespace)
        step = Step(output, output.kv_connector_metadata, *self._run(output))
        self._tables = {name: set(self.blocks_of(name)) for name in self.scheduler.requests}
        self._queue.append(step)
        self.steps.append(step)
        return bool(output.total_num_scheduled_tokens > 0)

    def _run(self, output: Any) -> tuple[Any, set[int], dict[str, list[int]]]:
        """The worker's part of a step, in the order of vLLM's model runner."""
        for client in self.clients:
            client.advance()
        parts = [self._part(output, name) for name in output.num_scheduled_tokens]
        written = {block for part in parts for block in part.written}
        for client, worker in zip(self.clients, self.workers, strict=True):
            client.written = set().union(written, *(step.written for step in self._queue))
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
        for client in self.clients:
            busy = client.busy()
            for part in parts:
                for block in part.written:
                    assert block not in busy, f"{part.name} writes block {block}, {busy[block]}"
        wrong: set[str] = set()
        for client, worker in zip(self.clients, self.workers, strict=True):
            wrong |= self._forward(output, parts, client, worker)
        names = [part.name for part in parts]
        self._computed |= {part.name: part.computed for part in parts}
        results = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[self._sample(part, wrong) for part in parts],
                kv_connector_output=self._output_of(worker, output),
            )
            for worker in self.workers
        ]
        drafts = {name: self._propose(name) for name in names}
        return self._aggregated(results), written, drafts

    def _output_of(self, worker: LaminaConnector, output: Any) -> KVConnectorOutput | None:
        """What one rank's side tells of the step."""
        worker.wait_for_save()
        _, released = worker.get_finished(output.finished_req_ids)
        kv = KVConnectorOutput(
            finished_recving=released,
            invalid_block_ids=set(worker.get_block_ids_with_load_errors()),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return None if kv.is_empty() else kv

    def _aggregated(self, results: list[Any]) -> Any:
        """As vLLM's executor does with several ranks."""
        return self._aggregator.aggregate(results) if len(results) > 1 else results[0]

    def _part(self, output: Any, name: str) -> Part:
        """Where a request goes on the worker's side knows, once it runs: the scheduler may count
        drafts that were rejected meanwhile. It also knows the drafts themselves then."""
        count, cached = output.num_scheduled_tokens[name], output.scheduled_cached_reqs
        goes_on = name in cached.req_ids and name not in cached.resumed_req_ids
        start = self.scheduler.requests[name].num_computed_tokens - count
        if goes_on and self.drafter.count:
            start = self._computed[name]
        told = output.scheduled_spec_decode_tokens.get(name, [])
        drafts = [NO_DRAFT] * len(told)
        if goes_on and self._is_async:
            drafts = (self._propose(name) + drafts)[: len(told)]
        elif goes_on:
            drafts = list(told)
        blocks = np.array(self.blocks_of(name))
        return self.drafter.part(name, self.texts[name], start, start + count, blocks, drafts)

    def _propose(self, name: str) -> list[int]:
        """Drafts for the tokens after the last that is known, which is yet to be computed."""
        return self.drafter.propose(name, self.texts[name], self._computed[name] + 1)

    def _forward(
        self, output: Any, parts: list[Part], client: ScriptedClient, worker: LaminaConnector
    ) -> set[str]:
        """One rank's; returns the requests that read KV that is not their prefix's."""
        fires = bool(parts) and not self.full_graph
        mode = CUDAGraphMode.FULL if self.full_graph else CUDAGraphMode.NONE
        context = SimpleNamespace(
            attn_metadata=object() if fires else None, cudagraph_runtime_mode=mode
        )
        is_early = getattr(output, "has_sync_kv_loads", True)
        if is_early:
            worker.start_load_kv(context)
        wrong: set[str] = set()
        for layer in client.layers:
            memory = client.memory[layer]
            for part in parts:
                kv = 0 if part.name in wrong else part.kv
                memory[part.slots[part.start : part.end]] = kv
            if fires:
                worker.wait_for_layer_load(NAMES[layer])
            for part in parts:
                read = memory[part.slots[: part.start]]
                if not np.array_equal(read, self.texts[part.name].kv(part.start)):
                    wrong.add(part.name)
        if not is_early:
            worker.start_load_kv(context)
        return wrong

    def _sample(self, part: Part, wrong: set[str]) -> list[int]:
        if self.scheduler.requests[part.name].is_prefill_chunk:
            return []
        if part.name in wrong:
            return [WRONG]
        return self.texts[part.name].tokens(part.computed + 1)[part.end - part.drafts :]

    def _complete(self) -> None:
        step = self._queue.popleft()
        self._take(self.scheduler.update_from_output(step.output, step.result))
        if self.drafter.count and not self._is_async:  # else the worker's side keeps them
            drafts = DraftTokenIds(list(step.drafts), list(step.drafts.values()))
            self.scheduler.update_draft_token_ids(drafts)

    def _take(self, outputs: dict[int, Any]) -> None:
        for each in outputs.values():
            if each.scheduler_stats is not None:
                self.counts.update(each.scheduler_stats.kv_connector_stats or {})
        for output in (o for each in outputs.values() for o in each.outputs):
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[name] = output.finish_reason.name
            text, given = self.texts[name], self.tokens[name]
            expected = text.tokens(text.prompt + len(given))[text.prompt :]
            assert given == expected, f"{name} was given a token computed on wrong KV"

    def _check_target(self, request: str, blocks: list[int]) -> None:
        """A retrieve may write only blocks that nobody else has, and no step under way writes."""
        assert self.client.written.isdisjoint(blocks), (
            f"a step still writes where {request} retrieves"
        )
        for other in self.scheduler.requests.keys() - {request}:
            # Who came in this pass may have found them in the prefix cache.
            had = self._tables.get(other, set()).intersection(self.blocks_of(other), blocks)
            assert not had, f"{request} retrieves into blocks {had} of {other}"


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    return [seed * 10_000 + index for index in range(length)]
