"""How long it takes until an engine's weights are known, beside a plain read of their files.

    python -m benchmarks.identity [--gib 16] [--files 4] [--directory DIR] [--save FILE]

Writes files of random bytes, reads and hashes them from the page cache and from the disk, and asks
again when they are remembered. Where there is a GPU, also how long the look at as many bytes of
loaded weights takes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lamina.content import digests

_BLOCK = 64 << 20


def write_files(directory: Path, count: int, nbytes: int) -> list[Path]:
    """Random enough: no two blocks of a file are alike."""
    files = [directory / f"model-{number:05}.safetensors" for number in range(count)]
    block = bytearray(os.urandom(_BLOCK))
    for path in files:
        with path.open("wb") as file:
            for offset in range(0, nbytes, _BLOCK):
                block[:16] = os.urandom(16)
                file.write(memoryview(block)[: min(_BLOCK, nbytes - offset)])
            os.fsync(file.fileno())
    return files


def read_plainly(files: list[Path]) -> None:
    """Read all of them, a thread each, and look at nothing."""

    def read(path: Path) -> None:
        buffer = bytearray(8 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    threads = [threading.Thread(target=read, args=(path,)) for path in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return round(time.perf_counter() - started_s, 2)


def look_ms(nbytes: int) -> float | None:
    """The look at loaded weights of so many bytes on the GPU; None without one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    from lamina.engines.vllm.loaded import LoadedWeights

    layers = max(1, nbytes // (32 << 20))  # 8,192 x 2,048 in bfloat16
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16))
        for _ in range(layers)
    )
    weights = LoadedWeights(model)
    assert weights.change() == ""
    return round(min(seconds(weights.change) for _ in range(5)) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    nbytes = int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        files = write_files(Path(name), options.files, nbytes // options.files)
        memory = Path(name) / "memory"
        read_plainly(files)
        found = {
            "gib": options.gib,
            "files": options.files,
            "cores": os.cpu_count(),
            "plain_read_cached_s": seconds(lambda: read_plainly(files)),
            "identity_cached_s": seconds(lambda: digests(files, None, None)),
        }
        forget(files)
        found["plain_read_cold_s"] = seconds(lambda: read_plainly(files))
        forget(files)
        time.sleep(2.5)  # what was written a moment ago is not remembered
        found["identity_cold_s"] = seconds(lambda: digests(files, None, memory))
        found["identity_remembered_s"] = seconds(lambda: digests(files, None, memory))
    found["look_at_loaded_ms"] = look_ms(nbytes)
    print(json.dumps(found, indent=1))
    if options.save is not None:
        options.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
