"""Models that may not have their KV cached: one line at the start, and no wrong token later."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lamina.engines.vllm import LaminaConnector
from lamina.engines.vllm.kinds import check_groups, check_layers
from lamina.errors import SettingsError
from tests.support.server import ServerThread
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens
from tests.vllm.test_refusals import engine_config
from tests.vllm.tiny_llama import LAYERS, write_model

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


def groups(*specs: Any) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)]


def test_attention_over_all_tokens_is_taken() -> None:
    check_groups(groups(FULL))
    check_groups(groups(MLAAttentionSpec(**SHAPE)))
    check_groups(groups(FullAttentionSpec(**SHAPE, sliding_window=64)))  # keeps all its blocks
    check_groups(groups(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL})))


WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)


@pytest.mark.parametrize(
    ("specs", "cause"),
    [
        ([WINDOW], "sliding window"),
        ([ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)], "local chunks"),
        ([MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))], "state"),
        ([SinkFullAttentionSpec(**SHAPE, sink_len=16)], "sink tokens"),
        ([FullAttentionSpec(**SHAPE, non_causal=True)], "later tokens"),
        ([FULL, FULL], "2 groups"),
        ([FULL, WINDOW], "sliding window"),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOW})], "sliding window"),
    ],
)
def test_what_is_not_proven_is_refused(specs: list[Any], cause: str) -> None:
    with pytest.raises(SettingsError, match=cause) as error:
        check_groups(groups(*specs))
    assert "serve this model without Lamina" in str(error.value)


def test_several_tokens_in_one_state_are_refused() -> None:
    spec = MLAAttentionSpec(**SHAPE)
    name = "tokens_per_state" if hasattr(spec, "tokens_per_state") else "compress_ratio"
    with pytest.raises(SettingsError, match="several tokens in one"):
        check_groups(groups(MLAAttentionSpec(**SHAPE, **{name: 4})))


def test_layers_whose_reads_come_after_a_hook_are_taken() -> None:
    layers = {"a": Attention.__new__(Attention), "b": MLAAttention.__new__(MLAAttention)}
    check_layers(layers, layers)


def test_a_cached_layer_without_a_hook_is_refused() -> None:
    """As DSA's index cache, which is read before its layer's hook; or a layer that is unknown."""
    attention = Attention.__new__(Attention)
    for other in (SimpleNamespace(), ChunkedLocalAttention.__new__(ChunkedLocalAttention)):
        with pytest.raises(SettingsError, match=r"'indexer.k_cache' is a .*, without a hook"):
            check_layers(["a", "indexer.k_cache"], {"a": attention, "indexer.k_cache": other})
    with pytest.raises(SettingsError, match="'b' is unknown"):
        check_layers(["a", "b"], {"a": attention})


@pytest.mark.parametrize(
    ("described", "cause"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "no layer of this model keeps KV",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "layers of this model keep states",
        ),
    ],
    ids=["only-states", "states-and-attention"],
)
def test_models_with_states_are_refused_before_vllm_misleads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, described: dict[str, Any], cause: str
) -> None:
    """It would say that prefix caching is off, or that specs cannot be promoted to one type."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, **described}))
    config = engine_config(tmp_path, Path("/tmp/none"), {}, {})
    with pytest.raises(SettingsError, match=cause):
        LaminaConnector.get_required_kvcache_layout(config)
    assert cause in caplog.text


FEW_BLOCKS = 72
"""Enough for the longest prompt there may be, and for four of the crowd."""
WINDOW_ONLY = {"sliding_window": 512, "layer_types": ["sliding_attention"] * LAYERS}
MIXED = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}


def described(directory: Path, changes: dict[str, Any]) -> Path:
    model = write_model(directory)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    return model


def crowd(model: Path, server: ServerThread, blocks: int) -> None:
    """8 prompts of 600 tokens at once, with room for some, and all again: tokens are right."""
    prompts = {f"p{n}": random_tokens(600, 80, n) for n in range(8)}
    engine = Engine(model, server.settings.socket, blocks)
    try:
        answers = []
        rounds: list[dict[str, Any]] = [{"load": False, "store": False}, {"load": False}, {}, {}]
        for options in rounds:
            for name, prompt in prompts.items():
                engine.add(name, prompt, 6, **options)
            answers.append({name: answer.tokens for name, answer in engine.run().items()})
            engine.forget()
        for name, prompt in prompts.items():  # alone, with hits
            found = engine.ask(prompt, 6)
            assert found.tokens == answers[0][name]
        assert answers[1:] == [answers[0]] * 3
        assert found.cached >= CHUNK_TOKENS
    finally:
        engine.close()


def test_a_crowd_on_a_model_that_keeps_only_a_window(
    tmp_path: Path, server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM gives blocks that leave the window to others. Refused today; right when it is served."""
    model = described(tmp_path / "window", WINDOW_ONLY)
    refusal = ""
    try:
        crowd(model, server, FEW_BLOCKS)
    except SettingsError as error:
        refusal = str(error)
    if refusal:
        assert "keep only a sliding window" in refusal
        assert f"Lamina cannot serve this engine: {refusal}" in caplog.text


def test_a_crowd_on_a_model_with_windows_and_full_attention(
    tmp_path: Path, server: ServerThread
) -> None:
    """Without its hybrid manager vLLM keeps all blocks of every layer."""
    crowd(described(tmp_path / "mixed", MIXED), server, FEW_BLOCKS)
