"""Two data-parallel engines of one vLLM: what one has stored the other hits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import BLOCK_TOKENS, CHUNK_TOKENS, connector_config, is_old, random_tokens

HIT = 4 * CHUNK_TOKENS
PROMPT = random_tokens(HIT + 30, 96)
MODES: tuple[dict[str, Any], ...] = (
    {"layerwise_overlap": "auto"},
    {"layerwise_overlap": 1},
    {"layerwise_overlap": 3, "release_after_slices": 0},
    {"layerwise_overlap": 0},
)


async def ask(llm: Any, name: str, rank: int, **forced: Any) -> Any:
    """What the engine of that rank answers."""
    from vllm import SamplingParams

    params = {f"lamina.{key}": value for key, value in forced.items()}
    extra: dict[str, Any] = {"kv_transfer_params": params}
    sampling = SamplingParams(
        temperature=0, max_tokens=4, detokenize=False, ignore_eos=True, extra_args=extra
    )
    last = None
    request = {"prompt_token_ids": PROMPT}
    async for output in llm.generate(request, sampling, name, data_parallel_rank=rank):
        last = output
    assert last is not None
    return last


async def scenario(llm: Any, server: ServerThread) -> None:
    first = await ask(llm, "stores", 0)
    tokens = list(first.outputs[0].token_ids)
    index = server.server.index
    await asyncio.to_thread(eventually, lambda: len(index) == HIT // CHUNK_TOKENS)
    for number, mode in enumerate(MODES):
        assert await llm.reset_prefix_cache()
        found = await ask(llm, f"hits{number}", 1, store=False, **mode)
        assert (list(found.outputs[0].token_ids), found.num_cached_tokens) == (tokens, HIT)


def test_one_engine_hits_what_the_other_has_stored(
    model: Path, module_server: ServerThread
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    eventually(lambda: is_old(model))

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="float32",
                block_size=BLOCK_TOKENS,
                max_model_len=2048,
                enforce_eager=True,
                num_gpu_blocks_override=256,
                data_parallel_size=2,
                kv_transfer_config=connector_config(module_server.settings.socket),
            )
        )
        try:
            await scenario(llm, module_server)
        finally:
            llm.shutdown()

    asyncio.run(run())
    gauges = module_server.gauges
    eventually(lambda: not (gauges()["leases"] or gauges()["pins"] or gauges()["sessions"]))
