"""vLLM with two tensor-parallel ranks: its scheduler in this process, stepped by hand, and a
process for each rank, whose memory is looked at by remote calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.engine import POISON, Engine, Pages

RANKS = 2


class Extension:
    """What a rank's worker does for a test; vLLM makes it one of the worker's bases."""

    model_runner: Any

    def lamina_pid(self) -> int:
        return os.getpid()

    def lamina_poison(self, blocks: list[int]) -> None:
        for tensor in self.model_runner.kv_caches:
            tensor[blocks] = POISON

    def lamina_pages(self, blocks: list[int]) -> list[bytes]:
        """The bytes of these blocks, by layer."""
        return [
            tensor[blocks].contiguous().numpy().tobytes() for tensor in self.model_runner.kv_caches
        ]


class RanksEngine(Engine):
    """`Engine` with `RANKS` ranks. Their transfers cannot be held from here by the worker's side,
    only by the server's."""

    def __init__(self, model: Path, socket: Path, blocks: int = 256, **settings: object) -> None:
        arguments = {
            "tensor_parallel_size": RANKS,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": f"{__name__}.Extension",
        }
        super().__init__(model, socket, blocks, arguments, **settings)
        self.pids: list[int] = self.call("lamina_pid")

    def _memory_of(self, executor: Any) -> Any:
        return None

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `Extension` on every rank; what each returns."""
        return list(self._llm.collective_rpc(method, args=arguments))

    def look_at_weights(self) -> None:
        """A step asks the ranks, for the sake of a request."""
        if self.side._identity.epochs.current is None:
            self.ask([7, 8, 9], 1, retrieve=False, store=False)

    def poison_free(self) -> None:
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        self.call("lamina_poison", free)

    def pages(self, blocks: Sequence[int]) -> Pages:
        """Shape (ranks, layers, bytes of all blocks)."""
        ranks = self.call("lamina_pages", list(blocks))
        return np.array([[np.frombuffer(layer, np.uint8) for layer in rank] for rank in ranks])
