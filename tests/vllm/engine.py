"""vLLM in this process, stepped by hand, with Lamina as its connector.

The vLLM under test is the CPU build with its real scheduler, block pool and model runner. A test
may look at all of them: what it compares are tokens, logarithms of probabilities and the bytes of
pages. `forget` leaves nothing in the engine that a request could hit: the prefix cache is empty and
every free page is full of garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lamina.content import CLOCK_SLACK_NS, wall_clock_ns
from lamina.engines.vllm.began import beginnings
from lamina.keys import KeyChain
from tests.support.server import ServerThread
from tests.support.wait import PATIENT, eventually
from tests.vllm.tiny_llama import SPECIAL_TOKENS, VOCABULARY

BLOCK_TOKENS = 32
"""The least that vLLM's CPU attention takes."""
CHUNK_TOKENS = 64
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
POISON = 100.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""What vLLM's CPU build needs, before its import, to be quick and quiet offline, beside a server on
the same cores, and in one process."""

Pages = npt.NDArray[np.uint8]
Forced = dict[str, Any]


def random_tokens(count: int, *seed: int) -> list[int]:
    """Tokens of a prompt that no other seed gives."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(SPECIAL_TOKENS, VOCABULARY, count)]


@dataclass
class Answer:
    """What a request gave: `tokens` with their `logprobs`, why it ended, tokens found in a cache.

    `margin` is the least distance between a token's and its rival's logarithm: where it is large,
    another order of additions does not change the tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    margin: float
    reason: str
    cached: int
    margins: list[float] = field(default_factory=list, compare=False)
    """The same by token."""


class Engine:
    """`blocks` of KV memory, one of which vLLM keeps for itself. Settings go by `lamina.` name;
    `arguments` are vLLM's own."""

    def __init__(
        self,
        model: Path,
        socket: Path,
        blocks: int = 256,
        arguments: dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        from vllm import LLM

        eventually(lambda: is_old(model))
        beginnings.take()  # a test may have made a configuration and no engine
        self._llm = LLM(
            **{
                "model": str(model),
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                "max_model_len": 2048,
                "max_num_seqs": 32,
                "enforce_eager": True,
                "num_gpu_blocks_override": blocks,
                "kv_transfer_config": connector_config(socket, **settings),
                **(arguments or {}),
            }
        )
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.blocks = blocks
        self._tensors = self._memory_of(core.model_executor)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.answers: dict[str, Answer] = {}
        self.blocks_of: dict[str, list[int]] = {}
        """The blocks that requests had when they were last seen, by name."""
        self.preempted: set[str] = set()
        """Requests that lost their blocks on the way, since the last `forget`."""
        if self.side.client.is_usable:
            eventually(self.find_identity)

    def _memory_of(self, executor: Any) -> Any:
        """The KV of all layers, where it is in this process."""
        return executor.driver_worker.worker.model_runner.kv_caches

    @property
    def connector(self) -> Any:
        """The scheduler's side."""
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        """Its part that is ours alone, also where the connector is one of a MultiConnector's."""
        ours = [c for c in getattr(self.connector, "_connectors", [self.connector])
                if hasattr(c, "_scheduler")]  # fmt: skip
        return ours[0]._scheduler

    def find_identity(self) -> bool:
        """Whether what names this engine's KV is known; without a server it cannot be."""
        self.side.client.poll()
        self.side.find_identity()
        return self.side._namespace is not None

    @property
    def worker(self) -> Any:
        """The worker's side, of whichever of a MultiConnector's is ours."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        ours = [c for c in getattr(group, "_connectors", [group]) if hasattr(c, "_worker")]
        return ours[0]

    # Requests

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int = 4,
        salt: str | None = None,
        lora: Any = None,
        **forced: object,
    ) -> None:
        """Add a request for `tokens` greedy tokens; `forced` are its `lamina.` parameters, `lora`
        its adapter."""
        from vllm import SamplingParams

        params = {f"lamina.{key}": value for key, value in forced.items()}
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            request["cache_salt"] = salt
        self._engine.add_request(
            name,
            request,
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                logprobs=2,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": params},
            ),
            lora_request=lora,
        )
        self.blocks_of[name] = []

    def abort(self, name: str) -> None:
        self._engine.abort_request([name], internal=False)

    def ask(self, prompt: Sequence[int], tokens: int = 4, **forced: Any) -> Answer:
        """Answer one request alone."""
        self.add("alone", prompt, tokens, **forced)
        return self.run()["alone"]

    @property
    def is_answered(self) -> bool:
        """Whether no request is left."""
        return not self._engine.has_unfinished_requests()

    def request(self, name: str) -> Any:
        """vLLM's own view of a request; None when it is gone."""
        return next(
            (r for r in self.scheduler.requests.values() if r.request_id.startswith(name + "-")),
            None,
        )

    def blocks_of_running(self, name: str) -> list[int]:
        """The blocks that a request has now; also in the middle of a step."""
        request = self.request(name)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(blocks)

    # Steps

    def step(self) -> None:
        """One step; the answers of requests that ended in it go to `answers`."""
        for output in self._engine.step():
            if output.finished:
                self.answers[output.request_id] = _answer(output)
        for name in self.blocks_of:
            request = self.request(name)
            if request is not None:
                (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
                self.blocks_of[name] = blocks or self.blocks_of[name]
                if request.num_preemptions:
                    self.preempted.add(name)

    def run(self) -> dict[str, Answer]:
        """Step until nothing is left to do; returns what was answered since the last call."""

        def is_done() -> bool:
            self.step()
            return self.is_answered and not self.scheduler.has_requests()

        eventually(is_done, patience_s=60)
        answers, self.answers = self.answers, {}
        return answers

    def step_until(self, condition: Callable[[], object]) -> None:
        """Step until `condition` holds."""

        def holds() -> object:
            self.step()
            return condition()

        eventually(holds)

    def in_thread(self, call: Callable[[], Any]) -> Future[Any]:
        """Let `call` step the engine on another thread, so that a test can hold slices back."""
        return self._thread.submit(call)

    # Memory

    def forget(self, connector_too: bool = False) -> None:
        """Empty vLLM's prefix cache and poison every free page. No request may be running. The
        weights are looked at, for which the next request would wait a step.

        With `connector_too` as after a change of weights: nothing stored so far may be hit again.
        """
        done = self._llm.reset_prefix_cache(reset_connector=connector_too)
        assert done, "blocks are still held"
        self.poison_free()
        self.look_at_weights()
        self.preempted.clear()
        self.blocks_of.clear()

    def look_at_weights(self) -> None:
        """Find out the epoch after a reset, as the worker's side does when a request asks."""
        epochs = self.side._identity.epochs
        if epochs.current is None:
            epochs.looked(epochs.resets, [self.worker._worker._weights.change()])
            self.side.find_identity()

    def poison_free(self) -> None:
        """Fill the pages of all free blocks with garbage."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        for tensor in self._tensors:
            tensor[free] = POISON

    def pages(self, blocks: Sequence[int]) -> Pages:
        """The bytes of blocks, shape (layers, blocks, page bytes)."""
        return np.stack(
            [
                tensor[list(blocks)].reshape(len(blocks), -1).numpy().view(np.uint8)
                for tensor in self._tensors
            ]
        )

    def pages_of(self, name: str, tokens: int) -> Pages:
        """The pages of a request's first `tokens` tokens, also after its end if nothing ran."""
        return self.pages(self.blocks_of[name][: tokens // BLOCK_TOKENS])

    @contextmanager
    def late(self) -> Iterator[None]:
        """Meanwhile it is past the deadline of every transfer that was begun before."""
        client = self.worker._worker.client
        settings = client.settings
        late_s = max(settings.retrieve_timeout_ms, settings.store_timeout_ms) / 1000
        with pytest.MonkeyPatch.context() as patch:
            for clock in (client, client._watchdog):
                patch.setattr(clock, "_clock", lambda: time.monotonic() + late_s)
            yield

    def keep_cached(self, blocks: Sequence[int]) -> None:
        """Let vLLM's prefix cache forget all other blocks."""
        self.pool.evict_blocks(set(range(1, self.blocks)) - set(blocks))

    def occupy_all_but(self, blocks: int) -> Callable[[], None]:
        """Take free blocks away until `blocks` are left; the result gives them back."""
        taken = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - blocks)
        return lambda: self.pool.free_blocks(taken)

    def keys_of(self, prompt: Sequence[int]) -> list[bytes]:
        """The keys of a prompt's full chunks."""
        return KeyChain(self.side._namespace, CHUNK_TOKENS).extend(prompt, {})

    # Ends

    def end_requests(self) -> None:
        """Abort what a failed test has left."""
        self._engine.abort_request(list(self.blocks_of), internal=False)
        self.run()
        self.blocks_of.clear()

    def assert_idle(self, server: ServerThread | None = None) -> None:
        """Nothing is held: neither in vLLM's pool nor at the server."""
        assert not self.scheduler.requests
        assert not self.connector.has_pending_push_work()
        assert self.pool.get_num_free_blocks() == self.blocks - 1
        if server is not None:
            eventually(lambda: not server.gauges()["leases"] and not server.gauges()["pins"])

    def close(self) -> None:
        self._thread.shutdown()
        self._engine.engine_core.shutdown()


def is_old(model: Path) -> bool:
    """Whether its files were surely written before now, by the clock that dates them."""
    newest = max(path.lstat().st_ctime_ns for path in model.iterdir())
    return newest + CLOCK_SLACK_NS < wall_clock_ns()


def connector_config(server: Path, **settings: object) -> dict[str, Any]:
    """`kv_transfer_config`, with limits for a busy small host."""
    settings = {"socket": str(server), "chunk_tokens": CHUNK_TOKENS, **PATIENT, **settings}
    return {
        "kv_connector": "LaminaConnector",
        "kv_connector_module_path": "lamina.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"lamina.{name}": value for name, value in settings.items()},
    }


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    ranked = [
        sorted((entry.logprob for entry in step.values()), reverse=True)
        for step in completion.logprobs or []
    ]
    return Answer(
        tokens,
        [best[0] for best in ranked],
        min((best[0] - best[1] for best in ranked), default=0.0),
        completion.finish_reason,
        output.num_cached_tokens,
        [best[0] - best[1] for best in ranked],
    )
