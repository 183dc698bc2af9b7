"""Hits from Lamina on the vLLM that ships: tokens and page bytes against vLLM's own hits.

First the tokens are shown to depend on the KV. Free pages are full of garbage before every hit, so
a page that was not loaded, or read too early, shows. Requests alone have the reference's schedule;
those of a crowd are compared where their tokens win by a wide margin.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.gpu.vllm.engine import Configuration, GpuEngine, ValvedServer, modes
from tests.vllm.engine import CHUNK_TOKENS, Answer, Pages, random_tokens

TOKENS = 6
WIDE_MARGIN = 0.6
"""Another order of bfloat16 additions moves two logarithms apart by less."""
NEAR = 0.25
"""And one by less than this; other KV moves it by more than 1."""
PACE_MS = 4.0
"""A load takes this times its slices: long beside a step."""
MODES = list(modes(1))


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, configuration: Configuration) -> dict[str, Any]:
    return modes(configuration.model.layers)[request.param]


@pytest.fixture(params=[name for name in MODES if name != "whole-async"])
def early_mode(request: pytest.FixtureRequest, configuration: Configuration) -> dict[str, Any]:
    """A mode in which a request runs before all of its slices have landed."""
    return modes(configuration.model.layers)[request.param]


class Reference(NamedTuple):
    """What vLLM gives with a hit of its own: the answer, and the pages of the hit."""

    prompt: list[int]
    hit: int
    answer: Answer
    pages: Pages


def reference(engine: GpuEngine, prompt: list[int], hit: int, tokens: int = TOKENS) -> Reference:
    """Store the first `hit` tokens of a prompt, and answer it with a hit of as many."""
    base = prompt[: -(-hit // CHUNK_TOKENS) * CHUNK_TOKENS]
    engine.ask(base, load=False)
    engine.keep_cached(engine.blocks_of["alone"][: hit // engine.block_tokens])
    answer = engine.ask(prompt, tokens, load=False, store=False)
    assert answer.cached == hit
    pages = engine.pages_of("alone", hit)
    engine.forget()
    return Reference(prompt, hit, answer, pages)


def check(engine: GpuEngine, expected: Reference, **mode: Any) -> None:
    """A hit from Lamina, into poisoned pages, gives what vLLM's own gave."""
    engine.forget()
    tokens = len(expected.answer.tokens)
    answer = engine.ask(expected.prompt, tokens, store=False, **mode)
    assert answer.cached == expected.hit
    np.testing.assert_array_equal(engine.pages_of("alone", expected.hit), expected.pages)
    assert answer.tokens == expected.answer.tokens
    check_same(answer, expected.answer)


def check_same(answer: Answer, expected: Answer) -> None:
    """The same tokens by the same logarithms, up to a token that won by little: after another one
    in its place everything may differ."""
    assert answer.reason == "length"
    assert len(answer.tokens) == len(expected.tokens)
    tie = next(
        (i for i, margin in enumerate(expected.margins) if margin < WIDE_MARGIN), len(answer.tokens)
    )
    same = next(
        (i for i, token in enumerate(answer.tokens) if token != expected.tokens[i]),
        len(answer.tokens),
    )
    assert same >= tie
    compared = slice(0, max(1, same))
    np.testing.assert_allclose(answer.logprobs[compared], expected.logprobs[compared], atol=NEAR)


def with_wide_margin(
    engine: GpuEngine, wanted: int, make: Callable[[int], list[int]], hit: int, tokens: int
) -> list[Reference]:
    """References whose every token wins by far, so that they hold in any batch."""
    found: list[Reference] = []
    for number in range(200 * wanted):
        candidate = reference(engine, make(number), hit, tokens)
        if candidate.answer.margin > WIDE_MARGIN:
            found.append(candidate)
        if len(found) == wanted:
            return found
    raise AssertionError("too few prompts have clear answers")


def made(tokens: int, *seed: int, after: tuple[int, ...] = ()) -> Callable[[int], list[int]]:
    """Prompts by number: `after`, then `tokens` random tokens."""
    return lambda number: [*after, *random_tokens(tokens, *seed, number)]


# First: it would be noticed


def test_the_engine_is_the_one_that_was_asked_for(
    engine: GpuEngine, configuration: Configuration
) -> None:
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    is_async = type(engine.scheduler).__name__ == "AsyncScheduler"
    if configuration.on_gpu:
        is_v2 = type(runner).__module__.startswith("vllm.v1.worker.gpu.")
        assert is_v2 == (configuration.runner == "V2")
        assert is_async == configuration.async_scheduling
        mode = str(engine._llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
        assert "FULL_AND_PIECEWISE" in mode
        assert engine.page_bytes >= 32 << 10


def test_tokens_depend_on_every_stored_page(
    engine: GpuEngine, server: ValvedServer, configuration: Configuration
) -> None:
    prompt = random_tokens(4 * CHUNK_TOKENS + 20, 1)
    expected = reference(engine, prompt, 4 * CHUNK_TOKENS)
    garbage, per_chunk = engine.garbage_page(), CHUNK_TOKENS // engine.block_tokens
    layers = configuration.model.layers
    changed = 0
    pages = [(chunk, block) for chunk in range(4) for block in range(per_chunk)]
    for number, (chunk, block) in enumerate(pages):
        key = engine.keys_of(prompt)[chunk]
        layer = number * 5 % layers
        offset = (layer * per_chunk + block) * engine.page_bytes
        before = server.write(key, offset, garbage)
        engine.forget()
        answer = engine.ask(prompt, TOKENS, store=False)
        assert answer.cached == expected.hit
        assert answer.logprobs != expected.answer.logprobs
        changed += answer.tokens != expected.answer.tokens
        assert server.write(key, offset, before) == garbage
    assert changed >= 0.75 * len(pages)
    check(engine, expected)


def test_a_forward_that_does_not_wait_is_noticed(
    engine: GpuEngine, server: ValvedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its waits a request must end in an error, for it has read garbage."""
    expected = reference(engine, random_tokens(2 * CHUNK_TOKENS + 20, 2), 2 * CHUNK_TOKENS)
    monkeypatch.setattr(engine.worker._worker, "before_layer", lambda name: None)
    server.loads(PACE_MS)
    answer = engine.ask(expected.prompt, store=False, layerwise_overlap=1, release_after_slices=0)
    assert (answer.tokens, answer.reason) == ([], "error")


# Alone


def test_cold_request_computes_what_vllm_computes_alone(engine: GpuEngine) -> None:
    prompt = random_tokens(300, 3)
    alone = engine.ask(prompt, TOKENS, load=False, store=False)
    engine.forget()
    cold = engine.ask(prompt, TOKENS)
    assert cold.cached == 0
    check_same(cold, alone)


def test_full_hit(engine: GpuEngine, mode: dict[str, Any]) -> None:
    """Shortened to whole blocks: at least one token is computed."""
    prompt = random_tokens(4 * CHUNK_TOKENS, 4)
    check(engine, reference(engine, prompt, 4 * CHUNK_TOKENS - engine.block_tokens), **mode)


def test_partial_hit(engine: GpuEngine, mode: dict[str, Any]) -> None:
    for chunks, tail in ((1, 3), (2, 40), (4, 5), (3, 700)):
        prompt = random_tokens(chunks * CHUNK_TOKENS + tail, 5, chunks)
        check(engine, reference(engine, prompt, chunks * CHUNK_TOKENS), **mode)


def test_one_token_tail_in_a_full_graph(
    engine: GpuEngine, server: ValvedServer, mode: dict[str, Any], configuration: Configuration
) -> None:
    """No layer's hook fires in the replay of a full graph; its step waits for all slices first."""
    prompt = random_tokens(4 * CHUNK_TOKENS + 1, 6)
    expected = reference(engine, prompt, 4 * CHUNK_TOKENS)
    engine.hooks_fired.clear()
    server.loads(PACE_MS)
    check(engine, expected, **mode)
    is_early = mode["layerwise_overlap"] == 1 or not mode["release_after_slices"]
    if configuration.on_gpu and is_early:
        assert False in engine.hooks_fired, "no step read an open load in a full graph"


def test_reset_of_all_caches_begins_anew(engine: GpuEngine) -> None:
    expected = reference(engine, random_tokens(130, 7), 128)
    engine.forget(connector_too=True)
    assert engine.ask(expected.prompt, store=False).cached == 0


# Draining


def test_slow_load_is_never_read_early(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    prompt = random_tokens(4 * CHUNK_TOKENS + 50, 8)
    expected = reference(engine, prompt, 4 * CHUNK_TOKENS)
    server.loads(PACE_MS)
    engine.hooks_fired.clear()
    check(engine, expected, **early_mode)
    assert engine.hooks_fired, "no step read an open load"


def test_sharers_of_draining_blocks(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    """Requests that find draining blocks in vLLM's own cache are gated like their owner, with one
    token to compute as well as with many."""
    base = random_tokens(4 * CHUNK_TOKENS, 9)
    hit = len(base)
    tails = (30, 1, 17)
    owner, *sharers = (
        with_wide_margin(engine, 1, made(tail, 10, after=tuple(base)), hit, 4)[0] for tail in tails
    )
    engine.forget()
    server.loads(PACE_MS)
    engine.add("owner", owner.prompt, 4, store=False, **early_mode)
    for number, sharer in enumerate(sharers):
        engine.add(f"sharer{number}", sharer.prompt, 4, load=False, store=False)
    answers = engine.run()
    check_same(answers["owner"], owner.answer)
    for number, sharer in enumerate(sharers):
        check_same(answers[f"sharer{number}"], sharer.answer)


def test_load_lands_beside_decoding_requests(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    steady = reference(engine, random_tokens(70, 11), 64, 12)
    (hit,) = with_wide_margin(engine, 1, made(290, 12), 256, 4)
    engine.forget()
    engine.add("steady", steady.prompt, 12, load=False, store=False)
    engine.step_until(lambda: engine.request("steady").num_output_tokens >= 2)
    server.loads(PACE_MS)
    engine.add("hit", hit.prompt, 4, store=False, **early_mode)
    answers = engine.run()
    check_same(answers["hit"], hit.answer)
    check_same(answers["steady"], steady.answer)


# Failures


def test_slice_that_fails_before_release_is_recomputed(
    engine: GpuEngine, server: ValvedServer
) -> None:
    expected = reference(engine, random_tokens(200, 13), 192)
    alone = engine.ask(expected.prompt, TOKENS, load=False, store=False)
    for width in (1, 3, 0):
        engine.forget()
        server.loads(fails_after=0)
        answer = engine.ask(expected.prompt, TOKENS, store=False, layerwise_overlap=width)
        check_same(answer, alone)
    check(engine, expected)


def test_slice_that_fails_after_release_gives_no_token(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    """Owner and sharers end in an error, or computed what was missing; others go on."""
    (expected,) = with_wide_margin(engine, 1, made(290, 14), 256, 4)
    other = reference(engine, random_tokens(70, 15), 64, 12)
    engine.forget()
    engine.add("other", other.prompt, 12, load=False, store=False)
    engine.step_until(lambda: engine.request("other").num_output_tokens >= 2)
    slices = -(-engine.configuration.model.layers // early_mode["layerwise_overlap"])
    server.loads(PACE_MS, fails_after=slices - 1)
    engine.add("owner", expected.prompt, 4, store=False, **early_mode)
    engine.add("sharer", expected.prompt, 4, load=False, store=False)
    answers = engine.run()
    if not early_mode["release_after_slices"]:
        assert answers["owner"].reason == "error"
    for name in ("owner", "sharer"):
        if answers[name].reason == "error":
            assert answers[name].tokens == []
        else:
            check_same(answers[name], expected.answer)
    check_same(answers["other"], other.answer)
    engine.assert_all_idle(server)
    again = engine.ask(expected.prompt, 4, load=False, store=False)
    check_same(again, expected.answer)  # nothing of the bad blocks is in vLLM's cache
    check(engine, expected)


def test_abort_while_slices_are_on_their_way(
    engine: GpuEngine, server: ValvedServer, mode: dict[str, Any]
) -> None:
    """The blocks are handed out again only once nothing more arrives in them."""
    expected = reference(engine, random_tokens(290, 16), 256)
    victim = random_tokens(290, 17)
    alone = engine.ask(victim, TOKENS, load=False, store=False)
    for steps in (1, 2, 4):
        engine.forget()
        server.loads(PACE_MS)
        engine.add("r", expected.prompt, store=False, **mode)
        for _ in range(steps):
            engine.step()
        engine.abort("r")
        engine.step()
        check_same(engine.ask(victim, TOKENS, load=False, store=False), alone)
        engine.run()
        engine.assert_all_idle(server)
    server.loads()
    check(engine, expected, **mode)


# Crowds


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
    server.loads(0.3)
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
        assert answers[name].tokens[:4] == expected.answer.tokens
