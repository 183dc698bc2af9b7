"""What it costs a copy stream to say, in host memory, that what came before has landed.

`python -m benchmarks.announce`: needs a GPU and PyTorch. Per way of saying it, the time of a GiB in
records and its part of the link's, while the engine's process does nothing, waits, or places.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.ring import MIB, TOTAL, Engine, board_of
from lamina.devices import cuda_driver as driver
from lamina.devices import cuda_launch as launch

RECORDS = (4 * MIB, 16 * MIB)


def serve(pipe: Connection, handle: bytes, name: str) -> None:
    driver.set_context(driver.retain_primary_context(0))
    _memory, words, board = board_of(name)
    ring = driver.open_ipc(handle)
    arena = np.empty(TOTAL, np.uint8)
    arena[:] = 1
    driver.pin(arena.ctypes.data, TOTAL)
    streams = [driver.create_stream() for _ in range(3)]
    numbers = launch.allocate(4096 * 4)
    values = np.arange(4096, dtype=np.uint32)
    driver.copy_one(numbers, values.ctypes.data, values.nbytes, streams[0], to_device=True)
    driver.synchronize(streams[0])
    event = driver.create_event()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        way, record, to, base = asked
        count = TOTAL // record
        started = time.perf_counter()
        for i in range(count):
            s = streams[i % 2] if way.startswith("two") else streams[0]
            host, device = arena.ctypes.data + i * record, ring + (i * record) % (96 * MIB)
            pair = (device, host) if to else (host, device)
            driver.copy_one(*pair, record, s, to_device=to)
            if way.endswith("write"):
                driver.write_value(s, board + 4 * 100, base + i)
            elif way.endswith("event"):
                driver.record(event, s)
            elif way.endswith("other"):
                driver.record(event, s)
                driver.wait_event(streams[2], event)
                driver.write_value(streams[2], board + 4 * 100, base + i)
            elif way.endswith("copied"):
                driver.copy_one(
                    words.ctypes.data + 400, numbers + 4 * (i % 4096), 4, s, to_device=False
                )
        for s in streams:
            driver.synchronize(s)
        pipe.send(time.perf_counter() - started)


def main() -> None:
    engine = Engine(96 * MIB)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    handle = driver.ipc_handle(engine.load_ring)
    server = context.Process(target=serve, args=(theirs, handle, engine.memory.name), daemon=True)
    server.start()
    theirs.close()
    pipe.recv()
    torch = engine.torch
    normal = torch.cuda.Stream().cuda_stream
    load = engine.plan("load", 65536, 32, 16 * MIB)
    engine.prepare(load)
    run = engine.run
    run.record, run.chunk_stride, run.planes = engine.load_ring, MIB, engine.planes_at.data_ptr()
    run.block_ids, run.plane_count, run.page_bytes = engine.ids_at.data_ptr(), 1, 65536
    launchers = {
        "high": (engine.stream, engine.launcher),
        "normal": (normal, launch.Launcher(normal, run)),
    }
    board = engine.board

    def enqueue(doing: str, count: int, chunks: int) -> None:
        stream, launcher = launchers["normal" if "normal" in doing else "high"]
        run.chunks = chunks if "place" in doing else 0
        ordered = launch.WriteThenWait(stream)
        for i in range(count):
            if "batch" in doing:
                ordered.enqueue(board + 4 * 300, i, board + 4 * 100, base + i)
            else:
                if "wait" in doing:
                    driver.wait_value(stream, board + 4 * 100, base + i)
            if "kernel" in doing or "place" in doing:
                launcher.launch(engine.gather if "gather" in doing else engine.place)
            if "write" in doing:
                driver.write_value(stream, board + 4 * 300, i)

    base = 0
    on_device = torch.zeros(64, dtype=torch.int32, device="cuda").data_ptr()
    host_stops = run.stops
    for doing in (
        "nothing",
        "kernel",
        "kernel device",
        "kernel blocks 1",
        "kernel blocks 8",
        "kernel blocks 1 device",
        "gather kernel",
        "place",
        "place device",
        "place device blocks 16",
        "place device blocks 64",
        "wait place device",
        "wait place device write",
    ):
        blocks = int(doing.split("blocks ")[1].split()[0]) if "blocks" in doing else 32
        launchers["high"] = (engine.stream, launch.Launcher(engine.stream, run, blocks))
        run.stops = on_device if "device" in doing else host_stops
        for record in RECORDS:
            count = TOTAL // record
            row = []
            for way in ("write",):
                times, ends = [], []
                for _ in range(3):
                    base += count
                    enqueue(doing, count, record // MIB)
                    started = time.perf_counter()
                    pipe.send((way, record, True, base))
                    times.append(pipe.recv())
                    driver.synchronize(launchers["normal"][0])
                    driver.synchronize(engine.stream)
                    ends.append(time.perf_counter() - started)
                row.append(f"{way} {1e3 * sorted(times)[1]:.2f} ({1e3 * sorted(ends)[1]:.2f})")
            print(f"{doing:20}", record // MIB, "MiB:", ", ".join(row), flush=True)
    import os

    os._exit(0)


if __name__ == "__main__":
    main()
