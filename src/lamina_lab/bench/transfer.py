"""`lamina bench transfer`: the server's transfers without an engine, timed and checked.

A cell stores documents of known bytes, poisons distinct destinations, retrieves, and compares every
byte of every layer. Times are the engine's: from the call until the board says landed.
"""

from __future__ import annotations

from lamina_lab import gpu_memory
from lamina_lab.bench.overlap import measure_overlap
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.bench.results import Cell, Overlap, TransferResult, TransferSpec
from lamina_lab.bench.worker import TransferBench
from lamina_lab.known.content import equal_layers
from lamina_lab.known.memory import kv_space


def run_transfer(spec: TransferSpec) -> TransferResult:
    """Run every cell, against a fresh server for each page size and order of blocks. What is wider
    than all layers is all layers."""
    probe = kv_space(spec.device, equal_layers(layers=1), 1)
    ceiling_bytes = min(spec.document_bytes, 1 << 30)
    link_retrieve_gbps = spec.link_gbps or probe.link_gbps(ceiling_bytes, to_device=True)
    link_store_gbps = spec.link_gbps or probe.link_gbps(ceiling_bytes, to_device=False)
    sweep = tuple(dict.fromkeys(min(width, spec.layers) for width in spec.widths))
    cells: list[Cell] = []
    overlap: Overlap | None = None
    server_gpu_bytes = None
    for page_bytes in spec.page_bytes:
        for consecutive in (False, True) if spec.data_path != "ring" else (False,):
            # Twice what is stored: stores under way may reserve half of an arena.
            arena_bytes = 2 * max(spec.concurrency) * spec.document_bytes + (256 << 20)
            options = ["--arena", str(arena_bytes)]
            if spec.link_gbps is not None:
                options += ["--host-link-gbps", str(spec.link_gbps)]
            free_bytes = _free_gpu_bytes(spec)
            with private_socket() as socket, server_process(socket, *options) as server:
                if free_bytes is not None:
                    server_gpu_bytes = free_bytes - (_free_gpu_bytes(spec) or 0)
                bench = TransferBench(spec, socket, page_bytes, consecutive, server.pid)
                widths = sweep[-1:] if consecutive else sweep
                counts = spec.concurrency[:1] if consecutive else spec.concurrency
                cells += [
                    bench.measure(width, count, link_retrieve_gbps, link_store_gbps)
                    for width in widths
                    for count in counts
                ]
                if spec.overlap and overlap is None:
                    overlap = measure_overlap(bench)
                bench.close()
    return TransferResult(
        spec=spec,
        link_retrieve_gbps=link_retrieve_gbps,
        link_store_gbps=link_store_gbps,
        cells=cells,
        server_gpu_bytes=server_gpu_bytes,
        overlap=overlap,
    )


def _free_gpu_bytes(spec: TransferSpec) -> int | None:
    return gpu_memory.memory_info()[0] if spec.device == "cuda" else None
