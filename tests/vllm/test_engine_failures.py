"""Slices held back and slices that fail, on the real vLLM: no early read, no garbage token.

Copies of a retrieve pass a valve one slice at a time, while another thread steps the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lamina.errors import DeviceError
from tests.support.server import ServerThread
from tests.support.valve import Valve
from tests.support.wait import PATIENCE_S, eventually
from tests.vllm.engine import BLOCK_TOKENS, CHUNK_TOKENS, Engine, Pages, random_tokens
from tests.vllm.modes import MODES
from tests.vllm.tiny_llama import LAYERS

LINK_BROKE = DeviceError("the link broke", "Mend it")
HIT = 3 * CHUNK_TOKENS
EARLY = {name: mode for name, mode in MODES.items() if name != "whole-async"}
"""Modes in which a request runs before all of its slices have landed."""
in_early_modes = pytest.mark.parametrize("mode", list(EARLY.values()), ids=list(EARLY))


class Prompt:
    """A stored prompt: its tokens, its answer and the pages of its hit."""

    def __init__(self, engine: Engine, seed: int, tokens: int = 4) -> None:
        self.tokens = random_tokens(HIT + 40, 30, seed)
        self.answer = engine.ask(self.tokens, tokens, retrieve=False)
        self.pages: Pages = engine.pages_of("alone", HIT)
        engine.forget()


@pytest.fixture
def retrieves(server: ServerThread) -> Valve:
    return server.device.retrieves


def release_held(engine: Engine, valve: Valve, name: str, mode: dict[str, Any]) -> None:
    """Bring a request that was just added to where its next step reads slices that are held."""
    if not mode["release_after_slices"]:
        return
    engine.step_until(lambda: engine.request(name).status.name == "WAITING_FOR_REMOTE_KVS")
    valve.let_pass(mode["release_after_slices"])
    request = engine.request(name)
    engine.step_until(lambda: request.request_id in engine.scheduler.finished_recving_kv_req_ids)


@contextmanager
def held_step(engine: Engine, valve: Valve) -> Iterator[Future[None]]:
    """A step on another thread, whose forward has begun and waits for slices that the valve holds;
    at the end the valve is opened and the step is over."""
    begun = threading.Event()
    worker = engine.worker
    wait = worker.wait_for_layer_load

    def note_and_wait(name: str) -> None:
        begun.set()
        wait(name)

    worker.wait_for_layer_load = note_and_wait
    step = engine.in_thread(engine.step)
    try:
        assert begun.wait(PATIENCE_S), "the step had no forward"
        valve.wait_until_held()
        assert not step.done()
        yield step
    finally:
        valve.open()
        step.result(PATIENCE_S)
        worker.wait_for_layer_load = wait


@in_early_modes
def test_no_layer_reads_before_its_slice_has_landed(
    engine: Engine, retrieves: Valve, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the wait for a layer is over, the pages of that layer hold their bytes."""
    prompt = Prompt(engine, 1)
    width = mode["layerwise_overlap"]
    read: list[int] = []
    wait = engine.worker.wait_for_layer_load

    def wait_and_look(name: str) -> None:
        wait(name)
        layer = int(name.split(".")[2])
        blocks = engine.blocks_of_running("r")[: HIT // BLOCK_TOKENS]
        np.testing.assert_array_equal(engine.pages(blocks)[layer], prompt.pages[layer])
        read.append(layer)

    monkeypatch.setattr(engine.worker, "wait_for_layer_load", wait_and_look)
    retrieves.close()
    engine.add("r", prompt.tokens, store=False, **mode)
    release_held(engine, retrieves, "r", mode)
    slices = -(-LAYERS // width)

    def have_read(layers: int) -> Callable[[], bool]:
        return lambda: len(read) == layers

    with held_step(engine, retrieves):
        for landed in range(mode["release_after_slices"], slices):
            retrieves.wait_until_held()
            eventually(have_read(landed * width))
            blocks = engine.blocks_of_running("r")[: HIT // BLOCK_TOKENS]
            assert (engine.pages(blocks)[landed * width] != prompt.pages[landed * width]).any()
            retrieves.let_pass(1)
    assert read[:LAYERS] == list(range(LAYERS))
    answer = engine.run()["r"]
    assert (answer.tokens, answer.logprobs) == (prompt.answer.tokens, prompt.answer.logprobs)


@in_early_modes
def test_sharer_waits_for_slices_of_the_blocks_it_shares(
    engine: Engine, retrieves: Valve, mode: dict[str, Any]
) -> None:
    """A request that finds draining blocks in vLLM's own cache is gated like their owner."""
    prompt = Prompt(engine, 2)
    retrieves.close()
    engine.add("owner", prompt.tokens, store=False, **mode)
    release_held(engine, retrieves, "owner", mode)
    engine.add("sharer", prompt.tokens, retrieve=False, store=False)
    with held_step(engine, retrieves):
        shared = engine.blocks_of_running("owner")[: HIT // BLOCK_TOKENS]
        assert engine.blocks_of_running("sharer")[: len(shared)] == shared
    answers = engine.run()
    for answer in answers.values():
        assert answer.tokens == prompt.answer.tokens
        np.testing.assert_allclose(answer.logprobs, prompt.answer.logprobs, atol=1e-4)
    assert answers["sharer"].cached >= HIT


@in_early_modes
def test_slice_that_fails_after_release_ends_its_readers_in_an_error(
    engine: Engine, retrieves: Valve, mode: dict[str, Any]
) -> None:
    """Owner and sharer give no token from the step that read it; an unrelated request goes on."""
    prompt, other = Prompt(engine, 3), Prompt(engine, 4, tokens=12)
    engine.add("other", other.tokens, 12, retrieve=False, store=False)
    engine.step_until(lambda: engine.request("other").num_output_tokens >= 2)
    retrieves.close()
    engine.add("owner", prompt.tokens, store=False, **mode)
    release_held(engine, retrieves, "owner", mode)
    engine.add("sharer", prompt.tokens, retrieve=False, store=False)
    with held_step(engine, retrieves):
        retrieves.fail_next(LINK_BROKE)
    answers = engine.run()
    for name in ("owner", "sharer"):
        assert (answers[name].reason, answers[name].tokens) == ("error", [])
    assert answers["other"].tokens == other.answer.tokens
    engine.assert_idle()
    assert engine.ask(prompt.tokens, retrieve=False, store=False).tokens == prompt.answer.tokens
    engine.forget()
    check_hit(engine, prompt)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_slice_that_fails_before_release_is_recomputed(
    engine: Engine, retrieves: Valve, width: int
) -> None:
    prompt = Prompt(engine, 5)
    retrieves.fail_next(LINK_BROKE)
    answer = engine.ask(prompt.tokens, store=False, layerwise_overlap=width)
    assert not retrieves.has_fault
    assert answer.tokens == prompt.answer.tokens
    assert answer.logprobs == prompt.answer.logprobs
    engine.forget()
    check_hit(engine, prompt)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_retrieve_that_times_out_before_release_is_recomputed(
    engine: Engine, retrieves: Valve, width: int
) -> None:
    """The request goes on without waiting for the server; the blocks stay held until it is known
    that it will not write to them."""
    prompt = Prompt(engine, 6)
    retrieves.close()
    engine.add("r", prompt.tokens, store=False, layerwise_overlap=width)
    engine.step_until(lambda: retrieves.is_holding)
    with engine.late():
        engine.step_until(lambda: engine.is_answered)
    answer = engine.answers.pop("r")
    assert retrieves.is_holding
    assert engine.pool.get_num_free_blocks() <= engine.blocks - 1 - HIT // BLOCK_TOKENS
    engine.poison_free()
    retrieves.open()
    engine.run()
    assert (answer.tokens, answer.reason) == (prompt.answer.tokens, "length")
    engine.assert_idle()


@in_early_modes
def test_retrieve_that_times_out_after_release_ends_its_request_in_an_error(
    engine: Engine, retrieves: Valve, mode: dict[str, Any]
) -> None:
    prompt = Prompt(engine, 7)
    retrieves.close()
    engine.add("r", prompt.tokens, store=False, **mode)
    release_held(engine, retrieves, "r", mode)
    with held_step(engine, retrieves) as step:
        with engine.late():
            step.result(PATIENCE_S)
        engine.step_until(lambda: engine.is_answered)
        answer = engine.answers.pop("r")
        assert (answer.reason, answer.tokens) == ("error", [])
        assert engine.pool.get_num_free_blocks() == engine.blocks - 1 - HIT // BLOCK_TOKENS
    engine.run()
    engine.assert_idle()


@in_early_modes
def test_abort_while_slices_are_held(
    engine: Engine, retrieves: Valve, mode: dict[str, Any]
) -> None:
    """The blocks of a retrieve whose request is gone are handed out only once nothing more
    arrives."""
    prompt = Prompt(engine, 8)
    retrieves.close()
    engine.add("r", prompt.tokens, store=False, **mode)
    if mode["release_after_slices"]:
        release_held(engine, retrieves, "r", mode)
        engine.abort("r")
        engine.step()
        assert engine.pool.get_num_free_blocks() <= engine.blocks - 1 - HIT // BLOCK_TOKENS
        engine.poison_free()
        retrieves.open()
    else:
        with held_step(engine, retrieves):
            pass
        engine.abort("r")
    engine.run()
    engine.assert_idle()
    engine.forget()
    check_hit(engine, prompt)


def check_hit(engine: Engine, prompt: Prompt) -> None:
    """The prompt can be retrieved, and gives its answer."""
    answer = engine.ask(prompt.tokens, store=False, layerwise_overlap=1)
    assert answer.cached == HIT
    assert answer.tokens == prompt.answer.tokens
