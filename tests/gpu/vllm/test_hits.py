"""Hits of requests alone; and first, that wrong KV would be noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.vllm.checks import (
    PACE_MS,
    PLAIN,
    TOKENS,
    check,
    check_same,
    reference,
)
from tests.gpu.vllm.engine import Configuration, GpuEngine, ValvedServer
from tests.vllm.engine import CHUNK_TOKENS, random_tokens


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
        is_latent = configuration.model.latent is not None
        assert is_latent or engine.page_bytes >= 32 << 10
        backends = engine.side._identity._worker.backend
        assert ("MLA" in backends) == is_latent


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
        answer = engine.ask(prompt, TOKENS, store=False, **PLAIN)
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
    server.retrieves(PACE_MS)
    answer = engine.ask(expected.prompt, store=False, layerwise_overlap=1, release_after_slices=0)
    assert (answer.tokens, answer.reason) == ([], "error")


def test_cold_request_computes_what_vllm_computes_alone(engine: GpuEngine) -> None:
    prompt = random_tokens(300, 3)
    alone = engine.ask(prompt, TOKENS, retrieve=False, store=False)
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
    server.retrieves(PACE_MS)
    check(engine, expected, **mode)
    is_early = mode["layerwise_overlap"] == 1 or not mode["release_after_slices"]
    if configuration.on_gpu and is_early:
        assert False in engine.hooks_fired, "no step read an open retrieve in a full graph"


def test_reset_of_all_caches_begins_anew(engine: GpuEngine) -> None:
    expected = reference(engine, random_tokens(130, 7), 128)
    engine.forget(connector_too=True)
    assert engine.ask(expected.prompt, store=False).cached == 0
