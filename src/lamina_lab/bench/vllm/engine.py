"""vLLM as it runs in production: `AsyncLLM`, its engine core in a process of its own.

Times are a client's: from handing a request over until its tokens arrive. Works with 0.26 to 0.32.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.errors import LaminaError
from lamina_lab.bench.vllm.models import SEEDED, Model

MAX_REQUESTS = 16
_RESET_PATIENCE_S = 60.0
_ANSWER_PATIENCE_S = 120.0


@dataclass
class Answer:
    """What a request gave. `times_s` are arrivals, counted from its sending, one an output.
    `sent_s` is that time by `time.monotonic`; `name` is what vLLM calls the request."""

    name: str = ""
    sent_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """By token: how far its logarithm is above its rival's; only where asked for."""
    cached_tokens: int = 0
    reason: str = ""

    @property
    def ttft_ms(self) -> float:
        return self.times_s[0] * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first."""
        if len(self.tokens) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.tokens) - 1) * 1e3


class Engine:
    """One engine. Make it with `start`, on a running event loop."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    @classmethod
    def start(
        cls,
        model: Model,
        directory: Path,
        connector: Mapping[str, Any] | None,
        batched_tokens: int | None = None,
        **overrides: Any,
    ) -> Engine:
        """Start vLLM on the model in `directory`, with the defaults of `vllm serve`.

        `batched_tokens` is `max_num_batched_tokens`. Blocks until the engine is ready.
        """
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            "model": str(directory),
            "skip_tokenizer_init": True,
            "load_format": SEEDED,
            "worker_extension_cls": "lamina_lab.bench.vllm.worker.WorkerExtension",
            "dtype": model.dtype,
            "block_size": model.block_tokens,
            "max_model_len": model.max_tokens,
            "max_num_seqs": MAX_REQUESTS,
            "num_gpu_blocks_override": model.gpu_blocks,
            "enable_prefix_caching": True,
            "enforce_eager": model.eager,
            "disable_log_stats": True,
        }
        if batched_tokens is not None:
            arguments["max_num_batched_tokens"] = batched_tokens
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        arguments.update(overrides)
        return cls(
            AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
            )
        )

    @property
    def batched_tokens(self) -> int:
        """`max_num_batched_tokens` as vLLM chose it."""
        return int(self._llm.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def description(self) -> dict[str, str]:
        """What vLLM chose by itself and a reader should know."""
        config = self._llm.vllm_config
        return {
            "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
            "async_scheduling": str(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    async def ask(
        self,
        prompt: Sequence[int],
        parameters: Mapping[str, Any] | None = None,
        tokens: int = 1,
        with_margins: bool = False,
        on_output: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """Answer one prompt greedily with `tokens` tokens. `parameters` go to the connector.

        Raises `LaminaError` when no answer comes. `on_output` is called after each arrival.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if with_margins else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": dict(parameters)} if parameters else None,
        )
        answer = Answer(f"bench-{next(self._numbers)}")
        request = {"prompt_token_ids": list(prompt)}
        started_s = answer.sent_s = time.monotonic()
        async for output in self._llm.generate(request, sampling, answer.name):
            completion = output.outputs[0]
            if completion.token_ids:
                answer.times_s.append(time.monotonic() - started_s)
                answer.tokens += completion.token_ids
                answer.margins += _margins(completion.logprobs)
            answer.cached_tokens = max(answer.cached_tokens, output.num_cached_tokens or 0)
            answer.reason = completion.finish_reason or answer.reason
            if on_output is not None:
                on_output(answer)
        if not answer.tokens:
            raise LaminaError(f"a request gave no tokens: {answer.reason}", "See vLLM's log")
        return answer

    async def ask_together(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: Mapping[str, Any] | None = None,
        tokens: int = 1,
        with_margins: bool = False,
    ) -> list[Answer]:
        """Answer prompts that are sent at once."""
        asked = [self.ask(prompt, parameters, tokens, with_margins) for prompt in prompts]
        return list(await asyncio.wait_for(asyncio.gather(*asked), _ANSWER_PATIENCE_S))

    async def forget(self) -> None:
        """Empty the prefix cache in GPU memory; what the connector keeps stays.

        Waits for blocks that are still held by stores. Raises `LaminaError` when they remain so.
        """
        until_s = time.monotonic() + _RESET_PATIENCE_S
        while not await self._llm.reset_prefix_cache():
            if time.monotonic() > until_s:
                raise LaminaError("vLLM's blocks stay held", "Look at the connector's log")
            await asyncio.sleep(0.02)

    async def call_worker(self, method: str, *arguments: Any) -> Any:
        """Call a method of `worker.WorkerExtension`; returns its result."""
        (result,) = await self._llm.collective_rpc(method, args=arguments)
        return result

    def close(self) -> None:
        """Stop the engine core."""
        self._llm.shutdown()
        del self._llm  # at the interpreter's end its destructor would fail


def _margins(logprobs: Sequence[Mapping[int, Any]] | None) -> list[float]:
    margins = []
    for ranked in logprobs or ():
        best, second = sorted((entry.logprob for entry in ranked.values()), reverse=True)[:2]
        margins.append(best - second)
    return margins
