"""What a miss costs: the connector's own time per request, as a share of first-token time.

    make bench-vllm-miss          (vLLM's CPU build; a minute or two)

Every prompt is new, so every lookup misses; the prompts are stored as well, as in production. The
time spent in each of the connector's methods is summed up: first-token times with and without it
differ by less than they vary on a small machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lamina_lab.bench.processes import private_socket, server_process
from tests.vllm.tiny_llama import write_model

PROMPT_TOKENS = 1500
REQUESTS = {1: 16, 4: 24, 8: 32}
"""Requests by how many are served at once."""
METHODS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "get_finished",
)

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    rows = {}
    with tempfile.TemporaryDirectory() as directory, private_socket() as socket:
        model = write_model(Path(directory) / "model")
        with server_process(socket, "--arena", "1GiB", "--chunk-tokens", "64"):
            spent = time_connector()
            engine = start(model, socket)
            measure(engine, 1, 4)  # warms up
            for at_once, requests in REQUESTS.items():
                spent.clear()
                times_ms = measure(engine, at_once, requests)
                own_ms = sum(spent.values()) / requests * 1e3
                ttft_ms = statistics.median(times_ms)
                rows[at_once] = {
                    "ttft_ms": ttft_ms,
                    "connector_ms": own_ms,
                    "share": own_ms * at_once / ttft_ms,
                }
            engine.engine_core.shutdown()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for at_once, row in rows.items():
        print(
            f"{at_once} at once: first token after {row['ttft_ms']:.1f} ms, of which the connector "
            f"{row['connector_ms'] * at_once:.2f} ms: {row['share']:.2%}"
        )


def time_connector() -> dict[str, float]:
    """Seconds spent in each of the connector's methods, from now on."""
    from lamina.engines.vllm import LaminaConnector

    spent: dict[str, float] = {}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return call

    for name in METHODS:
        setattr(LaminaConnector, name, timed(name, getattr(LaminaConnector, name)))
    return spent


def start(model: Path, socket: Path) -> Any:
    """An in-process engine with the connector."""
    import torch
    from vllm import LLM

    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=32,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=2048,
        enforce_eager=True,
        num_gpu_blocks_override=640,
        max_num_seqs=8,
        kv_transfer_config={
            "kv_connector": "LaminaConnector",
            "kv_connector_module_path": "lamina.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lamina.socket": str(socket),
                "lamina.chunk_tokens": 64,
                "lamina.suspect_after_ms": 1000,
            },
        },
    )
    return llm.llm_engine


def measure(engine: Any, at_once: int, requests: int) -> list[float]:
    """First-token times in ms of `requests` fresh prompts, `at_once` of them together."""
    from vllm import SamplingParams

    rng = np.random.default_rng(at_once)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    times = []
    for group in range(requests // at_once):
        began = {}
        for member in range(at_once):
            prompt = rng.integers(3, 512, PROMPT_TOKENS).tolist()
            name = f"{requests}-{at_once}-{group}-{member}"
            began[name] = time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    times.append((time.perf_counter() - began[output.request_id]) * 1e3)
    return times


if __name__ == "__main__":
    main()
