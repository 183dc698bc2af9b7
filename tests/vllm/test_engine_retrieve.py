"""Many requests at once: shared prefixes, preemption, aborts. Their tokens stay the right ones.

Batches differ from run to run, so each request is compared with its answer alone, in tokens that
win by a wide margin and in logarithms up to the order of additions.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.vllm.engine import CHUNK_TOKENS, Answer, Engine, random_tokens
from tests.vllm.modes import MODES, in_every_mode

WIDE_MARGIN = 1e-3
"""Another order of additions moves a logarithm by some 1e-5 here."""
Prompts = dict[str, list[int]]


def answers_alone(engine: Engine, prompts: Prompts, tokens: int) -> dict[str, Answer]:
    """What vLLM answers to each by itself, from its own cache; all by a wide margin."""
    answers = {
        name: engine.ask(prompt, tokens, retrieve=False, store=False)
        for name, prompt in prompts.items()
    }
    assert min(answer.margin for answer in answers.values()) > WIDE_MARGIN
    return answers


def check_same(answer: Answer, alone: Answer) -> None:
    assert answer.tokens == alone.tokens
    np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=WIDE_MARGIN / 10)


def sharing_prompts(bases: int, each: int, base_tokens: int, seed: int) -> Prompts:
    """Prompts that share their first `base_tokens` tokens with `each` - 1 others."""
    return {
        f"r{base}.{tail}": random_tokens(base_tokens, seed, base)
        + random_tokens(20 + 7 * tail, seed, base, tail)
        for base in range(bases)
        for tail in range(each)
    }


@pytest.fixture(scope="module")
def crowd(module_engine: Engine) -> tuple[Prompts, dict[str, Answer]]:
    """16 prompts on 4 stored prefixes, and their answers."""
    module_engine.forget()
    prompts = sharing_prompts(4, 4, 3 * CHUNK_TOKENS, seed=20)
    for prompt in prompts.values():
        module_engine.ask(prompt[: 3 * CHUNK_TOKENS], retrieve=False)
    return prompts, answers_alone(module_engine, prompts, 6)


@in_every_mode
def test_16_requests_with_shared_prefixes(
    engine: Engine, crowd: tuple[Prompts, dict[str, Answer]], mode: dict[str, Any]
) -> None:
    prompts, alone = crowd
    for name, prompt in prompts.items():
        engine.add(name, prompt, 6, store=False, **mode)
    answers = engine.run()
    for name, answer in answers.items():
        check_same(answer, alone[name])
        assert answer.cached == 3 * CHUNK_TOKENS
    assert len(answers) == 16


@pytest.fixture(scope="module")
def growing(module_engine: Engine) -> tuple[Prompts, dict[str, Answer]]:
    """4 prompts with stored prefixes, and answers that take one more block each."""
    module_engine.forget()
    prompts = sharing_prompts(4, 1, 2 * CHUNK_TOKENS, seed=21)
    for prompt in prompts.values():
        module_engine.ask(prompt[: 2 * CHUNK_TOKENS], retrieve=False)
    return prompts, answers_alone(module_engine, prompts, 40)


@in_every_mode
def test_preemption(
    engine: Engine, growing: tuple[Prompts, dict[str, Answer]], mode: dict[str, Any]
) -> None:
    """Too few blocks for all: some requests lose theirs and come back, to a hit of their own."""
    prompts, alone = growing
    give_back = engine.occupy_all_but(21)
    try:
        for name, prompt in prompts.items():
            engine.add(name, prompt, 40, **mode)
        answers = engine.run()
    finally:
        give_back()
    assert engine.preempted, "there was room for all"
    for name, answer in answers.items():
        check_same(answer, alone[name])
    assert len(answers) == len(prompts)


@in_every_mode
def test_aborts_at_any_step(
    engine: Engine, crowd: tuple[Prompts, dict[str, Answer]], mode: dict[str, Any]
) -> None:
    """Requests come and go at seeded steps, in every state; those that stay are answered right."""
    prompts, alone = crowd
    rng = random.Random(str(mode))
    coming = [f"{name}/{turn}" for turn in range(3) for name in prompts]
    rng.shuffle(coming)
    alive: list[str] = []
    answers: dict[str, Answer] = {}
    aborted = 0
    while coming or not engine.is_answered:
        for _ in range(min(len(coming), rng.choice([0, 1, 1, 3]))):
            name = coming.pop()
            engine.add(name, prompts[name.split("/")[0]], 6, **mode)
            alive.append(name)
        if alive and rng.random() < 0.4:
            name = alive.pop(rng.randrange(len(alive)))
            engine.abort(name)
            aborted += 1
        engine.step()
        answers.update(engine.answers)
        alive = [name for name in alive if name not in answers]
        engine.answers.clear()
    engine.run()
    assert aborted > 8
    finished = {n: a for n, a in answers.items() if a.reason == "length"}
    assert len(finished) >= len(prompts)
    for name, answer in finished.items():
        check_same(answer, alone[name.split("/")[0]])
    assert {a.reason for a in answers.values()} <= {"length", "abort"}


def test_every_mode_beside_every_other(
    engine: Engine, crowd: tuple[Prompts, dict[str, Answer]]
) -> None:
    """Sharers of one prefix may retrieve it in different ways."""
    prompts, alone = crowd
    modes = list(MODES.values())
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, 6, **modes[number % len(modes)])
        if number % 5 == 0:
            engine.step()
    for name, answer in engine.run().items():
        check_same(answer, alone[name])
