"""What rings rest on, measured before they were built: `python -m benchmarks.ring RESULTS.json`.

Needs a GPU, PyTorch and Triton. A server's process fills a ring in this process's GPU memory with
copy engines; a side stream of this process places what has landed, beside other work. Counts are
words in shared host memory, and nobody waits but for those. From the environment: RINGS (MiB, of
rings), STREAMS (of the server), VARIANT (`plain`: copies one by one, `solid`: one a record).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from ctypes import c_uint, c_uint64
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from lamina.board import reached
from lamina.devices import cuda_driver as driver
from lamina.devices import cuda_launch as launch
from lamina.devices.kernels import image_for

MIB = 1 << 20
TOTAL = 1024 * MIB
BLOCKS_PER_CHUNK = 16
STREAMS = int(os.environ.get("STREAMS", "1"))
VARIANT = os.environ.get("VARIANT", "")
WORDS = 4096  # of the board: word 0 placed, 16 filled, 32 to 35 stops, 48 drained, 64 gathered


class Load(NamedTuple):
    """`total` bytes in layers of chunks of pages, cut into records of `record` bytes."""

    page: int
    layers: int
    record: int
    ring: int
    first_position: int
    first_number: int
    total: int = TOTAL

    @property
    def row(self) -> int:  # a layer of a chunk
        return self.page * BLOCKS_PER_CHUNK

    @property
    def chunks(self) -> int:
        return self.total // (self.row * self.layers)

    def records(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Position, first layer, layers, first chunk and chunks of each."""
        position = self.first_position
        whole_layers = max(1, self.record // (self.row * self.chunks))
        for layer in range(0, self.layers, whole_layers):
            layers = min(whole_layers, self.layers - layer)
            step = max(1, self.record // (self.row * layers))
            for chunk in range(0, self.chunks, step):
                chunks = min(step, self.chunks - chunk)
                size = chunks * layers * self.row
                if position % self.ring + size > self.ring:
                    position += self.ring - position % self.ring
                yield position, layer, layers, chunk, chunks
                position += size


def board_of(name: str | None) -> tuple[Any, np.ndarray[Any, Any], int]:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(name, create=name is None, size=WORDS * 4)
    assert memory.buf is not None
    words = np.frombuffer(memory.buf, np.uint32)
    address = words.ctypes.data
    driver.pin(address, WORDS * 4)
    return memory, words, driver.device_pointer(address)


def serve(pipe: Connection, name: str, handles: tuple[bytes, bytes], ring: int, at: int) -> None:
    """The server's process: fills (or drains) what it is told to."""
    driver.set_context(driver.retain_primary_context(0))
    _, words, board = board_of(name)
    load_ring, store_ring = map(driver.open_ipc, handles)
    arena = np.empty(TOTAL, np.uint8)
    arena[:] = 1
    driver.pin(arena.ctypes.data, TOTAL)
    stream = driver.create_stream()
    streams = [driver.create_stream() for _ in range(STREAMS)]
    events = [driver.create_event() for _ in range(64)]
    half = np.random.default_rng(at).integers(0, 2**63, TOTAL // 8, np.int64)
    arena[:] = half.view(np.uint8)
    pipe.send("ready")
    pending: deque[tuple[int, int]] = deque()
    while (asked := pipe.recv()) is not None:
        kind, load = asked
        cpu_s, started = time.process_time(), time.perf_counter()
        if kind == "link" or kind == "link-back":
            size = np.full(TOTAL // (32 * MIB), 32 * MIB, np.int64)
            host = arena.ctypes.data + np.arange(len(size)) * 32 * MIB
            device = load_ring + (np.arange(len(size)) % (ring // (32 * MIB))) * 32 * MIB
            to = kind == "link"
            target, source = (device, host) if to else (host, device)
            driver.copy_batch(
                target.ctypes.data,
                source.ctypes.data,
                size.ctypes.data,
                len(size),
                stream,
                to_device=to,
            )
            driver.synchronize(stream)
        elif kind == "bytes":
            pipe.send_bytes(arena[:load].tobytes())
            continue
        else:
            order = np.random.default_rng(7).permutation(load.chunks)
            chunk_bytes = load.row * load.layers
            to = kind == "load"
            count = words[0:1] if to else words[64:65]
            base = load_ring if to else store_ring
            for number, (position, layer, layers, chunk, chunks) in enumerate(
                load.records(), load.first_number + 1
            ):
                size = chunks * layers * load.row
                if to:
                    while pending and pending[0][1] < position + size - ring:
                        if reached(int(count[0]), pending[0][0]):
                            pending.popleft()
                        else:
                            time.sleep(20e-6)
                    pending.append((number, position))
                else:
                    while not reached(int(count[0]), number):
                        time.sleep(20e-6)
                rows = arena.ctypes.data + order[chunk : chunk + chunks] * chunk_bytes
                host = rows + layer * load.row
                device = base + position % ring + np.arange(chunks) * (layers * load.row)
                sizes = np.full(chunks, layers * load.row, np.int64)
                target, source = (device, host) if to else (host, device)
                lane = number % STREAMS
                if "solid" in VARIANT:
                    host, device, sizes = host[:1], device[:1], np.array([size], np.int64)
                    host = np.minimum(host, arena.ctypes.data + TOTAL - size)
                    target, source = (device, host) if to else (host, device)
                if "plain" in VARIANT or "solid" in VARIANT:
                    for one in zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True):
                        driver.copy_one(*one, streams[lane], to_device=to)
                else:
                    driver.copy_batch(
                        target.ctypes.data,
                        source.ctypes.data,
                        sizes.ctypes.data,
                        len(sizes),
                        streams[lane],
                        to_device=to,
                    )
                for back in range(1, STREAMS):
                    driver.wait_event(streams[lane], events[(number - back) % 64])
                driver.write_value(
                    streams[lane], board + 4 * (16 if to else 48), number & 0xFFFF_FFFF
                )
                driver.record(events[number % 64], streams[lane])
            for one_stream in streams:
                driver.synchronize(one_stream)
        pipe.send((time.perf_counter() - started, time.process_time() - cpu_s))


class Run(ctypes.Structure):
    _fields_ = (
        ("record", c_uint64),
        ("chunk_stride", c_uint64),
        ("planes", c_uint64),
        ("block_ids", c_uint64),
        ("chunks", c_uint),
        ("plane_count", c_uint),
        ("blocks_per_chunk", c_uint),
        ("page_bytes", c_uint),
    )


class Engine:
    """The engine's side: rings, side streams, pages."""

    def __init__(self, ring: int, blocks: int = 128, at: int = 0) -> None:
        import torch

        self.torch = torch
        self.ring = ring
        self.pages = torch.zeros(TOTAL + 64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.memory, self.words, self.board = board_of(None)
        self.load_ring, self.store_ring = launch.allocate(ring), launch.allocate(ring)
        self.stream = launch.side_stream()
        self.run = Run(blocks_per_chunk=BLOCKS_PER_CHUNK)
        self.launcher = launch.Launcher(self.stream, self.run, blocks)
        self.order = launch.WriteThenWait(self.stream)
        module = launch.module_of(image_for(*launch.compute_capability(0)))
        self.place = launch.function(module, "place_16")
        self.gather = launch.function(module, "gather_16")
        self.next = {"load": (0, 0), "store": (0, 0)}  # position, number
        self.pending: deque[tuple[int, int]] = deque()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        handles = (driver.ipc_handle(self.load_ring), driver.ipc_handle(self.store_ring))
        arguments = (theirs, self.memory.name, handles, ring, at)
        self.server = context.Process(target=serve, args=arguments, daemon=True)
        self.server.start()
        self.pipe.recv()

    def ask(self, kind: str, load: Load | None = None) -> tuple[float, float]:
        self.pipe.send((kind, load))
        told: tuple[float, float] = self.pipe.recv()
        return told

    def plan(self, kind: str, page: int, layers: int, record: int) -> Load:
        return Load(page, layers, record, self.ring, *self.next[kind])

    def prepare(self, load: Load) -> None:
        torch = self.torch
        rng = np.random.default_rng(3)
        blocks = load.chunks * BLOCKS_PER_CHUNK
        self.ids = rng.permutation(blocks).astype(np.int32)
        self.ids_at = torch.from_numpy(self.ids).cuda()
        plane = blocks * load.page
        base = self.pages.data_ptr()
        planes = np.array([[base + i * plane, load.page] for i in range(load.layers)], np.uint64)
        self.planes_at = torch.from_numpy(planes.view(np.int64)).cuda()
        torch.cuda.synchronize()

    def move(self, kind: str, load: Load, done: Any) -> tuple[float, int]:
        """Enqueue a whole load or store; returns the seconds that took, and how many records."""
        started = time.perf_counter()
        number = load.first_number
        places = kind == "load"
        kernel = self.place if places else self.gather
        write, wait = (0, 16) if places else (64, 48)
        run, ring = self.run, self.load_ring if places else self.store_ring
        memop_s = launch_s = 0.0
        pending, until = self.pending, load.first_number
        for position, layer, layers, chunk, chunks in load.records():
            if places:
                until = number + 1
            else:
                size = chunks * layers * load.row
                while pending and pending[0][1] < position + size - self.ring:
                    until = pending.popleft()[0]
                pending.append((number + 1, position))
            before = time.perf_counter()
            self.order.enqueue(
                self.board + 4 * write,
                number & 0xFFFF_FFFF,
                self.board + 4 * wait,
                until & 0xFFFF_FFFF,
            )
            memop_s += time.perf_counter() - before
            run.record = ring + position % self.ring
            run.chunk_stride = layers * load.row
            run.planes = self.planes_at.data_ptr() + 16 * layer
            run.block_ids = self.ids_at.data_ptr() + 4 * BLOCKS_PER_CHUNK * chunk
            run.chunks, run.plane_count, run.page_bytes = chunks, layers, load.page
            before = time.perf_counter()
            self.launcher.launch(kernel)
            launch_s += time.perf_counter() - before
            number += 1
            last = position + chunks * layers * load.row
        driver.write_value(self.stream, self.board + 4 * write, number & 0xFFFF_FFFF)
        driver.record(done, self.stream)
        self.next[kind] = (-(-last // 256) * 256, number)
        records = number - load.first_number
        self.calls_us = (memop_s / records * 1e6, launch_s / records * 1e6)
        return time.perf_counter() - started, records

    def measure(self, kind: str, page: int, layers: int, record: int) -> dict[str, float]:
        load = self.plan(kind, page, layers, record)
        self.prepare(load)
        done = driver.create_event()
        self.pipe.send((kind, load))
        started = time.perf_counter()
        enqueue_s, records = self.move(kind, load, done)
        driver.wait_recorded(done)
        engine_s = time.perf_counter() - started
        server_s, cpu_s = self.pipe.recv()
        return {
            "s": max(engine_s, server_s if kind == "store" else 0),
            "server_s": server_s,
            "cpu_s": cpu_s,
            "enqueue_us_per_record": enqueue_s / records * 1e6,
            "records": records,
        }

    def check(self, load: Load) -> int:
        """Wrong pages of a load, against what the server has."""
        self.pipe.send(("bytes", load.total))
        arena = np.frombuffer(self.pipe.recv_bytes(), np.uint8)
        order = np.random.default_rng(7).permutation(load.chunks)
        chunks = arena.reshape(load.chunks, load.layers, BLOCKS_PER_CHUNK, load.page)
        got = self.pages[: load.total].cpu().numpy()
        got = got.reshape(load.layers, load.chunks * BLOCKS_PER_CHUNK, load.page)
        wrong = 0
        for layer in range(load.layers):
            want = chunks[order, layer].reshape(-1, load.page)
            wrong += int((got[layer][self.ids] != want).any(1).sum())
        return wrong

    def close(self) -> None:
        driver.synchronize(self.stream)
        driver.unpin(self.words.ctypes.data)
        self.pipe.send(None)
        self.server.join()


class Busy:
    """Keeps the GPU computing; counts how often."""

    def __init__(self, torch: Any, work: Callable[[], object]) -> None:
        self.torch, self.work = torch, work
        self.stop = threading.Event()
        self.times: list[float] = []
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Busy:
        self.thread.start()
        time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _run(self) -> None:
        stream = self.torch.cuda.Stream()
        ahead: deque[Any] = deque()
        with self.torch.cuda.stream(stream):
            while not self.stop.is_set():
                event = self.torch.cuda.Event(enable_timing=True)
                self.work()
                event.record(stream)
                ahead.append(event)
                if len(ahead) > 3:
                    ahead[0].synchronize()
                    first = ahead.popleft()
                    ahead[0].synchronize()
                    self.times.append(first.elapsed_time(ahead[0]))
            stream.synchronize()


def works(torch: Any) -> dict[str, Callable[[], object]]:
    """What a GPU may be doing while a load lands."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    q = torch.randn(1, 32, 2048, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 32, 60416, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    attention = torch.nn.functional.scaled_dot_product_attention
    thin = torch.randn(16, 8192, device="cuda", dtype=torch.bfloat16)
    sizes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    weights = [torch.randn(k, n, device="cuda", dtype=torch.bfloat16) for k, n in sizes]
    inputs = {
        t: {k: torch.randn(t, k, device="cuda", dtype=torch.bfloat16) for k, _ in sizes}
        for t in (2048, 8192)
    }

    def layer(tokens: int) -> None:
        """The products and the elementwise steps of an 8B model's layer."""
        given = inputs[tokens]
        for weight in weights:
            made = given[weight.shape[0]] @ weight
            torch.nn.functional.silu(made, inplace=True)

    found: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.mm(a, b),
        "layer of 2048 tokens": lambda: layer(2048),
        "layer of 8192 tokens": lambda: layer(8192),
        "copy": lambda: y.copy_(x),
        "decode-like": lambda: [torch.mm(thin, b) for _ in range(32)],
        "attention-60k": lambda: attention(q, k, v),
    }
    return found


def link(engine: Engine) -> tuple[float, float]:
    """Seconds of TOTAL bytes, contiguous, each way."""
    to = min(engine.ask("link")[0] for _ in range(3))
    back = min(engine.ask("link-back")[0] for _ in range(3))
    return to, back


def self_calls(engine: Engine) -> tuple[float, float]:
    return engine.calls_us


def gate_1(out: dict[str, Any]) -> None:
    rows = out["1 two processes"] = []
    for ring_mib in map(int, os.environ.get("RINGS", "64,96").split(",")):
        engine = Engine(ring_mib * MIB)
        for record_mib in (4, 8, 16, 24) if ring_mib == 96 else (4, 16):
            for page_kib in (4, 64) if VARIANT else (4, 8, 16, 32, 64):
                to, back = link(engine)
                row: dict[str, Any] = {
                    "ring_mib": ring_mib,
                    "record_mib": record_mib,
                    "page_kib": page_kib,
                }
                for kind, best in (("load", to), ("store", back)):
                    told = [
                        engine.measure(kind, page_kib * 1024, 32, record_mib * MIB)
                        for _ in range(3)
                    ]
                    middle = sorted(told, key=lambda t: t["s"])[1]
                    row[kind] = round(best / middle["s"], 3)
                    row[f"{kind}_cpu_ms"] = round(middle["cpu_s"] * 1e3, 1)
                    row[f"{kind}_enqueue_us"] = round(middle["enqueue_us_per_record"], 1)
                    row[f"{kind}_calls_us"] = [round(one, 1) for one in self_calls(engine)]
                rows.append(row)
                print(row, flush=True)
        load = engine.plan("load", 8192, 32, 16 * MIB)
        engine.prepare(load)
        event = driver.create_event()
        engine.pages.zero_()
        engine.torch.cuda.synchronize()
        engine.pipe.send(("load", load))
        engine.move("load", load, event)
        driver.wait_recorded(event)
        engine.pipe.recv()
        out[f"1 wrong pages, ring {ring_mib}"] = engine.check(load)
        print(out[f"1 wrong pages, ring {ring_mib}"], flush=True)
        engine.close()


def gate_2() -> dict[str, Any]:
    """A pending wait beside a replayed graph of small kernels."""
    import torch

    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x @ w
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(160):
            y = torch.nn.functional.silu(y @ w)
    host = torch.empty(16, 4096, dtype=torch.bfloat16).pin_memory()
    _, words, board = board_of(None)
    stream = launch.side_stream()
    others = [torch.cuda.Stream() for _ in range(32)]

    def sample() -> float:
        times = []
        for _ in range(60):
            started = time.perf_counter()
            graph.replay()
            host.copy_(y, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3

    del others
    pairs = []
    for turn in range(20):
        quiet = sample()
        driver.wait_value(stream, board + 64, turn + 1)
        pending = sample()
        words[16] = turn + 1
        driver.synchronize(stream)
        pairs.append(pending / quiet)
    return {
        "ratio": round(statistics.median(pairs), 4),
        "worst": round(max(pairs), 4),
        "quiet_ms": round(quiet, 3),
    }


def gate_3() -> dict[str, Any]:
    """How many waits and launches can stand behind a wait before a call blocks."""
    engine = Engine(64 * MIB)
    told: dict[str, Any] = {}
    for name in ("alone", "beside graph replays"):
        torch = engine.torch
        work = (lambda: None) if name == "alone" else works(torch)["decode-like"]
        engine.run.chunks = 0
        end = threading.Timer(4.0, lambda: engine.words.__setitem__(16, 1 << 30))
        engine.words[16] = 0
        with Busy(torch, work):
            end.start()
            count, slowest = 0, 0.0
            while count < 20_000:
                started = time.perf_counter()
                engine.order.enqueue(engine.board, 0, engine.board + 64, 1 << 29)
                engine.launcher.launch(engine.place)
                took = time.perf_counter() - started
                slowest = max(slowest, took)
                if took > 0.5:
                    break
                count += 1
            end.join()
            driver.synchronize(engine.stream)
        told[name] = {"records_before_a_call_blocks": count, "slowest_s": round(slowest, 4)}
    engine.close()
    return told


def gate_4(out: dict[str, Any]) -> None:
    rows = out["4 beside other work"] = []
    engine = Engine(96 * MIB)
    todo = works(engine.torch)
    for blocks in (64, 128, 256):
        engine.launcher = launch.Launcher(engine.stream, engine.run, blocks)
        for name, work in todo.items():
            work()
            to, back = link(engine)
            with Busy(engine.torch, work) as busy:
                time.sleep(0.4)
                quiet = statistics.median(busy.times or [0.001])
                begun = len(busy.times)
                shares = {}
                for kind, best in (("load", to), ("store", back)):
                    told = [engine.measure(kind, 65536, 32, 24 * MIB)["s"] for _ in range(5)]
                    shares[kind] = round(best / statistics.median(told), 3)
                with_it = statistics.median(busy.times[begun:] or [0])
            row = {
                "blocks": blocks,
                "work": name,
                **shares,
                "work_ms": round(quiet, 3),
                "work_slower": round(with_it / quiet, 3),
            }
            rows.append(row)
            print(row, flush=True)
    engine.close()


def gate_5(out: dict[str, Any]) -> None:
    """Another process computes on the same GPU."""
    code = (
        "import torch,time\na=torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16)\n"
        "print('on',flush=True)\nwhile True:\n  for _ in range(4): torch.mm(a,a)\n"
        "  torch.cuda.synchronize()\n"
    )
    engine = Engine(96 * MIB)
    rows = out["5 two engines"] = []
    to, back = link(engine)
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    time.sleep(0.5)
    for name, work in {"idle": lambda: None, **works(engine.torch)}.items():
        with Busy(engine.torch, work):
            shares = {}
            for kind, best in (("load", to), ("store", back)):
                told = [engine.measure(kind, 65536, 32, 24 * MIB)["s"] for _ in range(3)]
                shares[kind] = round(best / statistics.median(told), 3)
        row = {"this_engine": name, "other": "gemm", **shares}
        rows.append(row)
        print(row, flush=True)
    other.kill()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--gate", default="1,2,3,4,5")
    parser.add_argument("--inner", action="store_true")
    arguments = parser.parse_args()
    if arguments.inner:
        import torch

        torch.zeros(1, device="cuda")
        gate_told = gate_2() if arguments.gate == "2" else gate_3()
        print(json.dumps(gate_told))
        return
    out: dict[str, Any] = {}
    gates = arguments.gate.split(",")
    for number, gate in (("1", gate_1), ("4", gate_4), ("5", gate_5)):
        if number in gates:
            gate(out)
            with open(arguments.results, "w") as file:
                json.dump(out, file, indent=1)
    for number in ("2", "3"):
        for connections in (None, "1") if number in gates else ():
            env = dict(os.environ)
            if connections:
                env["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
            command = [sys.executable, "-m", "benchmarks.ring", "-", "--gate", number, "--inner"]
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            told = json.loads(run.stdout.splitlines()[-1]) if run.stdout else run.stderr[-2000:]
            out[f"{number}, CUDA_DEVICE_MAX_CONNECTIONS {connections}"] = told
            print(number, connections, told, flush=True)
            with open(arguments.results, "w") as file:
                json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
