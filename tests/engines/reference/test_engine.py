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
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.board import TransferStatus
from lamina.client import Client, FixedPolicy, Gate, ReleasePolicy, WholePolicy
from lamina.devices.host import HostWorkerDevice
from lamina.engines.reference.config import FloatArray, ReferenceConfig
from lamina.engines.reference.engine import ReferenceEngine
from lamina.engines.reference.kv_memory import KVMemory
from lamina.engines.reference.model import LayerHook, ReferenceModel, Span
from lamina.engines.reference.request import Request, State
from lamina.errors import DeviceError
from lamina.settings import ClientSettings
from tests.support.server import ServerProcess, ServerThread
from tests.support.wait import PATIENCE_S, eventually

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
        self.step_until(lambda: self.store is None or self.store.is_idle)


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
    try:
        for engine in engines:
            assert_everything_is_given_back(engine)
    finally:
        for engine in engines:
            engine.close()
    eventually(lambda: cache.gauges()["pins"] == cache.gauges()["leases"] == 0)
    assert cache.gauges()["queued_transfers"] == 0


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
        assert len(transfers._free_slots) == client._link.board.slots


@pytest.fixture
def populated(cache: ServerThread, make_engine: Callable[..., Engine]) -> ServerThread:
    """The server holds the chunks of `PROMPT`."""
    populate(make_engine(), PROMPT)
    return cache


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
            server.device.loads.wait_until_held()
            server.device.loads.let_pass(1)
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
    engine.step_until_drained()
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


# A hit is a recompute, bit for bit.


@pytest.mark.parametrize(
    "policy",
    [
        WholePolicy(),
        FixedPolicy(1),
        FixedPolicy(2),
        FixedPolicy(3),
        FixedPolicy(4),
        FixedPolicy(1, release_after_slices=2),
        FixedPolicy(1, release_after_slices=4),
        FixedPolicy(1, release_after_slices=0),
        FixedPolicy(3, release_after_slices=0),
        FixedPolicy(4, release_after_slices=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("planes", [1, 2])
def test_every_width_and_release_gives_the_bits_of_a_recompute(
    make_engine: Callable[..., Engine], planes: int, policy: ReleasePolicy
) -> None:
    config = dataclasses.replace(SMALL, planes=planes)
    populate(make_engine(config), PROMPT)
    engine = make_engine(config)
    request = hit(engine, policy=policy, new_tokens=3)
    assert request.hit_tokens == HIT
    assert engine.recorder.computed_tokens == len(PROMPT) - HIT + 2


@pytest.mark.parametrize("width", [1, 5, 16])
def test_a_model_of_16_layers(make_engine: Callable[..., Engine], width: int) -> None:
    config = dataclasses.replace(SMALL, layers=16)
    populate(make_engine(config), PROMPT)
    request = hit(make_engine(config), policy=FixedPolicy(width), new_tokens=2)
    assert request.hit_tokens == HIT


@pytest.mark.parametrize("policy", [LAYER_BY_LAYER, SYNCHRONOUS], ids=str)
def test_each_layer_is_computed_as_soon_as_its_slice_has_landed_and_no_sooner(
    populated: ServerThread, make_engine: Callable[..., Engine], policy: FixedPolicy
) -> None:
    engine = make_engine()
    populated.device.loads.close()
    request = engine.add("hit", PROMPT, policy=policy)
    if policy.release_after_slices:
        engine.step_until(lambda: request.state is State.LOADING)
        release_first_slice(engine, populated, request)
    landed_at_layer: list[int] = []

    def note(layer: int) -> None:
        assert request.gate is not None
        landed_at_layer.append(request.gate.retrieve.landed_slices)

    engine.after_wait = note
    pass_slices_layer_by_layer(engine, populated, first=policy.release_after_slices)
    engine.serve(request)
    assert_like_a_recompute(engine, request)
    assert landed_at_layer == [1, 2, 3, 4], "a layer began late, or before its slice"


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_full_hit_leaves_the_last_block_to_compute(
    populated: ServerThread, make_engine: Callable[..., Engine], chunks: int
) -> None:
    engine = make_engine()
    request = hit(engine, SHARED[: chunks * CHUNK], new_tokens=2)
    assert request.hit_tokens == chunks * CHUNK - BLOCK


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 127, 128, 129, 255, 256])
def test_a_prompt_hits_the_chunks_that_it_shares_whole_and_not_a_token_more(
    populated: ServerThread, make_engine: Callable[..., Engine], shared: int
) -> None:
    tail = [(token + 1) % SMALL.vocab for token in PROMPT[shared:]]
    request = hit(make_engine(), PROMPT[:shared] + tail)
    assert request.hit_tokens == shared // CHUNK * CHUNK


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 66, 80, 81, 128, 129, 257])
def test_a_prompt_of_any_length_hits_whole_blocks_below_its_last_token(
    populated: ServerThread, make_engine: Callable[..., Engine], length: int
) -> None:
    request = hit(make_engine(), PROMPT[:length])
    assert request.hit_tokens == min(length // CHUNK * CHUNK, (length - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("own", [1, 16, 79, 80, 200, 255])
def test_only_what_the_engine_does_not_hold_itself_is_loaded(
    populated: ServerThread, make_engine: Callable[..., Engine], own: int
) -> None:
    engine = make_engine()
    engine.serve(engine.add("own", PROMPT[:own]))
    request = hit(engine)
    assert request.hit_tokens == HIT - own // BLOCK * BLOCK


def test_what_the_engine_holds_itself_is_not_loaded_and_its_lease_ends(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    first = hit(engine)
    retrieves = populated.totals()["retrieves"]
    second = engine.add("again", PROMPT, 9, LAYER_BY_LAYER)
    engine.step_until(lambda: second.state is State.RUNNING)
    eventually(lambda: populated.gauges()["leases"] == 0)
    engine.serve(second)
    assert_like_a_recompute(engine, second)
    assert (first.hit_tokens, second.hit_tokens) == (HIT, 0)
    assert populated.totals()["retrieves"] == retrieves


@pytest.mark.parametrize("max_step_tokens", [1, 17, 43, 64])
def test_chunked_prefill_of_a_hit_and_of_a_miss(
    populated: ServerThread, make_engine: Callable[..., Engine], max_step_tokens: int
) -> None:
    engine = make_engine(max_step_tokens=max_step_tokens)
    hit(engine, new_tokens=2)
    miss = engine.add("miss", tokens_of(150, seed=3), 2, LAYER_BY_LAYER)
    engine.serve(miss)
    assert_like_a_recompute(engine, miss)


def test_generated_tokens_are_stored_and_hit_like_a_prompt(
    make_engine: Callable[..., Engine],
) -> None:
    first = make_engine()
    prompt = tokens_of(CHUNK - 3, seed=4)
    request = first.add("first", prompt, CHUNK + 10, WholePolicy())
    first.serve(request)
    first.step_until_drained()
    conversation = prompt + request.output
    second = hit(make_engine(), conversation, new_tokens=2)
    assert second.hit_tokens == 2 * CHUNK - BLOCK * (len(conversation) == 2 * CHUNK)


@pytest.mark.parametrize("num_blocks", [32, 200])
def test_requests_that_share_prefixes_run_beside_each_other(
    populated: ServerThread, make_engine: Callable[..., Engine], num_blocks: int
) -> None:
    """Some hit, some share blocks that are being loaded, some miss, some have to wait."""
    engine = make_engine(num_blocks=num_blocks, max_step_tokens=100)
    prompts = [
        PROMPT,
        PROMPT,
        SHARED[:200] + tokens_of(70, seed=5),
        SHARED[:128],
        tokens_of(130, seed=6),
        PROMPT[:299],
    ]
    policies: list[ReleasePolicy | None] = [
        LAYER_BY_LAYER,
        WholePolicy(),
        FixedPolicy(2),
        SYNCHRONOUS,
        FixedPolicy(3),
        None,
    ]
    requests = [
        engine.add(f"r{number}", prompt, 4, policy)
        for number, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))
    ]
    engine.serve(*requests)
    for request in requests:
        assert_like_a_recompute(engine, request)


# Blocks that are still being loaded.


def test_a_sharer_of_draining_blocks_waits_for_their_slices(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.loads.close()
    owner = engine.add("owner", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: owner.state is State.LOADING)
    release_first_slice(engine, populated, owner)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)
    pass_slices_layer_by_layer(engine, populated, first=1)
    tables: list[tuple[list[int], list[int]]] = []
    engine.after_wait = lambda layer: tables.append((owner.blocks[:], sharer.blocks[:]))
    engine.serve(owner, sharer)
    owners, sharers = tables[0]
    assert sharers[:HIT_BLOCKS] == owners[:HIT_BLOCKS], "it did not share: nothing was tested"
    assert sharer.gate is None
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)


def test_a_sharer_of_a_synchronous_load_waits_in_the_same_step(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.loads.close()
    owner = engine.add("owner", PROMPT, policy=SYNCHRONOUS)
    assert owner.lookup is not None
    owner.lookup.wait(20)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)
    pass_slices_layer_by_layer(engine, populated, first=0)
    engine.step()
    assert (owner.state, sharer.computed_tokens) == (State.FINISHED, HIT + 20)
    engine.serve(sharer)
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)


def test_a_sharer_fails_with_the_retrieve_of_its_blocks_and_recomputes(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.loads.close()
    owner = engine.add("owner", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: owner.state is State.LOADING)
    release_first_slice(engine, populated, owner)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)

    def break_the_link(layer: int) -> None:
        if layer == 2:
            populated.device.loads.fail_next(DeviceError("the link broke", "Mend it"))
        if 0 < layer <= 2:
            populated.device.loads.let_pass(1)

    engine.before_layer = break_the_link
    engine.step()
    assert (owner.computed_tokens, sharer.computed_tokens) == (0, 0), "their tokens are void"
    populated.device.loads.open()
    engine.serve(owner, sharer)
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)
    assert (owner.failures, sharer.failures) == (1, 0)


# Preemption.


def test_requests_preempted_by_a_small_pool_end_like_a_recompute(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(num_blocks=13)
    prompts = [tokens_of(90, seed=8), tokens_of(90, seed=9)]
    preempted: set[str] = set()
    requests = [
        engine.add(f"r{number}", prompt, 20, LAYER_BY_LAYER)
        for number, prompt in enumerate(prompts)
    ]

    def note(_: int) -> None:
        preempted.update(r.name for r in requests if r.state is State.PREEMPTED)

    engine.before_layer = note
    engine.serve(*requests)
    assert preempted, "the pool was large enough: nothing was tested"
    for request in requests:
        assert_like_a_recompute(engine, request)


def test_a_request_preempted_while_draining_leaves_no_block_that_is_still_written(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """A running request grows into the last blocks just as a released one begins to drain."""
    grower_prompt = tokens_of(5 * BLOCK - 2, seed=10)
    needed = -(-len(PROMPT) // BLOCK)
    engine = make_engine(num_blocks=5 + needed)
    grower = engine.add("grower", grower_prompt, 4)
    engine.step()  # its prompt fills its blocks but for two tokens
    populated.device.loads.close()
    victim = engine.add("victim", PROMPT, policy=LAYER_BY_LAYER)
    assert victim.lookup is not None
    victim.lookup.wait(20)
    engine.step()
    assert state_of(victim) is State.LOADING
    blocks = victim.blocks[:HIT_BLOCKS]
    gate = victim.gate
    assert gate is not None
    populated.device.loads.wait_until_held()
    populated.device.loads.let_pass(1)
    eventually(lambda: gate.is_released)
    populated.device.loads.wait_until_held()
    engine.step()
    assert (state_of(victim), len(grower.output)) == (State.RUNNING, 3)
    assert not gate.is_settled
    engine.step()
    assert victim.state is not State.RUNNING, "it was not preempted: nothing was tested"
    assert not set(blocks) & set(grower.blocks), "blocks were given away before their end"
    assert engine.pool.num_free < engine.pool.num_blocks - len(grower.blocks)
    populated.device.loads.open()
    engine.serve(grower, victim)
    assert_like_a_recompute(engine, grower)
    assert_like_a_recompute(engine, victim)


# Abort, in every state.


def assert_never_written_again(engine: Engine, blocks: Sequence[int]) -> None:
    """These blocks are the engine's: what it puts there stays."""
    engine.memory.poison(blocks)
    hit(engine)  # the lane has gone on to another retrieve
    table = engine.recorder.tables["hit"]
    for layer in range(engine.model.config.layers):
        untouched = [block for block in blocks if block not in table]
        assert np.isnan(engine.memory.keys(layer)[untouched]).all()
        assert np.isnan(engine.memory.values(layer)[untouched]).all()


def test_abort_while_waiting_for_the_lookup(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    assert state_of(request) is State.WAITING
    engine.abort(request)
    assert state_of(request) is State.ABORTED
    eventually(lambda: populated.gauges()["leases"] == 0)
    hit(engine)


def test_abort_while_waiting_for_blocks_with_a_lease(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(num_blocks=20)
    running = engine.add("running", tokens_of(60, seed=11), 30)
    engine.step()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    assert request.lookup is not None
    request.lookup.wait(20)
    engine.step()
    assert request.state is State.WAITING
    assert populated.gauges()["leases"] == 1
    engine.abort(request)
    eventually(lambda: populated.gauges()["leases"] == 0)
    engine.serve(running)
    assert_like_a_recompute(engine, running)
    hit(engine)


@pytest.mark.parametrize("landed", [0, 1])
def test_abort_while_loading(
    populated: ServerThread, make_engine: Callable[..., Engine], landed: int
) -> None:
    engine = make_engine(num_blocks=40)
    populated.device.loads.close()
    policy = FixedPolicy(1, release_after_slices=3)
    request = engine.add("aborted", PROMPT, policy=policy)
    engine.step_until(lambda: request.state is State.LOADING)
    for _ in range(landed):
        populated.device.loads.wait_until_held()
        populated.device.loads.let_pass(1)
    populated.device.loads.wait_until_held()
    abort_while_held(engine, populated, request)


def test_abort_while_running_and_draining(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """The blocks are in the engine's own prefix cache by then, and must leave it."""
    engine = make_engine(num_blocks=40)
    populated.device.loads.close()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.LOADING)
    release_first_slice(engine, populated, request)
    abort_while_held(engine, populated, request)


def abort_while_held(engine: Engine, server: ServerThread, request: Request) -> None:
    """Abort a request whose next slice is held; its blocks are free when that has ended."""
    assert request.gate is not None
    blocks, retrieve = request.blocks[:HIT_BLOCKS], request.gate.retrieve
    engine.abort(request)
    assert engine.pool.num_free == engine.pool.num_blocks - HIT_BLOCKS
    neighbour = engine.add("neighbour", tokens_of(100, seed=12))
    engine.serve(neighbour)
    assert_like_a_recompute(engine, neighbour)
    assert not set(engine.recorder.tables["neighbour"]) & set(blocks)
    assert not retrieve.is_over
    server.after_reading(server.device.loads.open)
    engine.step_until_drained()
    assert retrieve.outcome is TransferStatus.CANCELLED
    assert engine.pool.num_free == engine.pool.num_blocks
    assert_never_written_again(engine, blocks)


def test_abort_while_decoding_and_while_its_chunks_are_being_stored(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.stores.close()
    request = engine.add("aborted", tokens_of(150, seed=13), 50, LAYER_BY_LAYER)
    engine.step_until(lambda: len(request.output) == 3)
    populated.device.stores.wait_until_held()
    engine.abort(request)
    assert engine.pool.num_free == engine.pool.num_blocks - 2 * CHUNK // BLOCK
    populated.device.stores.open()
    engine.step_until_drained()
    assert engine.pool.num_free == engine.pool.num_blocks
    again = make_engine()
    request = hit(again, tokens_of(150, seed=13))
    assert request.hit_tokens == 2 * CHUNK


def test_abort_while_preempted(populated: ServerThread, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    request = engine.add("aborted", PROMPT, 9, LAYER_BY_LAYER)
    engine.step_until(lambda: len(request.output) == 2)
    engine.scheduler.preempt(request)
    assert request.state is State.PREEMPTED
    engine.abort(request)
    eventually(lambda: populated.gauges()["leases"] == 0)
    hit(engine)


def test_a_finished_request_holds_nothing(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    request = hit(engine, new_tokens=3)
    assert (request.blocks, request.gate, request.lookup) == ([], None, None)
    engine.step_until_drained()
    assert engine.pool.num_free == engine.pool.num_blocks
    eventually(lambda: populated.gauges()["pins"] == populated.gauges()["leases"] == 0)


def test_drain_ends_after_an_abort(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.loads.close()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.LOADING)
    populated.device.loads.wait_until_held()
    engine.abort(request)
    populated.after_reading(populated.device.loads.open)
    draining = threading.Thread(target=engine.drain, daemon=True)
    draining.start()
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert engine.pool.num_free == engine.pool.num_blocks


# Failed retrieves.


def assert_bad_blocks_are_gone(engine: Engine, blocks: Sequence[int]) -> None:
    """No later request finds what a failed retrieve left behind."""
    engine.step_until_drained()
    for number, prompt in enumerate([PROMPT, SHARED[:128] + tokens_of(9, seed=14)]):
        request = engine.add(f"later{number}", prompt, policy=LAYER_BY_LAYER)
        engine.serve(request)
        assert_like_a_recompute(engine, request)


@pytest.mark.parametrize("policy", [LAYER_BY_LAYER, WholePolicy(), SYNCHRONOUS], ids=str)
def test_a_failed_copy_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine], policy: ReleasePolicy
) -> None:
    engine = make_engine()
    populated.device.loads.fail_next(DeviceError("the link broke", "Mend it"))
    request = hit(engine, policy=policy)
    assert request.failures == 1
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def has_landed(gate: Gate, slices: int) -> bool:
    return gate.retrieve.landed_slices == slices


@pytest.mark.parametrize("slices", [0, 1, 2, 3])
@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_failed_slice_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine], slices: int, is_acknowledged: bool
) -> None:
    """`slices` land, the next one fails; the engine sees the count alone, or the reply as well."""
    engine = make_engine()
    loads = populated.device.loads
    loads.close()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.LOADING)
    gate = request.gate
    assert gate is not None
    for landed in range(slices):
        loads.wait_until_held()
        loads.let_pass(1)
        eventually(functools.partial(has_landed, gate, landed + 1))
    if slices:
        engine.step_until(lambda: request.state is State.RUNNING)
    loads.wait_until_held()
    before = populated.totals()["retrieves"]
    loads.fail_next(DeviceError("the link broke", "Mend it"))
    loads.let_pass(1)
    eventually(lambda: gate.retrieve.outcome is TransferStatus.COPY_FAILED)
    if is_acknowledged:
        eventually(lambda: populated.totals()["retrieves"] > before)
    loads.open()
    engine.serve(request)
    assert request.failures == 1
    assert_like_a_recompute(engine, request)
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def test_a_lease_that_ran_out_while_the_request_waited_for_blocks_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(num_blocks=20)
    running = engine.add("running", tokens_of(60, seed=11), 5)
    engine.step()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    assert request.lookup is not None
    request.lookup.wait(20)
    engine.step()
    assert request.state is State.WAITING
    expire_leases(populated)
    engine.serve(running, request)
    assert request.failures == 1
    assert_like_a_recompute(engine, request)
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def expire_leases(server: ServerThread) -> None:
    def expire() -> int:
        server.clock_s += server.settings.lease_ttl_s
        return server.server.leases.expire()

    assert server.on_loop(expire)


@pytest.mark.parametrize("slices", [0, 1])
def test_a_retrieve_past_its_deadline_ends_in_recompute_on_other_blocks(
    populated: ServerThread, make_engine: Callable[..., Engine], slices: int
) -> None:
    """A slow server may still write: the blocks stay quarantined until it has answered."""
    clock_s = 0.0
    engine = make_engine(clock=lambda: clock_s)
    client = engine.client
    assert client is not None
    populated.device.loads.close()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.LOADING)
    if slices:
        release_first_slice(engine, populated, request)
    populated.device.loads.wait_until_held()
    blocks = request.blocks[:HIT_BLOCKS]
    assert request.gate is not None
    retrieve = request.gate.retrieve
    clock_s += client.settings.retrieve_timeout_ms / 1000
    engine.serve(request)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert_like_a_recompute(engine, request)
    assert not set(engine.recorder.tables["hit"]) & set(blocks)
    assert client.quarantined == 1
    assert engine.pool.num_free == engine.pool.num_blocks - HIT_BLOCKS
    populated.device.loads.open()
    engine.step_until_drained()
    assert client.quarantined == 0
    assert_never_written_again(engine, blocks)


def test_without_a_free_slot_a_hit_is_recomputed(
    populated: ServerThread, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.client.link.BOARD_SLOTS", 1)
    engine = make_engine()
    populated.device.loads.close()
    first = engine.add("first", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: first.state is State.LOADING)
    populated.device.loads.wait_until_held()
    second = engine.add("second", PROMPT, policy=LAYER_BY_LAYER)
    engine.serve(second)
    assert_like_a_recompute(engine, second)
    assert first.state is State.LOADING
    populated.device.loads.open()
    engine.serve(first)
    assert_like_a_recompute(engine, first)
    assert (first.hit_tokens, second.hit_tokens) == (HIT, 0)


def test_what_is_stored_after_a_failure_is_right(
    cache: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """A request that recomputed stores what it computed, not what the failed retrieve left."""
    prompt = tokens_of(HIT + 2 * CHUNK, seed=15)
    populate(make_engine(), prompt[:HIT])
    engine = make_engine()
    cache.device.loads.fail_next(DeviceError("the link broke", "Mend it"))
    request = engine.add("failed", prompt, policy=LAYER_BY_LAYER)
    engine.serve(request)
    engine.step_until_drained()
    assert request.failures == 1
    later = hit(make_engine(), [*prompt, 1])
    assert later.hit_tokens == HIT + 2 * CHUNK


# Without a server.


def test_without_a_server_requests_are_served_plainly(socket_path: Path) -> None:
    client = new_client(socket_path, reconnect_every_ms=1)
    engine = Engine(SMALL, 64, client=client)
    request = hit(engine)
    assert request.hit_tokens == 0
    server = ServerThread(socket_path, arena_bytes=4 << 20)
    try:
        engine.step_until(lambda: client.is_usable)
        populate(engine, PROMPT)
        other = Engine(SMALL, 64, client=new_client(socket_path))
        other.step_until(lambda: other.client is not None and other.client.is_usable)
        assert hit(other).hit_tokens == HIT, "a server that comes later is used"
        assert_everything_is_given_back(other)
        other.close()
    finally:
        server.stop()
    engine.step_until(lambda: not client.is_usable)
    engine.pool.evict(range(engine.pool.num_blocks))
    assert hit(engine).hit_tokens == 0, "a server that stops is not missed"
    assert_everything_is_given_back(engine)
    engine.close()


def test_a_server_killed_in_mid_retrieve_ends_in_recompute(socket_path: Path) -> None:
    """At 1 MB/s each slice takes 65 ms: the retrieve is under way when its server dies."""
    server = ServerProcess(
        socket_path, "--arena", "16MiB", "--chunk-tokens", str(CHUNK), "--host-link-gbps", "0.001"
    )
    try:
        engine = Engine(SMALL, 64, client=new_client(socket_path, reconnect_every_ms=1))
        engine.step_until(lambda: engine.client is not None and engine.client.is_usable)
        populate(engine, PROMPT[:CHUNK])
        engine.pool.evict(range(engine.pool.num_blocks))
        request = engine.add("hit", PROMPT, 3, LAYER_BY_LAYER)
        engine.step_until(lambda: request.state is State.LOADING)
        gate = request.gate
        server.process.kill()
        engine.serve(request)
        assert gate is not None
        assert gate.retrieve.outcome is TransferStatus.SERVER_DIED
        assert_like_a_recompute(engine, request)
        assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))
        assert_everything_is_given_back(engine)
        engine.close()
    finally:
        server.process.kill()
        server.process.communicate(timeout=20)
