"""Many requests at once: shared prefixes, aborts, preemption."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.gpu.vllm.checks import (
    IS_EXACT,
    Reference,
    check_same,
    made,
    with_wide_margin,
)
from tests.gpu.vllm.engine import GpuEngine, ValvedServer
from tests.vllm.engine import CHUNK_TOKENS, Answer, random_tokens


@pytest.fixture(scope="module")
def crowd(the_engine: GpuEngine) -> dict[str, Reference]:
    """16 prompts on 4 stored prefixes."""
    the_engine.forget()
    found = {}
    for base in range(4):
        head = random_tokens(3 * CHUNK_TOKENS, 18, base)

        make = made(40, 19, base, after=tuple(head))
        picked = with_wide_margin(the_engine, 4, make, 3 * CHUNK_TOKENS, 4)
        found.update({f"r{base}.{tail}": answer for tail, answer in enumerate(picked)})
    return found


def test_16_requests_with_shared_prefixes(
    engine: GpuEngine, crowd: dict[str, Reference], mode: dict[str, Any]
) -> None:
    for name, expected in crowd.items():
        engine.add(name, expected.prompt, 4, store=False, **mode)
    answers = engine.run()
    assert answers.keys() == crowd.keys()
    for name, answer in answers.items():
        check_same(answer, crowd[name].answer)
        assert answer.cached == 3 * CHUNK_TOKENS


def test_aborts_at_any_step(
    engine: GpuEngine, server: ValvedServer, crowd: dict[str, Reference], mode: dict[str, Any]
) -> None:
    """Requests come and go in every state; those that stay are answered right."""
    rng = random.Random(str(mode))
    server.retrieves(0.3)
    coming = [f"{name}/{turn}" for turn in range(2) for name in crowd]
    rng.shuffle(coming)
    alive: list[str] = []
    answers: dict[str, Answer] = {}
    while coming or not engine.is_answered:
        for _ in range(min(len(coming), rng.choice([0, 1, 1, 3]))):
            name = coming.pop()
            engine.add(name, crowd[name.split("/")[0]].prompt, 4, **mode)
            alive.append(name)
        if alive and rng.random() < 0.3:
            engine.abort(alive.pop(rng.randrange(len(alive))))
        engine.step()
        answers.update(engine.answers)
        alive = [name for name in alive if name not in answers]
        engine.answers.clear()
    engine.run()
    finished = {n: a for n, a in answers.items() if a.reason == "length"}
    assert len(finished) >= len(crowd) // 2
    for name, answer in finished.items():
        check_same(answer, crowd[name.split("/")[0]].answer)
    assert {answer.reason for answer in answers.values()} <= {"length", "abort"}


def test_preemption(engine: GpuEngine, mode: dict[str, Any]) -> None:
    """Too few blocks for all: some requests lose theirs and come back, to a hit of their own.

    Their answers are long, so the order of additions may change a token; what must not happen is
    that a request reads another's KV: its first tokens are its own.
    """
    grown = 64
    picked = {
        f"r{number}": with_wide_margin(engine, 1, made(150, 20, number), 128, 4)[0]
        for number in range(4)
    }
    engine.forget()
    need = [-(-(150 + extra) // engine.block_tokens) * 4 for extra in (0, grown)]
    give_back = engine.occupy_all_but(sum(need) // 2)
    try:
        for name, expected in picked.items():
            engine.add(name, expected.prompt, grown, **mode)
        answers = engine.run()
    finally:
        give_back()
    assert engine.preempted, "there was room for all"
    for name, expected in picked.items():
        assert answers[name].reason == "length"
        assert len(answers[name].tokens) == grown
        compared = 4 if IS_EXACT else 1
        assert answers[name].tokens[:compared] == expected.answer.tokens[:compared]
