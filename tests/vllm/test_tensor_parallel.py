"""Two tensor-parallel ranks of a real vLLM: each retrieves and stores its shard of every chunk."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import protocol
from lamina.errors import DeviceError
from tests.support.server import ServerProcess, ServerThread, connected_client
from tests.support.wait import eventually
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens
from tests.vllm.modes import MODES
from tests.vllm.ranks_engine import RANKS, RanksEngine
from tests.vllm.test_engine_retrieve import answers_alone, check_same, sharing_prompts
from tests.vllm.tiny_llama import write_model

HIT = 4 * CHUNK_TOKENS
PROMPT = random_tokens(HIT + 30, 90)
EVERY_MODE = {**MODES, "auto": {"layerwise_overlap": "auto"}}
in_every_mode = pytest.mark.parametrize("mode", list(EVERY_MODE.values()), ids=list(EVERY_MODE))
SLOW_GBPS = "0.004"
"""A rank's half of a hit takes 0.1 s."""
LINK_BROKE = DeviceError("the link broke", "Mend it")


@pytest.fixture(scope="module")
def module_engine(model: Path, module_server: ServerThread) -> Iterator[Engine]:
    engine = RanksEngine(model, module_server.settings.socket)
    yield engine
    engine.close()


def wait_until_stored(engine: Engine, server: ServerThread, prompt: list[int]) -> None:
    """Until every full chunk is there, of all ranks: the server finds nothing less."""
    keys = engine.keys_of(prompt)

    def are_there() -> bool:
        engine.step()
        return len(server.server.index.find(keys)) == len(keys)

    eventually(are_there)


@in_every_mode
def test_a_hit_gives_the_tokens_and_every_byte_of_computing(
    engine: RanksEngine, server: ServerThread, mode: dict[str, Any]
) -> None:
    alone = engine.ask(PROMPT, retrieve=False)
    pages = engine.pages_of("alone", HIT)
    assert not np.array_equal(pages[0], pages[1]), "both ranks have the same heads"
    wait_until_stored(engine, server, PROMPT)
    engine.forget()
    hit = engine.ask(PROMPT, store=False, **mode)
    assert (hit.tokens, hit.logprobs, hit.cached) == (alone.tokens, alone.logprobs, HIT)
    np.testing.assert_array_equal(engine.pages_of("alone", HIT), pages)


@in_every_mode
def test_a_hit_after_a_flood_of_other_prompts(
    engine: RanksEngine, server: ServerThread, mode: dict[str, Any]
) -> None:
    """They have taken all of vLLM's blocks and moved through both ranks' lanes."""
    alone = engine.ask(PROMPT, retrieve=False)
    wait_until_stored(engine, server, PROMPT)
    for number in range(12):
        engine.add(f"other{number}", random_tokens(1000, 91, number), 2)
    engine.run()
    hit = engine.ask(PROMPT, store=False, **mode)
    assert hit.cached == HIT
    check_same(hit, alone)


@pytest.fixture(scope="module")
def crowd(module_engine: Engine, module_server: ServerThread) -> Any:
    """8 prompts on 2 stored prefixes, and their answers."""
    module_engine.forget()
    prompts = sharing_prompts(2, 4, 3 * CHUNK_TOKENS, seed=92)
    for prompt in prompts.values():
        module_engine.ask(prompt[: 3 * CHUNK_TOKENS], retrieve=False)
        wait_until_stored(module_engine, module_server, prompt[: 3 * CHUNK_TOKENS])
    return prompts, answers_alone(module_engine, prompts, 6)


@in_every_mode
def test_many_at_once_some_of_which_are_preempted(
    engine: RanksEngine, crowd: Any, mode: dict[str, Any]
) -> None:
    prompts, alone = crowd
    give_back = engine.occupy_all_but(30)
    for name, prompt in prompts.items():
        engine.add(name, prompt, 6, **mode)
    answers = engine.run()
    give_back()
    for name in prompts:
        check_same(answers[name], alone[name])


@in_every_mode
def test_a_retrieve_that_fails_on_one_rank(
    engine: RanksEngine, server: ServerThread, mode: dict[str, Any]
) -> None:
    """Before its request runs that computes; afterwards it is an error. Never a wrong token."""
    alone = engine.ask(PROMPT, retrieve=False)
    wait_until_stored(engine, server, PROMPT)
    engine.forget()
    server.device.retrieves.fail_next(LINK_BROKE)
    answer = engine.ask(PROMPT, store=False, **mode)
    assert not server.device.retrieves.has_fault
    if answer.reason == "error":
        assert mode.get("release_after_slices") == 0 or mode["layerwise_overlap"] == "auto"
        assert answer.tokens == []
    else:
        assert answer.tokens == alone.tokens
    engine.forget()
    check_same(engine.ask(PROMPT, store=False, **mode), alone)


def test_a_store_that_fails_on_one_rank_is_not_found_until_it_is_made_good(
    engine: RanksEngine, server: ServerThread
) -> None:
    prompt = random_tokens(HIT + 30, 93)
    server.device.stores.fail_next(LINK_BROKE)
    alone = engine.ask(prompt, retrieve=False)
    engine.run()
    assert not server.device.stores.has_fault
    assert not server.server.index.find(engine.keys_of(prompt))
    engine.forget()
    assert engine.ask(prompt).cached == 0
    wait_until_stored(engine, server, prompt)
    engine.forget()
    hit = engine.ask(prompt, store=False)
    assert hit.cached == HIT
    check_same(hit, alone)


def test_a_rank_that_is_stopped_holds_its_engine_up_and_nothing_else(
    engine: RanksEngine, server: ServerThread
) -> None:
    """In the middle of a retrieve; it goes on, and so does its engine."""
    alone = engine.ask(PROMPT, retrieve=False)
    wait_until_stored(engine, server, PROMPT)
    engine.forget()
    server.device.retrieves.close()
    engine.add("r", PROMPT, store=False, layerwise_overlap=1)
    engine.step_until(lambda: server.device.retrieves.is_holding)
    os.kill(engine.pids[1], signal.SIGSTOP)
    server.device.retrieves.open()
    steps = engine.in_thread(engine.run)
    eventually(lambda: not server.gauges()["queued_transfers"])
    os.kill(engine.pids[1], signal.SIGCONT)
    check_same(steps.result(60)["r"], alone)


def test_the_ranks_share_one_lease_and_one_record(
    engine: RanksEngine, server: ServerThread
) -> None:
    prompt = random_tokens(HIT, 94)
    before = server.gauges()
    engine.ask(prompt, retrieve=False)
    wait_until_stored(engine, server, prompt)
    after = server.gauges()
    assert after["chunks"] - before["chunks"] == HIT // CHUNK_TOKENS
    taken = before["arena_free_bytes"] - after["arena_free_bytes"]
    layout = server.server.index.find(engine.keys_of(prompt))[0].layout
    assert taken == layout.chunk_bytes * HIT // CHUNK_TOKENS
    assert len(layout.offsets_bytes) == RANKS


def own_server(socket: Path, *options: str) -> ServerProcess:
    socket.unlink(missing_ok=True)
    arena = ("--arena", "128MiB", "--chunk-tokens", str(CHUNK_TOKENS))
    server = ServerProcess(socket, *arena, *options)
    server.wait_until_filled()
    return server


def ask_for_ever(engine: RanksEngine) -> None:
    for number in range(1000):
        engine.ask(random_tokens(100, 95, number), 4)
    raise AssertionError("an engine goes on without one of its ranks")


class Lone:
    """An engine of a model with one KV head for both ranks, and its server on a slow link."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "own" / "lamina.sock"
        self.server = own_server(self.socket, "--host-link-gbps", SLOW_GBPS)
        model = write_model(directory / "model", kv_heads=1)
        self.engine = RanksEngine(model, self.socket, reconnect_every_ms=100)
        self.alone = self.engine.ask(PROMPT, 8)
        self.pages = self.engine.pages_of("alone", HIT)
        self.engine.run()

    def values(self) -> dict[str, float]:
        """What the server tells of itself."""
        with closing(connected_client(self.socket)) as client:
            stats = client.ask(protocol.GetStats)
            assert isinstance(stats, protocol.Stats)
            return stats.values


@pytest.fixture(scope="module")
def lone(module_socket: Path) -> Iterator[Lone]:
    lone = Lone(module_socket.parent.parent)
    yield lone
    lone.engine.close()
    lone.server.stop()


def test_ranks_that_keep_the_same_write_one_column_together(lone: Lone) -> None:
    """More ranks than KV heads: each has written a part, and each retrieves all of it."""
    engine = lone.engine
    np.testing.assert_array_equal(lone.pages[0], lone.pages[1])
    stats = lone.values()
    assert stats["stored_chunks"] == stats["chunks"] == HIT // CHUNK_TOKENS
    assert stats["stored_bytes"] == lone.pages[0].nbytes
    for mode in EVERY_MODE.values():
        engine.forget()
        hit = engine.ask(PROMPT, 8, store=False, **mode)
        assert (hit.tokens, hit.cached) == (lone.alone.tokens, HIT)
        np.testing.assert_array_equal(engine.pages_of("alone", HIT), lone.pages)


def test_a_server_that_is_killed_in_the_middle_of_retrieves(lone: Lone) -> None:
    """Requests compute, or end in an error where they were released. With another server they hit
    again."""
    engine, alone = lone.engine, lone.alone
    engine.forget()
    for name, mode in EVERY_MODE.items():
        engine.add(name, PROMPT, 8, store=False, **mode)
    answers = engine.in_thread(engine.run)
    eventually(lambda: lone.values()["queued_transfers"])
    lone.server.process.send_signal(signal.SIGKILL)
    lone.server.process.wait()
    for answer in answers.result(60).values():
        assert (answer.tokens, answer.reason) in [(alone.tokens, "length"), ([], "error")]
    assert engine.ask(PROMPT, 8, retrieve=False, store=False).tokens == alone.tokens
    lone.server = own_server(lone.socket)

    def hits() -> bool:
        engine._llm.reset_prefix_cache()
        answer = engine.ask(PROMPT, 8)
        assert answer.tokens == alone.tokens
        return answer.cached == HIT

    eventually(hits, patience_s=60)


def test_a_rank_that_is_killed_ends_its_engine_and_leaves_nothing_held(lone: Lone) -> None:
    """The last test of this engine."""
    os.kill(lone.engine.pids[1], signal.SIGKILL)
    with pytest.raises(Exception, match=r"(?i)worker|executor|engine|died|cancelled"):
        ask_for_ever(lone.engine)
    lone.engine.close()
    eventually(lambda: lone.values()["sessions"] == 0)
    assert not lone.values()["pins"]
