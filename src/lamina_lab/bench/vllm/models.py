"""The models that are served: a shape on disk, weights from a seed (`worker.SeededLoader`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from lamina.errors import SettingsError
from lamina_lab.bench.vllm.chat import Chat
from lamina_lab.bench.vllm.workload import Workload

SEEDED = "lamina_seeded"
"""The loader of `worker`; also what names its weights, which no file holds (`lamina.model_id`)."""


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1_000,  # no layer has experts
    "moe_layer_freq": 1,
    "rope_scaling": None,
}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama's shape and how it is served here."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    dtype: str
    block_tokens: int
    chunk_tokens: int
    gpu_blocks: int
    max_tokens: int
    arena_bytes: int
    workload: Workload
    chat: Chat
    latent: int | None = None
    """A DeepSeek-V2's shape instead, dense: tokens share latent vectors of this width (MLA)."""
    eager: bool = False
    patient: bool = False
    """For a busy small host: generous deadlines."""

    def write(self, directory: Path) -> Path:
        """Write `config.json`; returns `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self._config()))
        return directory

    def _config(self) -> dict[str, Any]:
        kind = _LLAMA if self.latent is None else {**_DEEPSEEK, "kv_lora_rank": self.latent}
        return {
            **kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.workload.vocabulary,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


_SMALL = Model(
    hidden=1024,
    layers=16,
    heads=8,
    kv_heads=4,
    head_dim=128,
    mlp=2816,
    dtype="bfloat16",
    block_tokens=16,
    chunk_tokens=64,
    gpu_blocks=4096,
    max_tokens=8192,
    arena_bytes=4 << 30,
    workload=Workload(
        document_tokens=4096, prompt_tokens=4224, vocabulary=4096, stream_prompt_tokens=128
    ),
    chat=Chat(least_document=2_000, most_document=5_000, vocabulary=4096),
)
_LLAMA_8B = Model(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14_336,
    dtype="bfloat16",
    block_tokens=16,
    chunk_tokens=256,
    gpu_blocks=24_000,
    max_tokens=16_384,
    arena_bytes=40 << 30,
    workload=Workload(),
    chat=Chat(),
)
MODELS = {
    "llama-3.1-8b": _LLAMA_8B,
    # What one of 8 ranks computes of Llama-3.1-70B: pages of 8 KiB, 80 layers.
    "llama-3.1-70b-rank": msgspec.structs.replace(
        _LLAMA_8B,
        hidden=8192,
        layers=80,
        heads=8,
        kv_heads=1,
        mlp=3584,
        arena_bytes=16 << 30,
        workload=Workload(vocabulary=16_032),
        chat=Chat(vocabulary=16_032),
    ),
    "small": _SMALL,
    "small-mla": msgspec.structs.replace(
        _SMALL,
        layers=8,
        heads=16,
        kv_heads=16,
        head_dim=192,
        block_tokens=64,
        gpu_blocks=1024,
        latent=512,
    ),
    "tiny": Model(
        hidden=128,
        layers=8,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=256,
        dtype="float32",
        block_tokens=32,
        chunk_tokens=64,
        gpu_blocks=512,
        max_tokens=2048,
        arena_bytes=256 << 20,
        workload=Workload(
            document_tokens=512,
            prompt_tokens=600,
            output_tokens=6,
            vocabulary=512,
            stream_prompt_tokens=40,
        ),
        chat=Chat(
            conversations=4,
            system_tokens=64,
            least_document=192,
            most_document=320,
            turns=3,
            turn_tokens=24,
            output_tokens=6,
            vocabulary=512,
        ),
        eager=True,
        patient=True,
    ),
}
"""The published figures are the first one's; the last one runs on vLLM's CPU build."""


def model_named(name: str) -> Model:
    """Raises `SettingsError` for one that is not known."""
    if name not in MODELS:
        raise SettingsError(f"there is no model {name!r}", f"Use {', '.join(MODELS)}")
    return MODELS[name]
