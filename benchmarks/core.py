"""Times of the core's hot paths on this machine: lookup, planning, index.

make bench            a table
python -m benchmarks.core --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from lamina.client import Client
from lamina.copies import CopyPlan
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina.server.arena import Arena
from lamina.server.index import Index
from lamina.settings import ClientSettings
from lamina.shards import ChunkLayout
from lamina_lab.bench.processes import private_socket, server_process
from lamina_lab.known.content import equal_layers

LAYERS, PAGE_BYTES, BLOCK_TOKENS, CHUNK_TOKENS = 32, 64 << 10, 16, 256
BLOCKS = 4096
PLAN_BYTES = 2 << 30
INDEX_CHUNKS = 1_000_000
LOOKUP_CHUNKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures = {**time_lookup(), **time_planning(), **time_index()}
    if parser.parse_args().json:
        print(json.dumps({"host": host(), "figures": figures}, indent=2))
        return
    print(f"on {host()}")
    for name, (value, bound) in figures.items():
        print(f"{name:55} {value:10.3f}   {'bound ' + format(bound, 'g') if bound else ''}")


def host() -> str:
    cores = os.cpu_count()
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


Figures = dict[str, tuple[float, float | None]]
"""Name with unit → measured value and the bound it is held to."""


def time_lookup(rounds: int = 2000) -> Figures:
    """A lookup of 64 chunks against a server process: the call alone, and call to answer."""
    keys = [os.urandom(32) for _ in range(LOOKUP_CHUNKS)]
    calls_us, answers_us = [], []
    with private_socket() as socket, server_process(socket, "--arena", "64MiB"):
        client = Client(ClientSettings(socket=socket), HostWorkerDevice(), "benchmark")
        client.connect()
        for number in range(rounds):
            started = time.perf_counter()
            lookup = client.lookup(f"request {number}", keys)
            calls_us.append((time.perf_counter() - started) * 1e6)
            lookup.wait(1.0)
            answers_us.append((time.perf_counter() - started) * 1e6)
        client.close()
    return {
        "lookup of 64 chunks, the call, us (median)": (statistics.median(calls_us), None),
        "lookup of 64 chunks, call to answer, us (median)": (statistics.median(answers_us), 300),
        "lookup of 64 chunks, call to answer, us (p99)": (
            statistics.quantiles(answers_us, n=100)[98],
            None,
        ),
    }


def time_planning() -> Figures:
    """Copy lists of a 2 GiB retrieve of 64 KiB pages in random blocks."""
    geometry = equal_layers(
        LAYERS, PAGE_BYTES, chunk_tokens=CHUNK_TOKENS, block_tokens=BLOCK_TOKENS
    )
    page_map = PageMap((BLOCKS,), tuple((PlanePages(i, 0, PAGE_BYTES),) for i in range(LAYERS)))
    count = PLAN_BYTES // PAGE_BYTES // LAYERS
    ids = np.random.default_rng(0).permutation(BLOCKS)[:count].astype(np.int32)
    regions = [i << 40 for i in range(1, LAYERS + 1)]
    chunks = [i * geometry.chunk_bytes for i in range(count * BLOCK_TOKENS // CHUNK_TOKENS)]

    def plan(width: int) -> None:
        copies = CopyPlan(geometry, page_map, regions, chunks, 0, [ids])
        for part in geometry.slices(width):
            copies.copies(part.first_layer, part.end_layer)

    return {
        "plan a 2 GiB retrieve, one layer a slice, ms": (_median_ms(lambda: plan(1)), 5),
        "plan a 2 GiB retrieve, whole, ms": (_median_ms(lambda: plan(LAYERS)), 5),
    }


def time_index() -> Figures:
    """A million chunks of one page each, in prompts of 64; then inserts that evict."""
    page, prompt = 4096, 64
    arena = Arena(INDEX_CHUNKS * page)
    arena.extend(arena.capacity_bytes)  # address space only: nothing is ever copied
    index = Index(arena)
    layout = ChunkLayout([Geometry(16, (Group(16),), (Layer("0", 0, 1, page),))])
    prompts = [
        [number.to_bytes(32, "big") for number in range(first, first + prompt)]
        for first in range(0, INDEX_CHUNKS + 64 * prompt, prompt)
    ]

    def insert(keys: list[bytes]) -> None:
        parent, chunks = None, []  # as a store does: room for all first, then all are whole
        for key in keys:
            parent = index.reserve(key, parent, layout)
            assert parent is not None
            assert index.claim(parent, 0)
            chunks.append(parent)
        for chunk in chunks:
            index.commit(chunk, 0)

    full = INDEX_CHUNKS // prompt
    started = time.perf_counter()
    for keys in prompts[:full]:
        insert(keys)
    fill_us = (time.perf_counter() - started) / INDEX_CHUNKS * 1e6
    order = np.random.default_rng(0).permutation(full)[:2000]
    started = time.perf_counter()
    for number in order:
        run = index.find(prompts[number])
        index.pin(run)
        index.unpin(run)
    lookup_us = (time.perf_counter() - started) / (len(order) * prompt) * 1e6
    started = time.perf_counter()
    for keys in prompts[full:]:
        insert(keys)
    evict_us = (time.perf_counter() - started) / (len(prompts[full:]) * prompt) * 1e6
    return {
        "index of 1,000,000: insert, us a chunk": (fill_us, 20),
        "index of 1,000,000: find, pin, unpin, us a chunk": (lookup_us, 20),
        "index of 1,000,000: insert with eviction, us a chunk": (evict_us, 20),
    }


def _median_ms(call: Callable[[], None], rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
