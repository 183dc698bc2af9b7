"""What the connector's scheduler side costs a step, by requests that run.

    make bench-vllm-scheduler        (vLLM's CPU build; no model runs)

vLLM's real scheduler with scripted transfers (`tests/vllm/scheduler_harness`). All requests decode;
at rest, and while one more request's retrieve is under way, whose blocks are looked at in every
step. The time of the connector's methods that vLLM's scheduler calls, median of 100 steps.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any
from unittest import mock

from tests.vllm.engine import ENVIRONMENT

RUNNING = (8, 64, 256)
STEPS = 100
PROMPT_TOKENS = 200
METHODS = ("build_connector_meta", "update_connector_output")


def main() -> None:
    os.environ.update(ENVIRONMENT)
    for running in RUNNING:
        at_rest_us, retrieving_us = measure(running)
        print(
            f"{running} running: {at_rest_us:.0f} us a step, {retrieving_us:.0f} beside a retrieve"
        )


def measure(running: int) -> tuple[float, float]:
    from tests.vllm import scheduler_harness as harness
    from tests.vllm.scheduler_config import engine_config

    def larger(*arguments: Any) -> Any:
        config = engine_config(*arguments)
        config.scheduler_config.max_num_seqs = 2 * running + 8
        return config

    blocks = (running + 4) * 40
    with mock.patch.object(harness, "engine_config", larger):
        # Its chunks are an eighth of real ones: generated ones are left out.
        settings = {"store_decode": False}
        rig = harness.Rig("async", blocks=blocks, step_tokens=8192, settings=settings)
    rig.client.is_swift = True
    for number in range(running):
        rig.add(f"r{number}", harness.prompt(number + 10, PROMPT_TOKENS), max_tokens=400)
    rig.until(lambda: all(rig.tokens[f"r{number}"] for number in range(running)))
    at_rest_us = steps_us(rig)
    rig.client.is_swift = False
    asked = harness.prompt(1, PROMPT_TOKENS)
    rig.hold(asked)
    rig.add("hit", asked, layerwise_overlap=1, release_after_slices=1)
    rig.until(lambda: rig.client.retrieves)
    return at_rest_us, steps_us(rig)


def steps_us(rig: Any) -> float:
    """The median over steps of the time in the connector's methods."""
    spent: list[float] = []
    current = 0.0
    connector = rig.connector
    originals = {name: getattr(connector, name) for name in METHODS}

    def timed(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal current
            began_s = time.perf_counter()
            try:
                return originals[name](*arguments)
            finally:
                current += time.perf_counter() - began_s

        return call

    for name in METHODS:
        setattr(connector, name, timed(name))
    for _ in range(STEPS):
        current = 0.0
        rig.step()
        spent.append(current * 1e6)
    for name in METHODS:
        delattr(connector, name)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
