"""A flood of one engine costs another at most its latency again: quiet and flooded, in turns.

The link is throttled so that it is the bound, as a GPU's is, and not the CPUs, which the flood, the
server and the engine share here. The flood's transfers are a quarter of the victim's: a
transfer that has started is not interrupted, so a victim waits for at most one of another's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.board import TransferStatus
from lamina_lab.known.content import random_keys
from tests.support.flood import BLOCKS_PER_CHUNK, GEOMETRY
from tests.support.flood import CHUNKS as CHUNKS_OF_FLOOD
from tests.support.server import ServerProcess
from tests.support.worker import PageWorker

CHUNKS = 4 * CHUNKS_OF_FLOOD
BLOCKS = CHUNKS * BLOCKS_PER_CHUNK
ROUNDS = 8
HITS = 15


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        socket_path, "--arena", "512MiB", "--chunk-tokens", "64", "--host-link-gbps", "1"
    )
    server.wait_until_filled()
    yield server
    server.stop()


class FloodProcess:
    """An engine that floods, from its start to its end."""

    def __init__(self, path: Path, kind: str) -> None:
        command = [sys.executable, "-m", "tests.support.flood", str(path), kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "flooding\n"

    def stop(self) -> str:
        said, _ = self._process.communicate(timeout=20)
        assert self._process.returncode == 0
        return said


class Victim:
    """An engine with one prompt in the cache."""

    def __init__(self, path: Path) -> None:
        self.worker, self.keys = PageWorker(path, GEOMETRY, BLOCKS), random_keys(CHUNKS)
        self.worker.compute(self.keys, range(BLOCKS))

    def hit_s(self) -> float:
        """The median time from asking to the last byte."""
        return statistics.median(self._hit_s() for _ in range(HITS))

    def _hit_s(self) -> float:
        client = self.worker.client
        assert client._link is not None
        while True:
            begin_s = time.perf_counter()
            result = client.lookup("victim", self.keys).wait(20)
            assert result is not None
            if result.chunks == CHUNKS:
                break
            # The arena is still filling, or a flood of stores was the last to use it.
            self.worker.store(self.keys, range(BLOCKS))
        layers = len(GEOMETRY.layers)
        retrieve = self.worker.begin_leased("victim", result.lease, range(BLOCKS), layers)
        while not retrieve.is_acknowledged:
            client._link.connection.wait(1.0)
        assert retrieve.outcome is TransferStatus.OK
        return time.perf_counter() - begin_s


@pytest.mark.parametrize("kind", ["ping", "lookup", "store", "retrieve"])
def test_a_victims_hit_takes_at_most_twice_as_long(
    server: ServerProcess, socket_path: Path, kind: str
) -> None:
    """Judged by the quietest of up to `ROUNDS` rounds of medians: others use these CPUs too, and
    a server that starves the victim does so in every round."""
    victim = Victim(socket_path)
    quiet, flooded = [], []
    for _ in range(ROUNDS):
        quiet.append(victim.hit_s())
        flood = FloodProcess(socket_path, kind)
        flooded.append(victim.hit_s())
        print(f"{kind}: {quiet[-1] * 1e3:.1f} and {flooded[-1] * 1e3:.1f} ms; {flood.stop()}")
        if len(quiet) > 2 and min(flooded) <= 2 * min(quiet):
            break
    victim.worker.close()
    assert min(flooded) <= 2 * min(quiet)
