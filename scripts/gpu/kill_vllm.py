#!/usr/bin/env python3
"""The server is killed under vLLM, again and again: it must go on, and emit no token on missing KV.

    scripts/gpu/kill_vllm.py [--rounds 20] [--requests 20] [--model llama-3.1-8b] [--save FILE]

Each round a server holds its retrieves while vLLM has so many in flight and its forward waits for
the slices of the last one; then the server gets SIGKILL. Every request must answer as without a
cache, or end in an error of its own; the first must do so within a second of the kill. All prompts
end alike, so that their tokens depend on what is to be retrieved, and KV memory is zeros before
each round. On a GPU vLLM computes independently of batches (VLLM_BATCH_INVARIANT), so that tokens
can be compared. Then another server is started: vLLM must hit in it, without being told.

Run it where vLLM is, after `source scripts/gpu/env.sh` on a GPU host; `--model tiny` runs on vLLM's
CPU build. Exits with 1 when anything was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HIT_CHUNKS, TAIL_TOKENS, NEW_TOKENS = 4, 40, 4
TIE_MARGIN = 0.5
"""Logarithms this near may change places with another order of additions (bfloat16)."""
RESUME_WITHIN_MS, BACK_WITHIN_MS = 1_000, 5_000
PATIENCE_S = 60.0
VERDICTS = ("same", "tie", "error", "wrong")


def serve(socket: str, arena_bytes: int, chunk_tokens: int) -> None:
    """A server whose retrieves wait from SIGUSR1 on; SIGUSR2 lets three copies pass."""
    from lamina.devices.base import Direction
    from lamina.devices.cuda import server_devices
    from lamina.devices.host import HostServerDevice
    from lamina.server.main import Server
    from lamina.settings import ServerSettings

    permits = threading.Semaphore(0)
    holding = threading.Event()

    class Stream:
        only_enqueues = False  # the event loop must not wait

        def __init__(self, inner: Any) -> None:
            self.announce, self.mark, self.is_done = inner.announce, inner.mark, inner.is_done
            self.drain = inner.drain
            self._copy = inner.copy

        def copy(self, memory: Any, copies: Any) -> None:
            if holding.is_set():
                permits.acquire()
            self._copy(memory, copies)

    class Device:
        def __init__(self, inner: Any) -> None:
            self.near_cpus, self.pin, self.open = inner.near_cpus, inner.pin, inner.open
            self._stream = inner.stream

        def stream(self, direction: Any) -> Any:
            stream = self._stream(direction)
            return Stream(stream) if direction is Direction.RETRIEVE else stream

    def hold(*_: object) -> None:
        holding.set()

    def let_pass(*_: object) -> None:
        permits.release(3)

    signal.signal(signal.SIGUSR1, hold)
    signal.signal(signal.SIGUSR2, let_pass)
    devices: dict[str, Any] = {"host": HostServerDevice(), **server_devices()}
    settings = ServerSettings(
        socket=Path(socket), arena_bytes=arena_bytes, chunk_tokens=chunk_tokens
    )
    server = Server(settings, {name: Device(device) for name, device in devices.items()})
    asyncio.run(server.run(lambda: print("ready", flush=True)))


class HeldServer:
    """`serve` in a process of its own; its pid is what is killed."""

    def __init__(self, socket: Path, arena_bytes: int, chunk_tokens: int) -> None:
        from lamina_lab.bench.processes import wait_until_filled

        command = [sys.executable, __file__, "--serve", str(socket)]
        command += [str(arena_bytes), str(chunk_tokens)]
        self._socket = socket
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        wait_until_filled(socket, self.process)

    def gauge(self, name: str) -> float:
        from lamina import protocol
        from lamina.client import Client
        from lamina.devices.host import HostWorkerDevice
        from lamina.settings import ClientSettings

        client = Client(ClientSettings(socket=self._socket), HostWorkerDevice(), "kill")
        try:
            client.connect()
            return client.ask(protocol.GetStats).values[name]  # type: ignore[union-attr]
        finally:
            client.close()

    async def wait_until_queued(self, transfers: int) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.gauge("queued_transfers") < transfers:
            if time.monotonic() > until_s:
                raise SystemExit(f"only {self.gauge('queued_transfers'):g} retrieves are in flight")
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def engine_of(model: Any, socket: Path, directory: Path, requests: int) -> Iterator[Any]:
    """vLLM with Lamina's connector; its server need not be there."""
    from lamina_lab.bench.vllm.engine import Engine

    settings: dict[str, Any] = {
        "lamina.socket": str(socket),
        "lamina.chunk_tokens": model.chunk_tokens,
        "lamina.held_blocks_share": 0.9,
        "lamina.model_id": "lamina_seeded",
    }
    if model.patient:
        settings |= {"lamina.suspect_after_ms": 5000, "lamina.lookup_timeout_ms": 5000}
    connector = {
        "kv_connector": "LaminaConnector",
        "kv_connector_module_path": "lamina.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    options: dict[str, Any] = {"max_num_seqs": requests + 4}
    if model.patient:  # a small host, perhaps shared
        options["gpu_memory_utilization"] = 0.2
    engine = Engine.start(model, model.write(directory / "model"), connector, **options)
    try:
        yield engine
    finally:
        engine.close()


class Killer:
    """Rounds on one engine; `rounds` has what each gave."""

    def __init__(self, engine: Any, model: Any, socket: Path, requests: int) -> None:
        self._engine = engine
        self._model = model
        self._socket = socket
        hit_tokens = HIT_CHUNKS * model.chunk_tokens
        workload = model.workload
        tail = workload.unseen(1_000_000, TAIL_TOKENS)
        self._prompts = [workload.unseen(n, hit_tokens) + tail for n in range(requests)]
        chunk_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.chunk_tokens
        chunk_bytes *= 4 if model.dtype == "float32" else 2
        self._arena_bytes = 2 * requests * HIT_CHUNKS * chunk_bytes
        self._expected: list[Any] = []
        self.rounds: list[dict[str, Any]] = []

    async def prepare(self) -> None:
        """What the prompts give without a cache."""
        for prompt in self._prompts:
            self._expected.append(
                await self._engine.ask(prompt, {"lamina.retrieve": False}, NEW_TOKENS, True)
            )
        if len({tuple(answer.tokens) for answer in self._expected}) < 0.9 * len(self._prompts):
            raise SystemExit("tokens do not depend on what is retrieved: nothing could be seen")

    async def round(self, number: int) -> None:
        server = HeldServer(self._socket, self._arena_bytes, self._model.chunk_tokens)
        try:
            back_ms = await self._hit_again(time.perf_counter())
            await self._store_all()
            await self._engine.forget()
            await self._engine.call_worker("lamina_clear_kv")
            server.process.send_signal(signal.SIGUSR1)
            asked = [self._ask(n, release_after=1) for n in range(len(self._prompts) - 1)]
            tasks = [asyncio.create_task(ask) for ask in asked]
            await server.wait_until_queued(len(tasks))
            # The last one runs at once: the forward now waits for its slices, layer by layer.
            tasks.append(asyncio.create_task(self._ask(len(tasks), release_after=0)))
            await server.wait_until_queued(len(tasks))
            if number % 2:
                server.process.send_signal(signal.SIGUSR2)  # some slices of the first have landed
            in_flight = int(server.gauge("queued_transfers"))
        finally:
            killed_s = time.perf_counter()
            server.kill()
        ended = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        verdicts = [verdict for verdict, _ in ended]
        self.rounds.append(
            {
                "in_flight": in_flight,
                "resumed_ms": (min(at_s for _, at_s in ended) - killed_s) * 1e3,
                "over_ms": (max(at_s for _, at_s in ended) - killed_s) * 1e3,
                "hit_again_ms": back_ms,
                **{name: verdicts.count(name) for name in VERDICTS},
                "fatal": [verdict for verdict in verdicts if verdict not in VERDICTS],
            }
        )

    async def _hit_again(self, ready_s: float) -> float:
        """Until vLLM hits at the new server; returns how long that took, in ms."""
        while time.perf_counter() - ready_s < PATIENCE_S:
            await self._engine.ask(self._prompts[0], {"lamina.retrieve": False}, 1)
            await self._engine.forget()
            answer = await self._engine.ask(self._prompts[0], None, 1)
            await self._engine.forget()
            if answer.cached_tokens:
                return (time.perf_counter() - ready_s) * 1e3
        raise SystemExit("vLLM does not hit at the new server")

    async def _store_all(self) -> None:
        asked = [self._engine.ask(p, {"lamina.retrieve": False}, 1) for p in self._prompts]
        await asyncio.gather(*asked)

    async def _ask(self, number: int, release_after: int) -> tuple[str, float]:
        """How one request ended, and when."""
        parameters = {
            "lamina.layerwise_overlap": 1,
            "lamina.release_after_slices": release_after,
            "lamina.store": False,
        }
        try:
            answer = await self._engine.ask(self._prompts[number], parameters, NEW_TOKENS)
        except Exception as error:
            fatal = type(error).__name__ == "EngineDeadError"
            return f"the engine died: {error}" if fatal else "error", time.perf_counter()
        ended_s = time.perf_counter()
        if answer.reason == "error":
            return "error", ended_s
        return _verdict(self._expected[number], answer.tokens), ended_s


def _verdict(expected: Any, tokens: list[int]) -> str:
    pairs = zip(expected.tokens, tokens, strict=False)
    at = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
    if at is None:
        return "same" if len(tokens) == len(expected.tokens) else "wrong"
    return "tie" if expected.margins[at] <= TIE_MARGIN else "wrong"


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from lamina_lab.bench.vllm.models import model_named

    model = model_named(arguments.model)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        socket = Path(directory) / "run" / "lamina.sock"
        with engine_of(model, socket, Path(directory), arguments.requests) as engine:
            killer = Killer(engine, model, socket, arguments.requests)
            await killer.prepare()
            print(f"ready after {time.perf_counter() - began_s:.0f} s", flush=True)
            for number in range(arguments.rounds):
                await killer.round(number)
                print(json.dumps(killer.rounds[-1]), flush=True)
    return {"model": arguments.model, "rounds": killer.rounds, "good": _is_good(killer.rounds)}


def _is_good(rounds: list[dict[str, Any]]) -> bool:
    return all(
        not one["wrong"]
        and not one["fatal"]
        and one["resumed_ms"] <= RESUME_WITHIN_MS
        and one["hit_again_ms"] <= BACK_WITHIN_MS
        for one in rounds
    )


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if arguments.model != "tiny":  # tokens that do not depend on who else computes; not on CPUs
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    result = asyncio.run(run(arguments))
    text = json.dumps(result, indent=2)
    if arguments.save is not None:
        arguments.save.write_text(text + "\n")
    rounds = result["rounds"]
    ended = {name: sum(one[name] for one in rounds) for name in VERDICTS}
    print(
        f"{len(rounds)} rounds; {ended}; "
        f"resumed after at most {max(one['resumed_ms'] for one in rounds):.0f} ms; "
        f"hit again after at most {max(one['hit_again_ms'] for one in rounds):.0f} ms; "
        f"{'good' if result['good'] else 'NOT GOOD'}"
    )
    sys.exit(0 if result["good"] else 1)


if __name__ == "__main__":
    main()
