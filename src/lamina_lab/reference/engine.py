"""The reference engine: schedule, wait layer by layer, compute, settle, sample, store.

A small but real paged engine on the CPU, for the demo and the tests. It shows the order of a step
that every integration must keep: gates are armed for all blocks that the step reads; a step that
consumed a gate settles it before any of its tokens is used; only then are blocks shared or stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lamina.client import Client, Prefixes, StepGates
from lamina.client.release import ReleasePolicy
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap, PlanePages
from lamina.keys import Namespace
from lamina_lab.reference.blocks import BlockPool
from lamina_lab.reference.cache import Cache
from lamina_lab.reference.config import ReferenceConfig
from lamina_lab.reference.kv_memory import KVMemory
from lamina_lab.reference.model import ReferenceModel, Span
from lamina_lab.reference.request import Request, State
from lamina_lab.reference.scheduler import Scheduler, Work

LayerHook = Callable[[int], None]

_IDLE_SLEEP_S = 100e-6


class ReferenceEngine:
    """Serves requests with a `ReferenceModel`; with a `client`, through its Lamina server.

    One thread. `max_step_tokens` bounds the tokens of one step (chunked prefill). The client must
    not be connected yet: the engine registers its KV with it.
    """

    def __init__(
        self,
        model: ReferenceModel,
        num_blocks: int,
        client: Client | None = None,
        chunk_tokens: int = 64,
        max_step_tokens: int = 4096,
    ) -> None:
        config = model.config
        self.model = model
        self.client = client
        self.memory = KVMemory(config, num_blocks)
        self.pool = BlockPool(num_blocks)
        geometry = geometry_of(config, chunk_tokens)
        namespace = Namespace(
            model=repr(config),
            weights=model.weights.fingerprint(),
            dtype="float32",
            geometry=geometry.digest,
            layout="block,kv,token,head",
            backend="reference",
        )
        self._steps = 0
        self.cache: Cache | None = None
        if client is not None:
            places = [
                Allocation(self.memory.address(layer), self.memory.nbytes(layer))
                for layer in range(config.layers)
            ]
            client.register(geometry, page_map_of(self.memory, config, num_blocks), places)
            prefixes = Prefixes.of(client, geometry, max_step_tokens)
            self.cache = Cache(prefixes, namespace, self.pool)
        self.scheduler = Scheduler(
            self.pool, self.cache, namespace, config.block_tokens, max_step_tokens
        )
        self.before_layer: LayerHook = _no_hook
        """Called as a layer is about to read KV, before it waits; for timelines and tests."""
        self.after_wait: LayerHook = _no_hook
        self.after_layer: LayerHook = _no_hook
        self.stalled_s = 0.0
        """Time that steps have spent waiting for slices."""

    def add(
        self,
        name: str,
        prompt: list[int],
        max_new_tokens: int = 1,
        policy: ReleasePolicy | None = None,
        store: bool = True,
    ) -> Request:
        """Queue a request: without a `policy` it retrieves nothing, without `store` stores nothing.

        Raises `ValueError` for one that the KV memory could never hold.
        """
        most = self.pool.num_blocks * self.model.config.block_tokens
        if len(prompt) + max_new_tokens > most:
            raise ValueError(
                f"a request of {len(prompt)} + {max_new_tokens} tokens does not fit the KV memory "
                f"of {most}; use more blocks"
            )
        request = Request(name, list(prompt), max_new_tokens, policy, store)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, whatever it is doing."""
        if not request.is_over:
            self.scheduler.finish(request, State.ABORTED)

    def step(self) -> bool:
        """One pass; returns whether anything was computed."""
        if self.cache is not None:
            self.cache.reap()
            self._recompute_failed()
        work = self.scheduler.schedule()
        if not work:
            return False
        gates = self.cache.gates(item.request for item in work) if self.cache else []
        step_gates = StepGates(self.client.device, gates) if self.client is not None else None
        self._measure(work, waits=step_gates is not None and bool(step_gates.gates))
        logits = self.model.forward(
            [self._span(item) for item in work],
            self.memory,
            before_layer=lambda layer: self._wait(layer, step_gates),
            after_layer=self.after_layer,
        )
        recomputed: set[Request] = set()
        if step_gates is not None and self.cache is not None:
            step_gates.settle()
            self.stalled_s += step_gates.waited_s
            recomputed = self._recompute_failed()
        if self.cache is not None:
            self.cache.prefixes.meters.steps.end(self._steps, time.monotonic())
        for item, row in zip(work, logits, strict=True):
            if item.request not in recomputed:
                self._advance(item, row)
        return True

    def run(self) -> None:
        """Step until every request is over."""
        while self.scheduler.requests:
            if not self.step():
                time.sleep(_IDLE_SLEEP_S)

    def drain(self) -> None:
        """Wait until no transfer holds a block any more."""
        while self.cache is not None and not self.cache.is_idle:
            self.cache.reap()
            self._recompute_failed()
            time.sleep(_IDLE_SLEEP_S)

    def close(self) -> None:
        """End the client and unmap the KV; no transfer may be open."""
        if self.client is not None:
            self.client.close()
        self.memory.close()

    def _recompute_failed(self) -> set[Request]:
        """Whoever reads blocks of a failed retrieve begins again."""
        affected: set[Request] = set()
        if self.cache is not None:
            for retrieve, blocks in self.cache.failed():
                affected.update(self.scheduler.recompute(retrieve, blocks))
        return affected

    def _measure(self, work: list[Work], waits: bool) -> None:
        """Time this step, for the policies."""
        if self.cache is None:
            return
        prefill = [item for item in work if item.tokens > 1]
        tokens = sum(item.tokens for item in prefill)
        before = sum(item.tokens * item.request.computed_tokens for item in prefill)
        self._steps += 1
        context = before // tokens if tokens else 0
        steps = self.cache.prefixes.meters.steps
        steps.begin(self._steps, time.monotonic(), tokens, context, waits)

    def _span(self, item: Work) -> Span:
        request, start = item.request, item.request.computed_tokens
        return Span(
            request.name,
            start,
            np.array(request.tokens[start : start + item.tokens]),
            np.array(request.blocks, np.int32),
        )

    def _wait(self, layer: int, step_gates: StepGates | None) -> None:
        self.before_layer(layer)
        if step_gates is not None:
            step_gates.before_layer(layer)
        self.after_wait(layer)

    def _advance(self, item: Work, logits: npt.NDArray[np.float32]) -> None:
        request = item.request
        self.scheduler.computed(request, item.tokens)
        if request.computed_tokens == len(request.tokens):
            if not request.output:
                request.first_token_s = time.perf_counter()
                request.first_logits = logits
            request.output.append(int(np.argmax(logits)))
        if self.cache is not None:
            self.cache.store(request)
        if len(request.output) >= request.max_new_tokens:
            self.scheduler.finish(request, State.FINISHED)


def geometry_of(config: ReferenceConfig, chunk_tokens: int) -> Geometry:
    """What the engine's KV is: one group; K and V packed in a page, or in two planes."""
    return Geometry(
        chunk_tokens,
        (Group(config.block_tokens),),
        tuple(
            Layer(f"layers.{index}", 0, config.planes, config.page_bytes)
            for index in range(config.layers)
        ),
    )


def page_map_of(memory: KVMemory, config: ReferenceConfig, num_blocks: int) -> PageMap:
    """Where it lies: one region a layer."""
    return PageMap(
        (num_blocks,),
        tuple(
            tuple(
                PlanePages(layer, memory.plane_offset_bytes(plane), memory.page_stride_bytes)
                for plane in range(config.planes)
            )
            for layer in range(config.layers)
        ),
    )


def _no_hook(layer: int) -> None:
    pass
