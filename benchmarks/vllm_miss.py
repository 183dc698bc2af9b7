"""What a miss costs: first-token time of fresh prompts with and without the connector.

    make bench-vllm-miss          (vLLM's CPU build; a few minutes)

Engines with and without the connector run one after the other, several times, in one process and
against one `lamina serve`; every prompt is new, so every lookup misses. With the connector the
prompts are stored as well, as in production.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lamina.bench.processes import private_socket, server_process
from tests.vllm.tiny_llama import write_model

PROMPT_TOKENS, ROUNDS = 1500, 3
REQUESTS = {1: 24, 4: 32, 8: 48}
"""Requests a round by how many are served at once."""

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    ttft_ms: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    with tempfile.TemporaryDirectory() as directory, private_socket() as socket:
        model = write_model(Path(directory) / "model")
        options = ("--arena", "1GiB", "--chunk-tokens", "64")
        with server_process(socket, *options):
            for round_number in range(ROUNDS):
                for cached in (False, True):
                    engine = start(model, socket if cached else None)
                    for at_once, requests in REQUESTS.items():
                        times = measure(engine, at_once, requests, seed=round_number)
                        ttft_ms[cached].setdefault(at_once, []).extend(times)
                    engine.engine_core.shutdown()
    rows = {
        at_once: {
            "without_ms": statistics.median(ttft_ms[False][at_once]),
            "with_ms": statistics.median(ttft_ms[True][at_once]),
        }
        for at_once in REQUESTS
    }
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for at_once, row in rows.items():
        cost = row["with_ms"] / row["without_ms"] - 1
        print(
            f"{at_once} at once: {row['without_ms']:.2f} ms without, {row['with_ms']:.2f} ms with: "
            f"{cost:+.2%}"
        )


def start(model: Path, socket: Path | None) -> Any:
    """An in-process engine, with the connector if `socket` is given."""
    from vllm import LLM

    transfer = {
        "kv_connector": "LaminaConnector",
        "kv_connector_module_path": "lamina.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lamina.socket": str(socket),
            "lamina.chunk_tokens": 64,
            "lamina.suspect_after_ms": 1000,
        },
    }
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=32,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        num_gpu_blocks_override=640,
        max_num_seqs=8,
        kv_transfer_config=transfer if socket is not None else None,
    )
    return llm.llm_engine


def measure(engine: Any, at_once: int, requests: int, seed: int) -> list[float]:
    """First-token times in ms of `requests` fresh prompts, `at_once` of them together."""
    from vllm import SamplingParams

    rng = np.random.default_rng((seed, at_once))
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    times = []
    for group in range(requests // at_once):
        began = {}
        for member in range(at_once):
            prompt = rng.integers(3, 512, PROMPT_TOKENS).tolist()
            name = f"{seed}-{at_once}-{group}-{member}"
            began[name] = time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    times.append((time.perf_counter() - began[output.request_id]) * 1e3)
    return times[at_once:]  # the first group warms up


if __name__ == "__main__":
    main()
