"""A tiny Llama whose greedy tokens depend on every page of its KV.

vLLM's dummy weights make attention hardly matter: wrong KV gives the same tokens. Here norms are 1
and projections are N(0, gain / √fan_in) from a seeded generator, so that altered KV shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, MLP = 128, 8, 4, 2, 32, 512, 256
SPECIAL_TOKENS = 3
"""Tokens below this are the unknown, the first and the last token."""
_GAINS = {
    "q_proj": 2.5,
    "k_proj": 2.5,
    "v_proj": 1.5,
    "o_proj": 1.5,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "lm_head": 4.0,
}


def write_model(directory: Path, with_tokenizer: bool = False, kv_heads: int = KV_HEADS) -> Path:
    """Write configuration and float32 weights, the same ones every time; returns `directory`."""
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(kv_heads)))
    (directory / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    save_file(_weights(kv_heads), directory / "model.safetensors", metadata={"format": "pt"})
    if with_tokenizer:
        _write_tokenizer(directory)
    return directory


def _config(kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _weights(kv_heads: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1234)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }

    def add(name: str, outputs: int, inputs: int) -> None:
        gain = _GAINS[name.rsplit(".", 1)[-1]]
        values = torch.randn(outputs, inputs, generator=generator)
        weights[f"{name}.weight"] = values * (gain / inputs**0.5)

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        add(f"{prefix}self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN)
        add(f"{prefix}self_attn.k_proj", kv_heads * HEAD_DIM, HIDDEN)
        add(f"{prefix}self_attn.v_proj", kv_heads * HEAD_DIM, HIDDEN)
        add(f"{prefix}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        add(f"{prefix}mlp.gate_proj", MLP, HIDDEN)
        add(f"{prefix}mlp.up_proj", MLP, HIDDEN)
        add(f"{prefix}mlp.down_proj", HIDDEN, MLP)
    add("lm_head", VOCABULARY, HIDDEN)
    return weights


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter that changes K and V much; returns `directory`."""
    import torch
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(seed)
    outputs = {
        "q_proj": HEADS * HEAD_DIM,
        "k_proj": KV_HEADS * HEAD_DIM,
        "v_proj": KV_HEADS * HEAD_DIM,
    }
    weights = {}
    for layer in range(LAYERS):
        for name, width in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, HIDDEN, generator=generator) / HIDDEN**0.5
            weights[f"{prefix}.lora_A.weight"] = down
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(outputs),
        "bias": "none",
        "lora_dropout": 0.0,
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def _write_tokenizer(directory: Path) -> None:
    """One word per token: `t17` is token 17."""
    from tokenizers import (  # type: ignore[import-not-found]
        Tokenizer,
        models,
        pre_tokenizers,
    )

    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = {f"t{token}": token for token in range(SPECIAL_TOKENS, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({**special, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
