"""From the answer to a lookup to the retrieve: how long a hit is known and nothing moves.

    make bench-vllm-lookup        (vLLM's CPU build; a minute. On a GPU host: python -m
                                   benchmarks.lookup_to_retrieve)

A retrieve needs the engine's blocks. Copying into a buffer of our own before they exist would gain
this time at most; below 1 ms it is left out. One hit at a time on an engine that is otherwise idle,
synchronous and asynchronous; each prompt is hit once. When an answer arrives is seen by another
process, which waits on the same socket and reads nothing; where the engine has read it before that
process woke up, the time since the asking counts. A retrieve is sent when the kernel is given it:
on a busy host the server may run on this core before that call returns.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vllm_miss import PROMPT_TOKENS, start
from lamina_lab.bench.processes import private_socket, server_process
from tests.vllm.tiny_llama import write_model

HITS = 20
WARM_UP = 3
MODES = {"synchronous": 0, "asynchronous": 1}
"""After how many slices, of one layer each, a request is released."""
STAGES = {
    "read": "answer read",
    "matched": "matched_tokens",
    "allocated": "blocks allocated",
    "built": "step built",
    "sent": "sent",
}
"""What each time between two moments is spent on, by the later one; "arrived" is the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch is not None:
        tell_arrivals(options.watch)
        return
    with tempfile.TemporaryDirectory() as directory, private_socket() as socket:
        model = write_model(Path(directory) / "model")
        with server_process(socket, "--arena", "2GiB", "--chunk-tokens", "64"):
            moments = Moments()
            engine = start(model, socket)
            with arrivals(connection_of(engine)) as arrived:
                rows = {mode: measure(engine, mode, moments, arrived) for mode in MODES}
            engine.engine_core.shutdown()
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for mode, row in rows.items():
        print(f"{mode}, ms: median / worst of {HITS} hits")
        for stage, (median_ms, worst_ms) in row.items():
            print(f"  {stage:<20} {median_ms:7.3f} / {worst_ms:7.3f}")


class Moments:
    """When the hit under way came to each of `STAGES`, in ns; of what is done again before the
    retrieve is sent, as when an answer was late, the last time. "over": it has been sent."""

    def __init__(self) -> None:
        from lamina.client import Client
        from lamina.client.client import Lookup
        from lamina.client.connection import Connection
        from lamina.client.transfers import Transfers
        from lamina.engines.vllm import LaminaConnector
        from lamina.engines.vllm.scheduler import SchedulerSide

        self.at: dict[str, int] = {}
        self._note(Client, "lookup", before="asked")
        self._note(Lookup, "_answered", before="read")
        self._note(LaminaConnector, "get_num_new_matched_tokens", after="matched")
        self._note(LaminaConnector, "update_state_after_alloc", before="allocated")
        self._note(SchedulerSide, "build_step", after="built")
        self._note(Connection, "_flush", before="sent")
        self._note(Transfers, "retrieve", after="over")

    def _note(self, owner: type[Any], name: str, before: str = "", after: str = "") -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._reached(before)
            try:
                return method(*arguments, **keywords)
            finally:
                self._reached(after)

        setattr(owner, name, call)

    def _reached(self, moment: str) -> None:
        if moment and "over" not in self.at:
            self.at[moment] = time.monotonic_ns()


def connection_of(engine: Any) -> Any:
    """The scheduler's connection to the server."""
    side = engine.engine_core.engine_core.scheduler.connector._scheduler
    return side.client._link.connection


@contextmanager
def arrivals(connection: Any) -> Iterator[Callable[[], list[int]]]:
    """A function for when answers were seen to arrive since its last call, in ns."""
    fd = connection._socket.fileno()
    command = [sys.executable, "-m", "benchmarks.lookup_to_retrieve", "--watch", str(fd)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, bufsize=0) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == b"watching\n"
        told = watcher.stdout.fileno()
        os.set_blocking(told, False)

        def arrived() -> list[int]:
            try:
                return [int(line) for line in os.read(told, 1 << 16).split()]
            except BlockingIOError:
                return []

        try:
            yield arrived
        finally:
            watcher.terminate()


def tell_arrivals(fd: int) -> None:
    """Print when something arrives there, for ever: edge-triggered, as another process reads it."""
    with select.epoll() as epoll:
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        epoll.poll(0)  # what has arrived before
        print("watching", flush=True)
        while True:
            epoll.poll()
            print(time.monotonic_ns(), flush=True)


def measure(
    engine: Any, mode: str, moments: Moments, arrived: Callable[[], list[int]]
) -> dict[str, tuple[float, float]]:
    """Median and worst of each stage in ms, and of all together."""
    rng = np.random.default_rng(MODES[mode])
    prompts = [rng.integers(3, 512, PROMPT_TOKENS).tolist() for _ in range(WARM_UP + HITS)]
    for number, prompt in enumerate(prompts):
        answer(engine, f"{mode}-store-{number}", prompt)
    assert engine.reset_prefix_cache()
    # The first request after a reset waits until the weights were looked at.
    answer(engine, f"{mode}-look", rng.integers(3, 512, PROMPT_TOKENS).tolist())
    rows = []
    for number, prompt in enumerate(prompts):
        moments.at.clear()
        forced = {"layerwise_overlap": 1, "release_after_slices": MODES[mode], "store": False}
        answer(engine, f"{mode}-hit-{number}", prompt, **forced)
        at = moments.at
        assert "over" in at, "not a hit"
        seen_ns = [seen for seen in arrived() if seen >= at["asked"]]
        first_ns = before_ns = min(seen_ns[0], at["read"]) if seen_ns else at["asked"]
        row = {}
        for moment, stage in STAGES.items():
            row[stage] = (at[moment] - before_ns) / 1e6
            before_ns = at[moment]
        rows.append({**row, "all": (before_ns - first_ns) / 1e6})
    return {
        stage: (
            statistics.median(row[stage] for row in rows[WARM_UP:]),
            max(row[stage] for row in rows[WARM_UP:]),
        )
        for stage in rows[0]
    }


def answer(engine: Any, name: str, prompt: list[int], **forced: Any) -> None:
    """Serve one request, until nothing is held for it and no answer is due any more."""
    from vllm import SamplingParams

    params = {f"lamina.{key}": value for key, value in forced.items()}
    sampling = SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params},
    )
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    while engine.has_unfinished_requests() or scheduler.has_requests():
        engine.step()
    while (connection := connection_of(engine))._waiting:
        connection.wait(1.0)


if __name__ == "__main__":
    main()
