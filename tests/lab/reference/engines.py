"""Small reference engines on a real server, and what a recompute gives.

KV memory is all NaN before an engine begins, so a page that is read before its bytes are there
shows in the logits. Where a test holds slices at the valve, the engine's own hook lets them pass
one by one, each only after the layer before it has been computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamina.client import Client, FixedPolicy, LookupResult, ReleasePolicy, WholePolicy
from lamina.devices.host import HostWorkerDevice
from lamina.settings import ClientSettings
from lamina_lab.reference.config import FloatArray, ReferenceConfig
from lamina_lab.reference.engine import ReferenceEngine
from lamina_lab.reference.kv_memory import KVMemory
from lamina_lab.reference.model import LayerHook, ReferenceModel, Span
from lamina_lab.reference.request import Request, State
from tests.support.server import ServerThread
from tests.support.wait import eventually

SMALL = ReferenceConfig(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=128
)
BLOCK, CHUNK = SMALL.block_tokens, 64
CHUNKS = 4
HIT = CHUNKS * CHUNK
HIT_BLOCKS = HIT // BLOCK
LAYER_BY_LAYER = FixedPolicy(1)
SYNCHRONOUS = FixedPolicy(1, release_after_slices=0)


class Recorder(ReferenceModel):
    """Notes the block table of every request, and its KV as it was after each span."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__(config)
        self.tables: dict[str, list[int]] = {}
        self.kv: dict[tuple[str, int], bytes] = {}
        self.computed_tokens = 0

    def forward(
        self,
        spans: Sequence[Span],
        memory: KVMemory,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> FloatArray:
        rows = super().forward(spans, memory, before_layer, after_layer)
        for span in spans:
            self.tables[span.request] = [int(block) for block in span.block_ids]
            self.kv[span.request, span.end] = b"".join(
                pages[span.block_ids].reshape(-1, *pages.shape[2:])[: span.end].tobytes()
                for layer in range(self.config.layers)
                for pages in (memory.keys(layer), memory.values(layer))
            )
            self.computed_tokens += len(span.token_ids)
        return rows


class Engine(ReferenceEngine):
    """A reference engine whose KV is NaN at first and whose model records what it computes."""

    def __init__(self, config: ReferenceConfig, num_blocks: int, **options: Any) -> None:
        self.recorder = Recorder(config)
        super().__init__(self.recorder, num_blocks, chunk_tokens=CHUNK, **options)
        self.memory.poison(range(num_blocks))

    def serve(self, *requests: Request) -> None:
        """Step until these requests are over; fail when they never are."""
        self.step_until(lambda: all(request.is_over for request in requests))

    def step_until(self, condition: Callable[[], object]) -> None:
        def stepped() -> object:
            if condition():
                return True
            self.step()
            return condition()

        eventually(stepped)

    def step_until_drained(self) -> None:
        """Step until no transfer holds a block any more."""
        self.step_until(lambda: self.cache is None or self.cache.is_idle)


def wait_for_lookup(request: Request) -> LookupResult:
    """The server's answer about a request's prompt."""
    assert request.prefix is not None
    assert request.prefix.lookup is not None
    result = request.prefix.lookup.wait(20)
    assert result is not None
    return result


def tokens_of(count: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, SMALL.vocab, count)]


SHARED = tokens_of(HIT, seed=1)
PROMPT = SHARED + tokens_of(44, seed=2)
"""Four chunks that the server holds, then 44 tokens that it does not."""


@dataclasses.dataclass(frozen=True)
class Expected:
    output: list[int]
    logits: bytes
    kv: bytes


@functools.cache
def _recomputed(config: ReferenceConfig, prompt: tuple[int, ...], new_tokens: int) -> Expected:
    engine = Engine(config, 64)
    request = engine.add("recompute", list(prompt), new_tokens)
    engine.serve(request)
    assert request.first_logits is not None
    assert np.isfinite(request.first_logits).all()
    kv = engine.recorder.kv[request.name, len(prompt)]
    engine.close()
    return Expected(request.output, request.first_logits.tobytes(), kv)


def recomputed(
    prompt: Sequence[int], new_tokens: int = 1, config: ReferenceConfig = SMALL
) -> Expected:
    """What a plain engine without any cache makes of a prompt."""
    return _recomputed(config, tuple(prompt), new_tokens)


def assert_like_a_recompute(engine: Engine, request: Request) -> None:
    """First logits, all new tokens and the KV of the whole prompt, bit for bit."""
    expected = recomputed(request.prompt, request.max_new_tokens, engine.model.config)
    assert request.state is State.FINISHED
    assert request.first_logits is not None
    assert request.first_logits.tobytes() == expected.logits
    assert request.output == expected.output
    assert engine.recorder.kv[request.name, len(request.prompt)] == expected.kv


def new_client(socket: Path, clock: Callable[[], float] | None = None, **settings: Any) -> Client:
    settings = {"suspect_after_ms": 5_000, "lookup_timeout_ms": 5_000, **settings}
    options: dict[str, Any] = {"clock": clock} if clock else {}
    return Client(ClientSettings(socket=socket, **settings), HostWorkerDevice(), "test", **options)


def assert_everything_is_given_back(engine: Engine) -> None:
    """No request, block, slot or page is left with anybody once all transfers are over."""
    client = engine.client
    assert client is not None
    assert not engine.scheduler.requests
    engine.step_until_drained()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert client.quarantined == 0
    if client._link is not None and (transfers := client._link.transfers) is not None:
        engine.step_until(lambda: transfers.is_idle)
        assert len(transfers._free_slots) == transfers.slots


def populate(engine: Engine, prompt: Sequence[int]) -> None:
    """Serve a prompt once, so that the server holds its full chunks."""
    request = engine.add("populate", list(prompt), policy=WholePolicy())
    engine.serve(request)
    engine.step_until_drained()


def hit(
    engine: Engine,
    prompt: Sequence[int] = PROMPT,
    policy: ReleasePolicy = LAYER_BY_LAYER,
    new_tokens: int = 1,
) -> Request:
    """Serve a request and check that it is bit for bit what a recompute gives."""
    request = engine.add("hit", list(prompt), new_tokens, policy)
    engine.serve(request)
    assert_like_a_recompute(engine, request)
    return request


def pass_slices_layer_by_layer(engine: Engine, server: ServerThread, first: int) -> None:
    """In the next step, let slice `l` pass once layer `l` is there; `first` slices have passed."""

    def let_pass(layer: int) -> None:
        if layer >= first:
            server.device.retrieves.wait_until_held()
            server.device.retrieves.let_pass(1)
        if layer == engine.model.config.layers - 1:
            engine.before_layer = _nothing

    engine.before_layer = let_pass


def _nothing(_: int) -> None:
    pass


def state_of(request: Request) -> State:
    """Its state now; a type checker does not remember it."""
    return request.state


def release_first_slice(engine: Engine, server: ServerThread, request: Request) -> None:
    """Let one slice of a request's held retrieve pass; return when the request is released."""
    server.device.retrieves.wait_until_held()
    server.device.retrieves.let_pass(1)
    engine.step_until(lambda: request.state is State.RUNNING)
    server.device.retrieves.wait_until_held()
    assert request.gate is not None
    assert not request.gate.is_settled
    assert request.gate.retrieve.landed_slices == 1


def assert_never_written_again(engine: Engine, blocks: Sequence[int]) -> None:
    """These blocks are the engine's: what it puts there stays."""
    engine.memory.poison(blocks)
    hit(engine)  # the lane has gone on to another retrieve
    table = engine.recorder.tables["hit"]
    for layer in range(engine.model.config.layers):
        untouched = [block for block in blocks if block not in table]
        assert np.isnan(engine.memory.keys(layer)[untouched]).all()
        assert np.isnan(engine.memory.values(layer)[untouched]).all()
