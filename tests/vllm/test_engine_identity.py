"""What identifies KV, on the real vLLM: what changes a byte of it is a miss, what does not a hit.

Each test compares the tokens of an engine that could have hit wrongly with those that it computes
without the cache.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest

from lamina import content
from lamina.engines.vllm import weights
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import CHUNK_TOKENS, Engine, connector_config, random_tokens
from tests.vllm.tiny_llama import HEAD_DIM, LAYERS, write_adapter, write_model

HIT = 4 * CHUNK_TOKENS
WEIGHTS = "model.safetensors"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model that the test may change."""
    return write_model(tmp_path / "own")


@contextmanager
def started(model: Path, server: ServerThread, **arguments: Any) -> Iterator[Engine]:
    engine = Engine(model, server.settings.socket, arguments=arguments)
    try:
        yield engine
    finally:
        engine.close()


def check(engine: Engine, prompt: list[int], cached: int, **options: Any) -> list[int]:
    """Ask: so many tokens are found at the server, and the answer is as computed without it."""
    engine.forget()
    found = engine.ask(prompt, **options)
    engine.forget()
    alone = engine.ask(prompt, load=False, store=False, **options)
    assert found.cached == cached
    assert found.tokens == alone.tokens
    return alone.tokens


def store(model: Path, server: ServerThread, prompt: list[int], **arguments: Any) -> list[int]:
    with started(model, server, **arguments) as engine:
        return engine.ask(prompt).tokens


def edit(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replace the weights in place."""
    weights = load_file(model / WEIGHTS)
    change(weights)
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})


def change_last_byte(model: Path) -> None:
    """The last byte of the last tensor: the sign of its last number."""
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 0x80]))


def change_norm(model: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.0.input_layernorm.weight"][3] = 1.5

    edit(model, change)


@pytest.mark.parametrize("change", [change_last_byte, change_norm])
def test_weights_replaced_in_place(
    own: Path, server: ServerThread, change: Callable[[Path], None]
) -> None:
    prompt = random_tokens(HIT + 20, 60)
    store(own, server, prompt)
    change(own)
    with started(own, server) as engine:
        check(engine, prompt, 0)


def test_the_same_weights_after_a_restart_and_under_another_path(
    own: Path, tmp_path: Path, server: ServerThread
) -> None:
    prompt = random_tokens(HIT + 20, 61)
    store(own, server, prompt)
    for path in (own, Path(shutil.copytree(own, tmp_path / "copied"))):
        with started(path, server) as engine:
            check(engine, prompt, HIT)


def test_rotary_factors_that_follow_the_longest_prompt(own: Path, server: ServerThread) -> None:
    """vLLM takes LongRoPE's long factors where `max_model_len` is beyond the original length."""
    half = HEAD_DIM // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + i for i in range(half)],
        "original_max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "factor": 4.0,
    }
    described = json.loads((own / "config.json").read_text())
    described |= {"rope_parameters": rope, "original_max_position_embeddings": 1024}
    (own / "config.json").write_text(json.dumps(described))
    prompt = random_tokens(HIT + 20, 62)
    short = store(own, server, prompt, max_model_len=1024)
    with started(own, server, max_model_len=2048) as engine:
        assert check(engine, prompt, 0) != short


ROPE = {"rope_type": "default", "rope_theta": 500.0}


def test_a_configuration_that_is_overridden(model: Path, server: ServerThread) -> None:
    prompt = random_tokens(HIT + 20, 63)
    plain = store(model, server, prompt)
    with started(model, server, hf_overrides={"rope_parameters": ROPE}) as engine:
        assert check(engine, prompt, 0) != plain


def reload(engine: Engine, model: Path) -> None:
    """Replace the weights in memory, as a trainer does."""
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


@pytest.mark.parametrize("connector_too", [False, True], ids=["vllms-cache", "ours-too"])
def test_weights_updated_while_the_engine_runs(
    model: Path, own: Path, server: ServerThread, connector_too: bool
) -> None:
    """A reset comes with it; of vLLM's own cache only, as trainers ask for it, is enough. The old
    weights' KV is found again once they are back, unless it was to be forgotten."""
    prompt = random_tokens(HIT + 20, 64, connector_too)

    def change(weights: dict[str, Any]) -> None:
        for layer in range(LAYERS):
            weights[f"model.layers.{layer}.self_attn.v_proj.weight"] *= -1.0

    edit(own, change)
    with started(model, server) as engine:
        old = engine.ask(prompt).tokens
        reload(engine, own)
        engine.forget(connector_too)
        new = engine.ask(prompt)
        assert new.cached == 0
        assert new.tokens != old
        assert check(engine, prompt, HIT) == new.tokens


def test_ranks_of_one_engine_share_before_and_after_resets(
    model: Path, server: ServerThread
) -> None:
    """vLLM names a data-parallel rank's connector `<engine>_dp<rank>`, and resets all of them."""
    prompts = [random_tokens(HIT + 20, 66, resets) for resets in range(3)]
    with started(model, server, kv_transfer_config=rank_config(server, 0)) as engine:
        for prompt in prompts:
            engine.ask(prompt)
            engine.forget(connector_too=True)
    with started(model, server, kv_transfer_config=rank_config(server, 1)) as engine:
        for resets in range(3):
            for number, prompt in enumerate(prompts):
                check(engine, prompt, HIT if number == resets else 0)
            engine.forget(connector_too=True)


def rank_config(server: ServerThread, rank: int) -> dict[str, Any]:
    return {**connector_config(server.settings.socket), "engine_id": f"one_dp{rank}"}


ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_an_adapter_overwritten_while_it_is_served(
    model: Path, tmp_path: Path, server: ServerThread
) -> None:
    """KV of the old adapter, which the engine has in memory, is not stored as the new one's."""
    lora = LoRARequest("a", 3, str(write_adapter(tmp_path / "a", 3)))
    prompt = random_tokens(HIT + 20, 67)
    with started(model, server, **ADAPTERS) as engine:
        first = engine.ask(prompt, lora=lora, load=False, store=False)
        write_adapter(tmp_path / "a", 4)
        engine.forget()
        served = engine.ask(prompt, lora=lora)
        assert served.tokens == first.tokens
    with started(model, server, **ADAPTERS) as engine:
        assert check(engine, prompt, 0, lora=lora) != first.tokens


def test_an_adapter_is_found_again_and_no_other_in_its_place(
    model: Path, tmp_path: Path, server: ServerThread
) -> None:
    lora = LoRARequest("a", 3, str(write_adapter(tmp_path / "a", 3)))
    moved = LoRARequest("b", 1, str(write_adapter(tmp_path / "b", 3)))
    other = LoRARequest("a", 2, str(write_adapter(tmp_path / "c", 4)))
    prompt = random_tokens(HIT + 20, 68)
    with started(model, server, **ADAPTERS) as engine:
        answer = engine.ask(prompt, lora=lora).tokens
    with started(model, server, **ADAPTERS) as engine:
        assert check(engine, prompt, HIT, lora=moved) == answer
        assert check(engine, prompt, 0, lora=other) != answer
        assert check(engine, prompt, 0) != answer


def test_hits_wait_until_the_weights_are_known(
    own: Path, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine serves meanwhile; what it computes before is not stored."""
    prompt = random_tokens(HIT + 20, 71)
    may_read = threading.Event()
    read = content.digests

    def held(*arguments: Any) -> list[str]:
        assert may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(weights, "digests", held)
    monkeypatch.setattr(Engine, "find_identity", lambda self: True)
    with started(own, server) as engine:
        assert engine.ask(prompt).tokens
        engine.forget()
        assert engine.ask(prompt).cached == 0
        may_read.set()
        eventually(lambda: engine.side._identity.is_known)
        engine.forget()
        engine.ask(prompt)
        check(engine, prompt, HIT)
