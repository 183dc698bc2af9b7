"""What the benchmark needs inside vLLM's worker. vLLM imports this module there, by name
(`worker_extension_cls`), before it loads the model: so the loader is registered in time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from lamina_lab.bench.vllm.models import SEEDED

_SEED = 1234
_GAINS = {
    "qkv_proj": 2.2,
    "q_proj": 2.2,
    "k_proj": 2.2,
    "v_proj": 1.5,
    "o_proj": 1.5,
    "lm_head": 4.0,
}
"""Standard deviation of a projection's outputs for normal inputs. Sharp attention and loud values:
with vLLM's own dummy weights attention hardly matters, and wrong KV gives the same tokens."""
_LINK_ROUNDS = 5


@register_model_loader(SEEDED)
class SeededLoader(DummyModelLoader):
    """Norms 1, embeddings N(0, 1), projections N(0, gain / sqrt(fan in)), from a fixed seed."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        with torch.no_grad():
            for number, (name, weight) in enumerate(sorted(model.named_parameters())):
                generator = torch.Generator(weight.device).manual_seed(_SEED + number)
                _fill(name, weight, generator)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.dim() == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif "embed_tokens" in name:
        weight.normal_(0.0, 1.0, generator=generator)
    else:
        gain = _GAINS.get(name.split(".")[-2], 1.0)
        weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generator)


class WorkerExtension:
    """Methods that vLLM's worker gets besides its own, for `collective_rpc`."""

    model_runner: Any
    _lamina_saved: list[tuple[torch.Tensor, int, torch.Tensor]]

    def lamina_link_gbps(self, nbytes: int) -> float:
        """The ceiling: one plain copy of `nbytes` from pinned memory, in GB/s."""
        device = self.model_runner.kv_caches[0].device
        on_gpu = device.type == "cuda"
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        rates = []
        for _ in range(_LINK_ROUNDS):
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(host, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            rates.append(nbytes / (time.perf_counter() - started) / 1e9)
        return max(rates)

    def lamina_clear_kv(self) -> None:
        """Zero all KV memory. No request may run."""
        for tensor in self.model_runner.kv_caches:
            tensor.zero_()

    def lamina_used_blocks(self) -> list[int]:
        """The blocks that hold anything but zeros, in every layer."""
        used = [(tensor != 0).flatten(1).any(1) for tensor in self.model_runner.kv_caches]
        blocks: list[int] = torch.stack(used).all(0).nonzero().flatten().tolist()
        return blocks

    def lamina_replace_pages(self, layers: list[int], block: int, source: int) -> None:
        """Put another block's pages in place of a block's, in some layers, until
        `lamina_restore_pages`. (To exchange two blocks would change nothing: attention does not
        ask in what order KV lies in memory.)"""
        self._lamina_saved = []
        for layer in layers:
            tensor = self.model_runner.kv_caches[layer]
            self._lamina_saved.append((tensor, block, tensor[block].clone()))
            tensor[block] = tensor[source]

    def lamina_restore_pages(self) -> None:
        """Undo `lamina_replace_pages`."""
        for tensor, block, pages in self._lamina_saved:
            tensor[block] = pages
        self._lamina_saved = []
