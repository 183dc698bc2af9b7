"""An engine that goes on: resets that change nothing, and an adapter that is not there."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.server import ServerThread
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens

HIT = 4 * CHUNK_TOKENS


def test_a_reset_without_other_weights_keeps_what_is_stored(engine: Engine) -> None:
    """Of vLLM's own cache: benchmarks and tests empty it."""
    prompt = random_tokens(HIT + 20, 65)
    engine.ask(prompt)
    for _ in range(3):
        engine.forget()
        assert engine.ask(prompt).cached == HIT


def test_an_adapter_that_cannot_be_read_costs_only_its_own_requests_the_cache(
    engine: Engine, server: ServerThread
) -> None:
    """With transfers pending too: no exception leaves the connector."""
    broken = SimpleNamespace(
        lora_int_id=9, lora_name="x", lora_path="/does/not/exist", load_inplace=False
    )
    prompt = random_tokens(HIT + 20, 69)
    engine.ask(prompt)
    engine.forget()
    server.device.retrieves.close()
    engine.add("retrieving", prompt, layerwise_overlap=1, release_after_slices=1)
    engine.step()
    engine.add("broken", random_tokens(HIT, 70), 1)
    vllm_request = engine.request("broken")
    tracked = engine.side._tracked.pop(vllm_request.request_id)
    assert tracked.prefix.may_retrieve
    vllm_request.lora_request = broken
    assert engine.side._track(vllm_request).prefix.may_retrieve is False
    vllm_request.lora_request = None
    server.device.retrieves.open()
    answers = engine.run()
    assert answers["retrieving"].cached == HIT
    assert {answer.reason for answer in answers.values()} == {"length"}
