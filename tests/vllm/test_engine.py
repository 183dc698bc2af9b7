"""The real vLLM with hits from Lamina computes what it computes with hits of its own.

First: the tokens depend on the KV, every page of it. Then every scenario is compared with vLLM's
own prefix-cache hit of the same length under the same schedule. Alone, a request's tokens,
logarithms and page bytes are the same bit for bit (`test_engine_retrieve` has the crowds).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.server import ServerThread
from tests.vllm.engine import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    CHUNK_TOKENS,
    POISON,
    Answer,
    Engine,
    Pages,
    random_tokens,
)
from tests.vllm.modes import in_every_mode
from tests.vllm.tiny_llama import LAYERS

PAGE_BYTES = 16_384
BOUNDARIES = [CHUNK_TOKENS * chunk + offset for chunk in range(1, 5) for offset in (-1, 0, 1)]


class Reference(NamedTuple):
    """What vLLM's own hit gives: the answer and the pages of the prompt's full blocks."""

    answer: Answer
    pages: Pages


def own_hit(engine: Engine, stored: list[int], hit: int, prompt: list[int]) -> Reference:
    """Answer `prompt` with a hit of `hit` tokens in vLLM's own cache, on the blocks `stored`."""
    engine.keep_cached(stored[: hit // BLOCK_TOKENS])
    answer = engine.ask(prompt, retrieve=False, store=False)
    assert answer.cached == hit
    return Reference(answer, engine.pages_of("alone", len(prompt)))


def store(engine: Engine, prompt: list[int]) -> list[int]:
    """Compute and store a prompt; returns its blocks, which vLLM's own cache holds too."""
    assert engine.ask(prompt, retrieve=False).cached == 0
    return engine.blocks_of["alone"]


def check_hit(
    engine: Engine, prompt: list[int], hit: int, mode: dict[str, Any], reference: Reference
) -> None:
    """A hit of `hit` tokens from Lamina, into poisoned pages, gives what `reference` gave."""
    engine.forget()
    answer = engine.ask(prompt, store=False, **mode)
    assert answer.cached == hit
    assert answer == reference.answer
    np.testing.assert_array_equal(engine.pages_of("alone", len(prompt)), reference.pages)


def test_tokens_change_with_every_page_and_logarithms_with_a_byte(
    engine: Engine, server: ServerThread
) -> None:
    prompt = random_tokens(300, 1)
    store(engine, prompt)
    chunks = [server.server.index.get(key) for key in engine.keys_of(prompt)]
    engine.forget()
    true = engine.ask(prompt)
    assert true.cached == len(chunks) * CHUNK_TOKENS

    def with_altered(address: int, data: bytes) -> Answer:
        before = ctypes.string_at(address, len(data))
        ctypes.memmove(address, data, len(data))
        engine.forget()
        answer = engine.ask(prompt, store=False)
        ctypes.memmove(address, before, len(data))
        assert answer.cached == true.cached
        return answer

    garbage = np.full(PAGE_BYTES // 4, POISON, np.float32).tobytes()
    for number, chunk in enumerate(chunks):
        assert chunk is not None
        for block in range(BLOCKS_PER_CHUNK):
            layer = (number * BLOCKS_PER_CHUNK + block) % LAYERS
            page = chunk.address + (layer * BLOCKS_PER_CHUNK + block) * PAGE_BYTES
            assert with_altered(page, garbage).tokens != true.tokens
            sign = page + PAGE_BYTES // 2 + 3
            flipped = bytes([ctypes.string_at(sign, 1)[0] ^ 0x80])
            assert with_altered(sign, flipped).logprobs != true.logprobs
    engine.forget()
    assert engine.ask(prompt, store=False) == true


def test_unrelated_prefixes_give_different_tokens(engine: Engine) -> None:
    tail = random_tokens(20, 2)
    answers = [engine.ask(random_tokens(256, 3, i) + tail, store=False) for i in range(8)]
    assert len({tuple(answer.tokens) for answer in answers}) == 8


def test_cold_request_computes_what_vllm_computes_alone(engine: Engine) -> None:
    prompt = random_tokens(300, 4)
    alone = engine.ask(prompt, retrieve=False, store=False)
    pages = engine.pages_of("alone", 300)
    engine.forget()
    assert engine.ask(prompt) == alone
    np.testing.assert_array_equal(engine.pages_of("alone", 300), pages)


def test_salt_is_a_cache_of_its_own(engine: Engine) -> None:
    prompt = random_tokens(130, 5)
    store(engine, prompt)
    for salt, hit in (("one", 0), ("other", 0), ("one", 128), (None, 128)):
        engine.forget()
        assert engine.ask(prompt, salt=salt).cached == hit


@in_every_mode
def test_full_hit(engine: Engine, mode: dict[str, Any]) -> None:
    """At least one token is computed: a hit of all tokens is shortened to whole blocks."""
    prompt = random_tokens(4 * CHUNK_TOKENS, 6)
    stored = store(engine, prompt)
    hit = 4 * CHUNK_TOKENS - BLOCK_TOKENS
    reference = own_hit(engine, stored, hit, prompt)
    check_hit(engine, prompt, hit, mode, reference)


class Case(NamedTuple):
    """A prompt of which the server holds `hit` tokens, and what it must give."""

    prompt: list[int]
    hit: int
    reference: Reference


@pytest.fixture(scope="module")
def boundary_cases(module_engine: Engine) -> list[Case]:
    """Prompts that share their first tokens, about a whole number of chunks, with a stored one."""
    module_engine.forget()
    base = random_tokens(4 * CHUNK_TOKENS + 1, 7)
    stored = store(module_engine, base)
    cases = []
    for shared in reversed(BOUNDARIES):
        prompt = base[:shared] + random_tokens(300 - shared, 8, shared)
        hit = shared // CHUNK_TOKENS * CHUNK_TOKENS
        cases.append(Case(prompt, hit, own_hit(module_engine, stored, hit, prompt)))
    return cases


@in_every_mode
def test_partial_hit_at_every_boundary(
    engine: Engine, boundary_cases: list[Case], mode: dict[str, Any]
) -> None:
    for case in boundary_cases:
        check_hit(engine, case.prompt, case.hit, mode, case.reference)


@in_every_mode
def test_chunked_prefill(
    engine: Engine, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in steps of 96 tokens, across blocks and chunks: stored as it goes, then hit."""
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 96)
    base = random_tokens(4 * CHUNK_TOKENS, 9)
    prompt = base + random_tokens(210, 10)
    stored = store(engine, base)
    reference = own_hit(engine, stored, len(base), prompt)
    check_hit(engine, prompt, len(base), mode, reference)


@in_every_mode
def test_answers_are_reused(engine: Engine, mode: dict[str, Any]) -> None:
    """Chunks of generated tokens are stored too; the last token is not, it was never an input."""
    prompt = random_tokens(100, 11, *mode.values())
    for tokens, hit in ((92, 2 * CHUNK_TOKENS), (93, 3 * CHUNK_TOKENS)):
        engine.forget()
        said = engine.ask(prompt, tokens, retrieve=False)
        stored = engine.blocks_of["alone"]
        follow_up = prompt + said.tokens + random_tokens(30, 12)
        reference = own_hit(engine, stored, hit, follow_up)
        check_hit(engine, follow_up, hit, mode, reference)


def test_reset_of_all_caches_begins_anew(engine: Engine) -> None:
    prompt = random_tokens(130, 13)
    store(engine, prompt)
    engine.forget(connector_too=True)
    assert engine.ask(prompt).cached == 0
    engine.forget()
    assert engine.ask(prompt).cached == 128
