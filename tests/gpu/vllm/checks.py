"""References from vLLM's own hits, and comparisons with them.

Free pages are full of garbage before every hit, so a page that was not retrieved, or read too
early, shows. Requests alone have the reference's schedule and its tokens; those of a crowd have
them where vLLM computes independently of batches (VLLM_BATCH_INVARIANT=1), and otherwise the same
first token, chosen to win by a wide margin."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.vllm.engine import ON_GPU, GpuEngine
from tests.vllm.engine import CHUNK_TOKENS, Answer, Pages, random_tokens

TOKENS = 6
IS_EXACT = os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1" or not ON_GPU
"""Whether tokens do not depend on what else is in a batch; in float32 they hardly do."""
WIDE_MARGIN = 0.6
"""Another order of bfloat16 additions moves two logarithms of a first token apart by less."""
NEAR = 0.25
"""And one by less than this; other KV moves it by more than 1."""
PLAIN = {"layerwise_overlap": 1, "release_after_slices": 1}
PACE_MS = 4.0
"""A retrieve takes this times its slices: long beside a step."""


class Reference(NamedTuple):
    """What vLLM gives with a hit of its own: the answer, and the pages of the hit."""

    prompt: list[int]
    hit: int
    answer: Answer
    pages: Pages


def reference(engine: GpuEngine, prompt: list[int], hit: int, tokens: int = TOKENS) -> Reference:
    """Store the first `hit` tokens of a prompt, and answer it with a hit of as many."""
    base = prompt[: -(-hit // CHUNK_TOKENS) * CHUNK_TOKENS]
    engine.ask(base, retrieve=False)
    engine.keep_cached(engine.blocks_of["alone"][: hit // engine.block_tokens])
    answer = engine.ask(prompt, tokens, retrieve=False, store=False)
    assert answer.cached == hit
    pages = engine.pages_of("alone", hit)
    engine.forget()
    return Reference(prompt, hit, answer, pages)


def check(engine: GpuEngine, expected: Reference, **mode: Any) -> None:
    """A hit from Lamina, into poisoned pages, gives what vLLM's own gave. By default one layer a
    slice."""
    engine.forget()
    mode = mode or PLAIN
    tokens = len(expected.answer.tokens)
    answer = engine.ask(expected.prompt, tokens, store=False, **mode)
    assert answer.cached == expected.hit
    np.testing.assert_array_equal(engine.pages_of("alone", expected.hit), expected.pages)
    assert answer.tokens == expected.answer.tokens
    check_same(answer, expected.answer)


def check_same(answer: Answer, expected: Answer) -> None:
    """The same tokens; of a batch whose additions come in another order, the same first token.

    It comes from the prefill, which reads what was retrieved; from there on the order decides.
    """
    assert answer.reason == "length"
    assert len(answer.tokens) == len(expected.tokens)
    compared = slice(0, len(expected.tokens) if IS_EXACT else 1)
    assert answer.tokens[compared] == expected.tokens[compared]
    np.testing.assert_allclose(answer.logprobs[compared], expected.logprobs[compared], atol=NEAR)


def with_wide_margin(
    engine: GpuEngine, wanted: int, make: Callable[[int], list[int]], hit: int, tokens: int
) -> list[Reference]:
    """References whose tokens win by far, so that they hold in any batch."""
    found: list[Reference] = []
    for number in range(200 * wanted):
        candidate = reference(engine, make(number), hit, tokens)
        if candidate.answer.margins[0] > WIDE_MARGIN:
            found.append(candidate)
        if len(found) == wanted:
            return found
    raise AssertionError("too few prompts have clear answers")


def made(tokens: int, *seed: int, after: tuple[int, ...] = ()) -> Callable[[int], list[int]]:
    """Prompts by number: `after`, then `tokens` random tokens."""
    return lambda number: [*after, *random_tokens(tokens, *seed, number)]
