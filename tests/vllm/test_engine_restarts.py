"""The server outlives engines, is shared by them, and may die under them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.server import ServerProcess, ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import CHUNK_TOKENS, Answer, Engine, random_tokens
from tests.vllm.modes import in_every_mode
from tests.vllm.tiny_llama import LAYERS

HIT = 4 * CHUNK_TOKENS
PROMPT = random_tokens(HIT + 30, 40)
SLOW_GBPS = "0.004"
"""A whole hit of 1 MiB takes 0.26 s: a server that is killed is in the middle of it."""
BACK_WITHIN_S = 5.0
ANSWER_TOKENS = 8


def test_hit_after_the_engine_restarts_and_by_another_engine(
    model: Path, module_server: ServerThread
) -> None:
    socket = module_server.settings.socket
    first = Engine(model, socket)
    alone = first.ask(PROMPT)
    pages = first.pages_of("alone", HIT)
    first.close()

    second = Engine(model, socket)
    second.forget()
    found = second.ask(PROMPT, store=False, layerwise_overlap=1)
    assert found == Answer(alone.tokens, found.logprobs, found.margin, "length", HIT)
    np.testing.assert_array_equal(second.pages_of("alone", HIT), pages)
    second.assert_idle(module_server)
    second.close()

    request = json.dumps({"prompt": PROMPT, "layerwise_overlap": 1})
    command = [sys.executable, "-m", "tests.vllm.other_engine", str(model), str(socket), request]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == asdict(found)
    gauges = module_server.gauges
    eventually(lambda: not (gauges()["leases"] or gauges()["pins"] or gauges()["sessions"]))


def serve(socket: Path) -> ServerProcess:
    socket.unlink(missing_ok=True)  # a killed server's, by which a new one's would not be noticed
    options = ("--arena", "128MiB", "--chunk-tokens", str(CHUNK_TOKENS))
    server = ServerProcess(socket, *options, "--host-link-gbps", SLOW_GBPS)
    server.wait_until_filled()
    return server


@pytest.fixture(scope="module")
def own_socket(module_socket: Path) -> Path:
    return module_socket.parent.parent / "other" / "lamina.sock"


@pytest.fixture(scope="module")
def lone_engine(model: Path, own_socket: Path) -> Iterator[Engine]:
    """An engine whose server comes and goes; there is none when it starts."""
    engine = Engine(model, own_socket, reconnect_every_ms=100)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def crowd(lone_engine: Engine) -> dict[str, tuple[list[int], Answer]]:
    """8 prompts and their answers."""
    prompts = {f"r{i}": random_tokens(HIT + 20 + i, 41, i) for i in range(8)}
    return {
        name: (p, lone_engine.ask(p, ANSWER_TOKENS, retrieve=False)) for name, p in prompts.items()
    }


@in_every_mode
def test_server_is_killed_and_comes_back_under_load(
    lone_engine: Engine,
    own_socket: Path,
    crowd: dict[str, tuple[list[int], Answer]],
    mode: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the middle of a forward that waits for slices: requests that were not released are
    answered right, released ones may end in an error. Soon after its return the server is used."""
    engine = lone_engine
    server = serve(own_socket)
    waiting: set[str] = set()
    wait = engine.worker.wait_for_layer_load

    def kill_and_wait(name: str) -> None:
        whole = mode["layerwise_overlap"] in (0, LAYERS)
        if f".{0 if whole else LAYERS // 2}." in name and server.process.poll() is None:
            waiting.update(name for name in crowd if is_retrieving(engine, name))
            server.stop(signal.SIGKILL)
        wait(name)

    try:
        engine.forget()
        hits_again(engine, mode)
        for prompt, _ in crowd.values():
            engine.ask(prompt, 1, retrieve=False)
        engine.forget()
        for name, (prompt, _) in crowd.items():
            engine.add(name, prompt, ANSWER_TOKENS, **mode)
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker, "wait_for_layer_load", kill_and_wait)
            answers = engine.run()
        assert server.process.poll() is not None
        failed = {name for name, answer in answers.items() if answer.reason == "error"}
        assert failed.isdisjoint(waiting)
        assert waiting or failed, "every retrieve was over before the server was"
        for name, (_, alone) in crowd.items():
            assert answers[name].tokens == ([] if name in failed else alone.tokens)
        engine.assert_idle()
        server = serve(own_socket)
        hits_again(engine, mode)
        engine.assert_idle()
    finally:
        server.stop(signal.SIGKILL)
        engine.end_requests()


def is_retrieving(engine: Engine, name: str) -> bool:
    """Whether a request waits for its retrieve and was not released."""
    request = engine.request(name)
    waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return waits and request.request_id not in engine.scheduler.finished_recving_kv_req_ids


def hits_again(engine: Engine, mode: dict[str, Any]) -> None:
    """Ask until a prompt is found at the server, which has just started."""

    def is_hit() -> bool:
        engine.forget()
        return engine.ask(PROMPT, **mode).cached == HIT

    eventually(is_hit, BACK_WITHIN_S)
