"""`lamina bench vllm`: one start of one cache and one engine."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from lamina import __version__
from lamina_lab.bench.vllm.arms import parse_arms
from lamina_lab.bench.vllm.chat_arms import parse_chat_arms, with_memory_for
from lamina_lab.bench.vllm.chat_measure import ChatBench
from lamina_lab.bench.vllm.connectors import cache_of, runner_of
from lamina_lab.bench.vllm.measure import Bench, BenchSpec, Progress
from lamina_lab.bench.vllm.models import model_named
from lamina_lab.bench.vllm.results import Start


def run_bench(spec: BenchSpec, path: Path | None, progress: Progress) -> Start:
    """Start the cache and the engine, measure, and stop them.

    Raises `LaminaError` for what cannot be run; what was measured before is in `path`.
    """
    model = model_named(spec.model)
    if spec.rates:
        arms = parse_chat_arms(spec.arms, model.layers, spec.connector)
        model = with_memory_for(model, arms)
    else:
        arms = parse_arms(spec.arms, model.layers, spec.connector)
    runner = spec.runner or runner_of(spec.connector)
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    if spec.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    start = Start(
        connector=spec.connector,
        model=spec.model,
        command=shlex.join(["lamina", *sys.argv[1:]]),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=_host(),
        workload=model.workload,
        is_exact=spec.batch_invariant,
    )
    with cache_of(spec.connector, model) as cache:
        bench = (ChatBench if spec.rates else Bench)(
            spec, model, arms, cache, start, path, progress
        )
        try:
            asyncio.run(bench.run(model.write(_model_directory(spec.model))))
        except Exception as error:
            bench.fail(f"ended by {type(error).__name__}: {error}")
            raise
    return start


def _model_directory(name: str) -> Path:
    """The same every time: vLLM's compiled code is kept by it."""
    return Path(tempfile.gettempdir()) / f"lamina-bench-{name}"


def _host() -> dict[str, str]:
    import torch
    import vllm

    return {
        "gpu": _gpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vllm": vllm.__version__,
        "lamina": __version__,
    }


def _gpu() -> str:
    """Name and driver; asked of another process, for this one must not touch CUDA before vLLM."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return found.stdout.splitlines()[0]
