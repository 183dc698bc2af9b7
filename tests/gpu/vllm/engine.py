"""vLLM on a GPU, in this process, stepped by hand; and the server beside it.

The same engine as in `tests/vllm`, with other hardware: bfloat16, CUDA graphs, model runner V1 or
V2, synchronous or asynchronous scheduling. On a machine without a GPU it runs on vLLM's CPU build,
to try the tests themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamina_lab.bench.vllm.models import MODELS, SEEDED, Model
from tests.support.wait import eventually
from tests.vllm.engine import POISON, Answer, Engine, Pages, connector_config

BLOCKS = 1024
ON_GPU = os.environ.get("LAMINA_VLLM_ON_CPU") != "1"


class Configuration(NamedTuple):
    """How vLLM runs."""

    runner: str
    async_scheduling: bool
    on_gpu: bool
    shape: str = "small"

    @property
    def model(self) -> Model:
        return MODELS[self.shape if self.on_gpu else "tiny"]

    def __str__(self) -> str:
        scheduling = "async" if self.async_scheduling else "sync"
        return f"{self.runner}-{scheduling}-{self.shape}{'' if self.on_gpu else '-cpu'}"


class GpuEngine(Engine):
    """`Engine` on what `configuration` says."""

    def __init__(self, configuration: Configuration, model: Path, socket: Path) -> None:
        from vllm import LLM

        shape = configuration.model
        arguments: dict[str, Any] = {}
        if configuration.on_gpu:
            arguments["async_scheduling"] = configuration.async_scheduling
            arguments["kv_cache_memory_bytes"] = 1 << 30  # several engines may share the GPU
        self._llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            load_format=SEEDED,
            worker_extension_cls="lamina_lab.bench.vllm.worker.WorkerExtension",
            dtype=shape.dtype,
            block_size=shape.block_tokens,
            max_model_len=2048,
            max_num_seqs=32,
            enforce_eager=not configuration.on_gpu,
            gpu_memory_utilization=0.1,
            num_gpu_blocks_override=BLOCKS,
            kv_transfer_config=connector_config(socket, model_id=SEEDED),
            **arguments,
        )
        self.configuration = configuration
        self.block_tokens = shape.block_tokens
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self.scheduler = self._core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.blocks = BLOCKS
        worker = self._core.model_executor.driver_worker.worker
        self._tensors = worker.model_runner.kv_caches
        self._thread = ThreadPoolExecutor(1)
        self.answers = {}
        self.blocks_of = {}
        self.preempted = set()
        self.hooks_fired: list[bool] = []
        """By forward that read a retrieve that was still open: whether its layers' hooks fired."""
        eventually(self.find_identity)
        self._note_forwards()

    def _note_forwards(self) -> None:
        side = self.worker._worker
        before_forward = side.before_forward

        def note(hooks_fire: bool, *more: Any) -> None:
            if side._step_gates is not None:
                self.hooks_fired.append(hooks_fire)
            before_forward(hooks_fire, *more)

        side.before_forward = note

    def run(self) -> dict[str, Answer]:
        """Step until nothing is left to do, in the pipeline of steps either."""

        def is_done() -> bool:
            self.step()
            return (
                self.is_answered
                and not self.scheduler.has_requests()
                and not self._core.batch_queue
            )

        eventually(is_done, patience_s=60)
        answers, self.answers = self.answers, {}
        return answers

    def synchronize(self) -> None:
        """Wait for all that was enqueued on the GPU."""
        if self.configuration.on_gpu:
            import torch

            torch.cuda.synchronize()

    def poison_free(self) -> None:
        self.synchronize()
        super().poison_free()
        self.synchronize()

    def pages(self, blocks: Sequence[int]) -> Pages:
        uint8 = _uint8()
        self.synchronize()
        return np.stack(
            [
                tensor[list(blocks)].reshape(len(blocks), -1).cpu().view(uint8).numpy()
                for tensor in self._tensors
            ]
        )

    def pages_of(self, name: str, tokens: int) -> Pages:
        return self.pages(self.blocks_of[name][: tokens // self.block_tokens])

    @property
    def page_bytes(self) -> int:
        return int(self._tensors[0][0].nbytes)

    def garbage_page(self) -> bytes:
        """A page full of values that no KV has."""
        return bytes((self._tensors[0][0] * 0 + POISON).cpu().view(_uint8()).numpy().tobytes())

    def assert_all_idle(self, server: ValvedServer) -> None:
        """Nothing is held: neither in vLLM's pool nor at the server."""
        self.assert_idle()
        eventually(lambda: not server.gauges()["leases"] and not server.gauges()["pins"])


class ValvedServer:
    """`valved_server` in a process of its own."""

    def __init__(self, socket: Path, device: str) -> None:
        self.socket = socket
        command = [sys.executable, "-m", "tests.gpu.vllm.valved_server", str(socket), device]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        eventually(lambda: self.gauges()["filled"], patience_s=60)

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server died: its error is above"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def gauges(self) -> dict[str, float]:
        return self.call("gauges")

    def retrieves(self, pace_ms: float = 0.0, fails_after: int | None = None) -> None:
        """Each copy of a retrieve takes `pace_ms` longer; one fails once `fails_after` have
        passed."""
        self.call("retrieves", pace_ms=pace_ms, fails_after=fails_after)

    def write(self, key: bytes, offset: int, data: bytes) -> bytes:
        """Overwrite bytes of a stored chunk; returns what was there."""
        reply = self.call("write", key=key.hex(), offset=offset, data=data.hex())
        return bytes.fromhex(reply["old"])

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()


def _uint8() -> Any:
    import torch

    return torch.uint8


def modes(layers: int) -> dict[str, dict[str, Any]]:
    """Ways to retrieve a hit: whole, 1 and 3 layers a slice, asynchronous and synchronous."""
    widths = {"whole": layers, "1-layer": 1, "3-layers": 3}
    return {
        f"{name}-{how}": {"layerwise_overlap": width, "release_after_slices": after}
        for name, width in widths.items()
        for how, after in (("async", 1), ("sync", 0))
    }
