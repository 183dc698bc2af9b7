"""What transfers and computation do to each other on one GPU; needs torch in this process.

Two questions: how much slower is an engine's work while the server's copies run flat out, and how
long do layers take that each wait for their slice?
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from lamina.client import Gate, StepGates
from lamina.errors import LaminaError
from lamina_lab.bench.results import Overlap
from lamina_lab.bench.worker import TransferBench

_GEMM = 8192
_STREAMED_BYTES = 4 << 30
_ROUNDS = 15
_LAUNCHES = 20


def measure_overlap(bench: TransferBench) -> Overlap:
    """Measure on the GPU that `bench` has its KV on. Raises `LaminaError` without torch."""
    try:
        import torch
    except ImportError as error:
        raise LaminaError("torch is missing", "Install it, or leave --overlap out") from error
    left = torch.randn(_GEMM, _GEMM, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(_GEMM, _GEMM, device="cuda", dtype=torch.bfloat16)
    streamed = torch.zeros(_STREAMED_BYTES // 4, device="cuda")
    gemm = _slowdown(bench, lambda: torch.mm(left, right))
    memory = _slowdown(bench, lambda: streamed.add_(1.0))
    transfer_ms, first_ms = _transfer_alone(bench)
    compute = _layers_of(torch, transfer_ms, bench.spec.layers)
    compute_ms = statistics.median(_timed_ms(torch, compute) for _ in range(_ROUNDS))
    gated = [_gated_ms(torch, bench, compute) for _ in range(_ROUNDS)]
    return Overlap(
        gemm_slowdown=gemm,
        memory_bound_slowdown=memory,
        transfer_ms=transfer_ms,
        compute_ms=compute_ms,
        first_slice_ms=first_ms,
        gated_total_ms=statistics.median(gated),
    )


def _slowdown(bench: TransferBench, work: Callable[[], Any]) -> float:
    """Median time of `work` with transfers running, over that without."""
    import torch

    def repeated(_: Callable[[int], None]) -> None:
        for _repetition in range(_LAUNCHES):  # so many that the GPU never waits for a launch
            work()

    def median_ms() -> float:
        return statistics.median(_timed_ms(torch, repeated) for _ in range(_ROUNDS))

    median_ms()
    alone_ms = median_ms()
    stop = threading.Event()

    def transfer() -> None:
        bench.space.make_current()
        while not stop.is_set():
            bench.retrieve(1, 1, spin=False)  # leave the interpreter to the launching thread

    thread = threading.Thread(target=transfer)
    thread.start()
    together_ms = median_ms()
    stop.set()
    thread.join()
    return together_ms / alone_ms


def _timed_ms(torch: Any, work: Callable[[Callable[[int], None]], Any]) -> float:
    """GPU time of `work`, which gets a hook to call before each layer."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    work(lambda layer: None)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _transfer_alone(bench: TransferBench) -> tuple[float, float]:
    times = [bench.retrieve(1, 1) for _ in range(_ROUNDS)]
    last_ms = statistics.median(last[0] for _, last in times)
    return last_ms, statistics.median(first[0] for first, _ in times)


def _layers_of(torch: Any, total_ms: float, layers: int) -> Callable[[Callable[[int], None]], None]:
    """Layers of one matrix product each that take `total_ms` together."""
    right = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def layers_of(rows: int) -> Callable[[Callable[[int], None]], None]:
        left = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)

        def run(before_layer: Callable[[int], None]) -> None:
            for layer in range(layers):
                before_layer(layer)
                torch.mm(left, right)

        return run

    probe = layers_of(8192)
    _timed_ms(torch, probe)
    per_row_ms = statistics.median(_timed_ms(torch, probe) for _ in range(5)) / 8192
    return layers_of(max(256, int(total_ms / per_row_ms) // 256 * 256))


def _gated_ms(
    torch: Any, bench: TransferBench, compute: Callable[[Callable[[int], None]], None]
) -> float:
    """One retrieve whose layers compute as they land, released at once."""
    retrieve, started_s = bench.begin(0, 1)
    stream = torch.cuda.current_stream().cuda_stream
    gates = StepGates(bench.space.device, [Gate(retrieve, 0)], stream)
    compute(gates.before_layer)
    torch.cuda.synchronize()
    total_ms = (time.perf_counter() - started_s) * 1e3
    if gates.settle():
        raise LaminaError("a gated retrieve failed", "Look at the server's log")
    bench.finish([retrieve])
    return total_ms
