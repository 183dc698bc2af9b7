"""A hit is a recompute, bit for bit, and depends on every byte of every block."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from lamina.client import AutoPolicy, FixedPolicy, ReleasePolicy, WholePolicy
from lamina.server.index import Chunk
from lamina_lab.reference.request import State
from tests.lab.reference.engines import (
    BLOCK,
    CHUNK,
    CHUNKS,
    HIT,
    HIT_BLOCKS,
    LAYER_BY_LAYER,
    PROMPT,
    SHARED,
    SMALL,
    SYNCHRONOUS,
    Engine,
    assert_like_a_recompute,
    hit,
    new_client,
    pass_slices_layer_by_layer,
    populate,
    recomputed,
    release_first_slice,
    tokens_of,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually

# The output depends on every block of a hit.


@pytest.fixture(scope="module")
def stored_pages(cache_server: ServerThread) -> Callable[[int, int], int]:
    """Address in the server's arena of the page of (layer, block of `PROMPT`)."""
    client = new_client(cache_server.settings.socket)
    engine = Engine(SMALL, 64, client=client)
    client.connect()
    request = engine.add("populate", list(PROMPT), policy=WholePolicy())
    assert request.prefix is not None
    keys = list(request.prefix._chain.keys)
    engine.serve(request)
    engine.step_until_drained()

    def found() -> list[Chunk]:
        return cache_server.on_loop(lambda: cache_server.server.index.find(keys))

    # With rings only some time after the engine has its blocks again.
    engine.step_until(lambda: len(found()) == CHUNKS)
    engine.close()
    chunks = found()
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
        AutoPolicy(),
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
    populated.device.retrieves.close()
    request = engine.add("hit", PROMPT, policy=policy)
    if policy.release_after_slices:
        engine.step_until(lambda: request.state is State.RETRIEVING)
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
def test_only_what_the_engine_does_not_hold_itself_is_retrieved(
    populated: ServerThread, make_engine: Callable[..., Engine], own: int
) -> None:
    engine = make_engine()
    engine.serve(engine.add("own", PROMPT[:own]))
    request = hit(engine)
    assert request.hit_tokens == HIT - own // BLOCK * BLOCK


def test_what_the_engine_holds_itself_is_not_retrieved_and_its_lease_ends(
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
    """Some hit, some share blocks that are being retrieved, some miss, some have to wait."""
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
