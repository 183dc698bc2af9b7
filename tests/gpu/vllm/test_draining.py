"""Retrieves that are slow, fail or are given up, while requests already run on them."""

from __future__ import annotations

from typing import Any

from tests.gpu.vllm.checks import (
    PACE_MS,
    TOKENS,
    check,
    check_same,
    made,
    reference,
    with_wide_margin,
)
from tests.gpu.vllm.engine import GpuEngine, ValvedServer
from tests.vllm.engine import CHUNK_TOKENS, random_tokens


def test_slow_retrieve_is_never_read_early(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    prompt = random_tokens(4 * CHUNK_TOKENS + 50, 8)
    expected = reference(engine, prompt, 4 * CHUNK_TOKENS)
    server.retrieves(PACE_MS)
    engine.hooks_fired.clear()
    check(engine, expected, **early_mode)
    assert engine.hooks_fired, "no step read an open retrieve"


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
    server.retrieves(PACE_MS)
    engine.add("owner", owner.prompt, 4, store=False, **early_mode)
    for number, sharer in enumerate(sharers):
        engine.add(f"sharer{number}", sharer.prompt, 4, retrieve=False, store=False)
    answers = engine.run()
    check_same(answers["owner"], owner.answer)
    for number, sharer in enumerate(sharers):
        check_same(answers[f"sharer{number}"], sharer.answer)


def test_retrieve_lands_beside_decoding_requests(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    steady = reference(engine, random_tokens(70, 11), 64, 12)
    (hit,) = with_wide_margin(engine, 1, made(290, 12), 256, 4)
    engine.forget()
    engine.add("steady", steady.prompt, 12, retrieve=False, store=False)
    engine.step_until(lambda: engine.request("steady").num_output_tokens >= 2)
    server.retrieves(PACE_MS)
    engine.add("hit", hit.prompt, 4, store=False, **early_mode)
    answers = engine.run()
    check_same(answers["hit"], hit.answer)
    check_same(answers["steady"], steady.answer)


def test_slice_that_fails_before_release_is_recomputed(
    engine: GpuEngine, server: ValvedServer
) -> None:
    expected = reference(engine, random_tokens(200, 13), 192)
    alone = engine.ask(expected.prompt, TOKENS, retrieve=False, store=False)
    for width in (1, 3, 0):
        engine.forget()
        server.retrieves(fails_after=0)
        mode = {"layerwise_overlap": width, "release_after_slices": 1}
        answer = engine.ask(expected.prompt, TOKENS, store=False, **mode)
        check_same(answer, alone)
    check(engine, expected)


def test_slice_that_fails_after_release_gives_no_token(
    engine: GpuEngine, server: ValvedServer, early_mode: dict[str, Any]
) -> None:
    """Owner and sharers end in an error, or computed what was missing; others go on."""
    (expected,) = with_wide_margin(engine, 1, made(290, 14), 256, 4)
    other = reference(engine, random_tokens(70, 15), 64, 12)
    engine.forget()
    engine.add("other", other.prompt, 12, retrieve=False, store=False)
    engine.step_until(lambda: engine.request("other").num_output_tokens >= 2)
    slices = -(-engine.configuration.model.layers // early_mode["layerwise_overlap"])
    server.retrieves(PACE_MS, fails_after=slices - 1)
    engine.add("owner", expected.prompt, 4, store=False, **early_mode)
    engine.add("sharer", expected.prompt, 4, retrieve=False, store=False)
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
    again = engine.ask(expected.prompt, 4, retrieve=False, store=False)
    check_same(again, expected.answer)  # nothing of the bad blocks is in vLLM's cache
    check(engine, expected)


def test_abort_while_slices_are_on_their_way(
    engine: GpuEngine, server: ValvedServer, mode: dict[str, Any]
) -> None:
    """The blocks are handed out again only once nothing more arrives in them."""
    expected = reference(engine, random_tokens(290, 16), 256)
    victim = random_tokens(290, 17)
    alone = engine.ask(victim, TOKENS, retrieve=False, store=False)
    for steps in (1, 2, 4):
        engine.forget()
        server.retrieves(PACE_MS)
        engine.add("r", expected.prompt, store=False, **mode)
        for _ in range(steps):
            engine.step()
        engine.abort("r")
        engine.step()
        check_same(engine.ask(victim, TOKENS, retrieve=False, store=False), alone)
        engine.run()
        engine.assert_all_idle(server)
    server.retrieves()
    check(engine, expected, **mode)
