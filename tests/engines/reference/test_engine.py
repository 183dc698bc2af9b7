"""The reference engine on a real server: whatever happens to a hit, its bits are a recompute's.

KV memory is all NaN before an engine begins, so a page that is read before its bytes are there
shows in the logits. Where a test holds slices at the valve, the engine's own hook lets them pass
one by one, each only after the layer before it has been computed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.board import TransferStatus
from lamina.client import Client, FixedPolicy, ReleasePolicy, WholePolicy
from lamina.devices.host import HostWorkerDevice
from lamina.engines.reference.config import FloatArray, ReferenceConfig
from lamina.engines.reference.engine import ReferenceEngine
from lamina.engines.reference.kv_memory import KVMemory
from lamina.engines.reference.model import LayerHook, ReferenceModel, Span
from lamina.engines.reference.request import Request, State
from lamina.errors import DeviceError
from lamina.settings import ClientSettings
from tests.support.server import ServerProcess, ServerThread
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
    """Notes the last logits of every span and the block table it was computed with."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__(config)
        self.logits: dict[tuple[str, int], bytes] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed_tokens = 0

    def forward(
        self,
        spans: Sequence[Span],
        memory: KVMemory,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> FloatArray:
        rows = super().forward(spans, memory, before_layer, after_layer)
        for span, row in zip(spans, rows, strict=True):
            self.logits[span.request, span.end] = row.tobytes()
            self.tables[span.request] = [int(block) for block in span.block_ids]
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
        eventually(lambda: self.step() or all(request.is_over for request in requests), 60)
        eventually(lambda: all(r.is_over for r in requests) or (self.step() and False), 60)

    def step_until(self, condition: Callable[[], object]) -> None:
        eventually(lambda: condition() or (self.step() and condition()))

    def kv(self, request: Request, tokens: int) -> bytes:
        """K and V of a request's first tokens in all layers, from the pages it used last."""
        blocks = self.recorder.tables[request.name][: -(-tokens // BLOCK)]
        return b"".join(
            pages[blocks].reshape(-1, *pages.shape[2:])[:tokens].tobytes()
            for layer in range(self.model.config.layers)
            for pages in (self.memory.keys(layer), self.memory.values(layer))
        )


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
    kv = engine.kv(request, len(prompt))
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
    assert engine.kv(request, len(request.prompt)) == expected.kv


@pytest.fixture(scope="module")
def cache_server() -> Iterator[ServerThread]:
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        server = ServerThread(Path(directory) / "run" / "s", arena_bytes=8 << 20)
        yield server
        server.stop()


@pytest.fixture
def cache(cache_server: ServerThread) -> Iterator[ServerThread]:
    """The module's server; nothing of the test before is left in it but its chunks."""
    yield cache_server
    cache_server.device.loads.open()
    cache_server.device.stores.open()


@pytest.fixture
def make_engine(cache: ServerThread) -> Iterator[Callable[..., Engine]]:
    """Engines on the module's server; at the end each must have got everything back."""
    engines: list[Engine] = []

    def make(
        config: ReferenceConfig = SMALL,
        num_blocks: int = 64,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> Engine:
        client = new_client(cache.settings.socket, clock=clock)
        engines.append(Engine(config, num_blocks, client=client, **options))
        client.connect()
        return engines[-1]

    yield make
    cache.device.loads.open()
    cache.device.stores.open()
    for engine in engines:
        assert_everything_is_given_back(engine)
        engine.close()
    eventually(lambda: cache.gauges()["pins"] == cache.gauges()["leases"] == 0)
    assert cache.gauges()["queued_transfers"] == 0


def new_client(
    socket: Path, clock: Callable[[], float] | None = None, **settings: Any
) -> Client:
    settings = {"suspect_after_ms": 5_000, "lookup_timeout_ms": 5_000, **settings}
    options: dict[str, Any] = {"clock": clock} if clock else {}
    return Client(ClientSettings(socket=socket, **settings), HostWorkerDevice(), "test", **options)


def assert_everything_is_given_back(engine: Engine) -> None:
    """No request, block, slot or page is left with anybody once all transfers are over."""
    assert not engine.scheduler.requests
    assert engine.store is not None
    eventually(lambda: engine.store is None or engine.store.reap() or engine.store.is_idle)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.client is not None
    assert engine.client.quarantined == 0
    link = engine.client._link
    if link is not None and link.transfers is not None:
        assert not link.transfers.retrieves
        assert len(link.transfers._free_slots) == link.board.slots


@pytest.fixture
def populated(cache: ServerThread, make_engine: Callable[..., Engine]) -> ServerThread:
    """The server holds the chunks of `PROMPT`."""
    populate(make_engine(), PROMPT)
    return cache


def populate(engine: Engine, prompt: Sequence[int]) -> None:
    """Serve a prompt once, so that the server holds its full chunks."""
    request = engine.add("populate", list(prompt), policy=WholePolicy())
    engine.serve(request)
    engine.drain()


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
    """Let slice `l` pass only once the step has come to layer `l`; `first` slices have passed."""

    def let_pass(layer: int) -> None:
        if layer >= first:
            server.device.loads.wait_until_held()
            server.device.loads.let_pass(1)

    engine.before_layer = let_pass


def release_first_slice(engine: Engine, server: ServerThread, request: Request) -> None:
    """Let one slice of a request's held retrieve pass; return when the request is released."""
    server.device.loads.wait_until_held()
    server.device.loads.let_pass(1)
    engine.step_until(lambda: request.state is State.RUNNING)
    server.device.loads.wait_until_held()
    assert request.gate is not None
    assert not request.gate.is_settled
    assert request.gate.retrieve.landed_slices == 1


# The output depends on every block of a hit.


@pytest.fixture(scope="module")
def stored_pages(cache_server: ServerThread) -> Callable[[int, int], int]:
    """Address in the server's arena of the page of (layer, block of `PROMPT`)."""
    client = new_client(cache_server.settings.socket)
    engine = Engine(SMALL, 64, client=client)
    client.connect()
    request = engine.add("populate", list(PROMPT), policy=WholePolicy())
    keys = list(engine.store._chains[request].keys) if engine.store else []
    engine.serve(request)
    engine.drain()
    engine.close()
    chunks = cache_server.on_loop(lambda: cache_server.server.index.find(keys))
    assert len(chunks) == CHUNKS
    per_chunk = CHUNK // BLOCK

    def address(layer: int, block: int) -> int:
        chunk, within = divmod(block, per_chunk)
        return chunks[chunk].address + (layer * per_chunk + within) * SMALL.page_bytes

    return address


@pytest.mark.parametrize("layer", range(SMALL.layers))
@pytest.mark.parametrize("block", range(HIT_BLOCKS))
def test_one_byte_of_any_stored_page_changes_the_logits_of_a_hit(
    make_engine: Callable[..., Engine],
    stored_pages: Callable[[int, int], int],
    block: int,
    layer: int,
) -> None:
    """The sign of one element of the page's first K: the float stays finite."""
    byte = ctypes.c_uint8.from_address(stored_pages(layer, block) + 4 * 5 + 3)
    byte.value ^= 0x80
    try:
        engine = make_engine()
        request = engine.add("altered", list(PROMPT), policy=LAYER_BY_LAYER)
        engine.serve(request)
    finally:
        byte.value ^= 0x80
    assert request.hit_tokens == HIT
    assert request.first_logits is not None
    assert np.isfinite(request.first_logits).all()
    assert request.first_logits.tobytes() != recomputed(PROMPT).logits
