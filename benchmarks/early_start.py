"""How long a committed retrieve waits until it is sent: one process, and a process for each rank.

    make bench-vllm-start        (vLLM's CPU build; two minutes)

With scheduler and worker in one process a retrieve leaves as soon as its step is scheduled; ranks
in processes of their own get it with the step's metadata. From vLLM's taking the offer until each
rank has sent its retrieve, by the host's monotonic clock; one hit at a time, median and worst.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lamina_lab.bench.processes import private_socket, server_process
from tests.vllm.engine import ENVIRONMENT

HITS = 20
WARM_UP = 3
PROMPT_TOKENS = 1_000
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"layerwise_overlap": 1, "release_after_slices": 0},
    "asynchronous": {"layerwise_overlap": 1, "release_after_slices": 1},
}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    from tests.vllm.engine import Engine
    from tests.vllm.ranks_engine import RanksEngine
    from tests.vllm.tiny_llama import write_model

    with tempfile.TemporaryDirectory() as directory, private_socket() as socket:
        model = write_model(Path(directory) / "model")
        with server_process(socket, "--arena", "1GiB", "--chunk-tokens", "64"):
            for kind in (Engine, RanksEngine):
                engine = kind(model, socket)
                for name, mode in MODES.items():
                    waits_ms = measure(engine, mode)
                    print(
                        f"{kind.__name__}, {name}: {statistics.median(waits_ms):.2f} ms, "
                        f"worst of {len(waits_ms)} {max(waits_ms):.2f}"
                    )
                engine.close()


def measure(engine: Any, mode: dict[str, Any]) -> list[float]:
    """Of the hits after the first few, each rank's by itself."""
    from tests.vllm.engine import random_tokens

    retrieves, planner = engine.side.retrieves, engine.side._planner
    begin, landed = retrieves.begin, planner.landed
    begun_s: dict[int, float] = {}
    waits_ms: list[float] = []

    def note_begin(tracked: Any, offer: Any) -> int:
        now_s = engine.side._prefixes.clock()
        number: int = begin(tracked, offer)
        begun_s[number] = now_s
        return number

    def note_landed(accounts: Any) -> None:
        waits_ms.extend((each.begun_s - begun_s[each.number]) * 1e3 for each in accounts)
        landed(accounts)

    retrieves.begin, planner.landed = note_begin, note_landed
    for number in range(WARM_UP + HITS):
        prompt = random_tokens(PROMPT_TOKENS, 7, number)
        engine.ask(prompt, 1, retrieve=False)
        engine.forget()
        engine.ask(prompt, 1, store=False, **mode)
        if number < WARM_UP:
            waits_ms.clear()
    retrieves.begin, planner.landed = begin, landed
    return waits_ms


if __name__ == "__main__":
    main()
