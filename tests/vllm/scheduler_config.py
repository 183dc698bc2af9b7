"""An engine's configuration for a scheduler without an engine, for vLLM 0.26 as for 0.32."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from tests.vllm.scripted_client import BLOCK, CHUNK, LAYERS

NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


@functools.cache
def _model_directory() -> str:
    directory = tempfile.mkdtemp(prefix="lamina-toy-model-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (Path(directory) / "config.json").write_text(json.dumps(described))
    return directory


def engine_config(
    is_async: bool,
    blocks: int,
    policy: str,
    step_tokens: int,
    settings: dict[str, Any],
    drafts: int = 0,
) -> Any:
    """The CPU platform itself would not schedule asynchronously, nor would vLLM with drafts that
    the host looks up: what its scheduler counts is the same for all that drafts."""
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4}
    config = EngineArgs(
        model=_model_directory(),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=16,
        speculative_config=speculative if drafts else None,
        kv_transfer_config={
            "kv_connector": "LaminaConnector",
            "kv_connector_module_path": "lamina.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "lamina.chunk_tokens": CHUNK,
                "lamina.layerwise_overlap": 1,
                "lamina.model_id": "toy",
                **{f"lamina.{name}": value for name, value in settings.items()},
            },
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = blocks
    return config


def kv_config(blocks: int) -> Any:
    """One group; tensors as 0.26 or as 0.32 describes them."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    page = spec.page_size_bytes
    tensor: Any = KVCacheTensor
    if "layers" in tensor.__dataclass_fields__:
        size = page * blocks
        strides = {"layer_stride": size, "block_stride": page}
        tensors = [tensor(size=size * LAYERS, layers=NAMES, **strides)]
    else:
        tensors = [tensor(size=page * blocks, shared_by=[name]) for name in NAMES]
    groups = [KVCacheGroupSpec(NAMES, spec)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
