"""Stores that do not end keep no block for ever, delay no reset, and are never found wrong."""

from __future__ import annotations

import pytest

from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens

HIT = 4 * CHUNK_TOKENS


def begin_store(engine: Engine, server: ServerThread, *seed: int) -> list[int]:
    """Compute a prompt whose store the server begins and does not end."""
    server.device.stores.close()
    prompt = random_tokens(HIT + 20, *seed)
    engine.add("stored", prompt, 1)
    engine.step_until(lambda: engine.is_answered)
    assert engine.connector.has_pending_push_work()
    return prompt


def check_not_found(engine: Engine, server: ServerThread, prompt: list[int]) -> None:
    """What was given up is not found, whatever the server copied since; and may be stored anew."""
    for number in range(4):  # others use its blocks
        engine.ask(random_tokens(900, 95, number), 1, store=False)
    server.device.stores.open()
    eventually(lambda: not server.gauges()["queued_transfers"])
    engine.run()
    engine.forget()
    assert engine.ask(prompt, store=False).cached == 0
    engine.forget()
    expected = engine.ask(prompt)
    engine.forget()
    found = engine.ask(prompt)
    assert (found.cached, found.tokens) == (HIT, expected.tokens)


def test_a_store_that_does_not_end_is_given_up(engine: Engine, server: ServerThread) -> None:
    prompt = begin_store(engine, server, 91)
    engine.step_until(lambda: server.device.stores.is_holding)
    with engine.late():
        engine.run()  # until nothing is held
    engine.assert_idle()
    check_not_found(engine, server, prompt)


@pytest.mark.parametrize("connector_too", [False, True], ids=["vllms-cache", "ours-too"])
def test_a_reset_does_not_wait_for_stores(
    engine: Engine, server: ServerThread, connector_too: bool
) -> None:
    prompt = begin_store(engine, server, 92, connector_too)
    engine.forget(connector_too)  # vLLM refuses while a block is held
    assert not engine.connector.has_pending_push_work()
    check_not_found(engine, server, prompt)


def test_a_reset_forgets_at_once_though_retrieves_hold_blocks(
    engine: Engine, server: ServerThread
) -> None:
    """vLLM cannot empty its own cache then; what is to be forgotten is not found all the same."""
    prompt = random_tokens(HIT + 20, 93)
    engine.ask(prompt)
    engine.forget()
    server.device.retrieves.close()
    engine.add("retrieving", prompt, 1, layerwise_overlap=0)
    engine.step_until(lambda: engine.connector.has_pending_push_work())
    assert not engine._llm.reset_prefix_cache(reset_connector=True)
    server.device.retrieves.open()
    assert engine.run()["retrieving"].reason == "length"
    engine.forget()
    assert engine.ask(prompt).cached == 0
