"""Documents of known bytes on a server: stored, retrieved, timed and compared."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina import protocol
from lamina.client import Retrieve
from lamina.errors import LaminaError
from lamina.geometry import BlockIds
from lamina.settings import DEFAULT_CHUNK_TOKENS
from lamina_lab.bench.results import Cell, TransferSpec
from lamina_lab.known.content import Pages, equal_layers, random_keys
from lamina_lab.known.memory import kv_space
from lamina_lab.known.worker import KnownWorker, expect_whole

BLOCK_TOKENS = 16
_BLOCKS_PER_CHUNK = DEFAULT_CHUNK_TOKENS // BLOCK_TOKENS
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 120.0
_STORE_ROUNDS = 5
_PAUSE_S = 0.5e-3
_PERIOD_BYTES = 64  # a page repeats this many random bytes


@dataclass
class _Document:
    """Its chunks' keys, the blocks it was stored from, and those it is retrieved to."""

    keys: list[bytes]
    source: BlockIds
    target: BlockIds


class TransferBench:
    """A worker with KV memory for some documents: half of it to store from, half to retrieve to.

    Blocks are scattered at random, or `consecutive`. Everything is stored when it is made.
    """

    def __init__(
        self,
        spec: TransferSpec,
        socket: Path,
        page_bytes: int,
        consecutive: bool,
        server_pid: int,
    ) -> None:
        self.spec = spec
        self.page_bytes = page_bytes
        self.consecutive = consecutive
        self._server_pid = server_pid
        count = max(spec.concurrency)
        chunks = max(1, spec.document_bytes // (page_bytes * spec.layers * _BLOCKS_PER_CHUNK))
        blocks = chunks * _BLOCKS_PER_CHUNK
        self.document_bytes = blocks * page_bytes * spec.layers
        self._blocks = range(2 * count * blocks)
        order = np.array(self._blocks, np.int32)
        if not consecutive:
            np.random.default_rng(0).shuffle(order)
        parts = order.reshape(2 * count, blocks)
        self.documents = [
            _Document(random_keys(chunks), parts[2 * i], parts[2 * i + 1]) for i in range(count)
        ]
        geometry = equal_layers(
            spec.layers, page_bytes, chunk_tokens=DEFAULT_CHUNK_TOKENS, block_tokens=BLOCK_TOKENS
        )
        self.space = kv_space(spec.device, geometry, len(self._blocks))
        self.worker = KnownWorker(
            socket,
            self.space,
            "bench transfer",
            patience_s=_PATIENCE_S,
            data_path=spec.data_path,
        )
        self.worker.client.connect()
        self._calls_s: list[float] = []
        self._known = self._fill()
        self.stored_gbps = self._store()

    def close(self) -> None:
        self.worker.close()

    def measure(
        self, width: int, count: int, link_retrieve_gbps: float, link_store_gbps: float
    ) -> Cell:
        """One cell: `count` retrieves at once, checked once and timed `rounds` times."""
        bare_gbps = self._bare_gbps()
        self.space.poison(self._blocks)
        self.retrieve(count, width)
        wrong_bytes = self._wrong_bytes(count)
        firsts_ms, lasts_ms = [], []
        self._calls_s.clear()
        cpu_s = _cpu_s(self._server_pid)
        for _ in range(self.spec.rounds):
            first_ms, last_ms = self.retrieve(count, width)
            firsts_ms.append(first_ms[0])
            lasts_ms.append(max(last_ms))
        cpu_s = _cpu_s(self._server_pid) - cpu_s
        last_ms_median = statistics.median(lasts_ms)
        gbps = count * self.document_bytes / last_ms_median / 1e6
        return Cell(
            page_bytes=self.page_bytes,
            layers_per_slice=width,
            concurrency=count,
            consecutive_blocks=self.consecutive,
            gbps=gbps,
            share_of_link=gbps / link_retrieve_gbps,
            share_of_bare_loop=gbps / bare_gbps if bare_gbps else None,
            first_slice_ms=statistics.median(firsts_ms),
            first_slice_worst_ms=max(firsts_ms),
            last_slice_ms=last_ms_median,
            engine_ms_per_gib=statistics.median(self._calls_s)
            * 1e3
            / (self.document_bytes / 2**30),
            server_cores=cpu_s / (sum(lasts_ms) / 1e3),
            server_cpu_s_per_gib=cpu_s / (self.spec.rounds * count * self.document_bytes / 2**30),
            store_gbps=self.stored_gbps,
            store_share_of_link=self.stored_gbps / link_store_gbps,
            wrong_bytes=wrong_bytes,
        )

    def retrieve(
        self, count: int, width: int, spin: bool = True
    ) -> tuple[list[float], list[float]]:
        """Retrieve `count` documents at once, watching the board without pause unless told not to.

        Returns for each the ms from its call to its first slice, and from the first call to its
        last slice.
        """
        leases = [self._look_up(number) for number in range(count)]
        begun = [self._retrieve(number, lease, width) for number, lease in enumerate(leases)]
        retrieves = [retrieve for retrieve, _ in begun]
        times = self._watch(retrieves, [started_s for _, started_s in begun], spin)
        self.finish(retrieves)
        return times

    def begin(self, number: int, width: int) -> tuple[Retrieve, float]:
        """Begin to retrieve one document; also returns when."""
        return self._retrieve(number, self._look_up(number), width)

    def finish(self, retrieves: list[Retrieve]) -> None:
        """Wait until retrieves are acknowledged."""
        self.worker.wait(lambda: all(retrieve.is_acknowledged for retrieve in retrieves), pause_s=0)

    def _look_up(self, number: int) -> int:
        return self.worker.find(f"{number}", self.documents[number].keys)

    def _retrieve(self, number: int, lease: int, width: int) -> tuple[Retrieve, float]:
        started_s = time.perf_counter()
        target = self.documents[number].target
        retrieve = self.worker.begin_leased(f"{number}", lease, target, width)
        self._calls_s.append(time.perf_counter() - started_s)
        return retrieve, started_s

    def _watch(
        self, retrieves: list[Retrieve], started_s: list[float], spin: bool
    ) -> tuple[list[float], list[float]]:
        """Read the board over and over, as a waiting GPU would."""
        first_ms, last_ms = [0.0] * len(retrieves), [0.0] * len(retrieves)
        waiting = set(range(len(retrieves)))
        until_s = started_s[0] + _PATIENCE_S
        while waiting:
            if not spin:
                time.sleep(_PAUSE_S)
            for number in tuple(waiting):
                landed, now_s = retrieves[number].landed_slices, time.perf_counter()
                if landed and not first_ms[number]:
                    first_ms[number] = (now_s - started_s[number]) * 1e3
                if landed == len(retrieves[number].slices):
                    last_ms[number] = (now_s - started_s[0]) * 1e3
                    waiting.remove(number)
                elif now_s > until_s:
                    raise LaminaError("a retrieve did not end", "Look at the server's log")
        return first_ms, last_ms

    def _bare_gbps(self) -> float | None:
        if self.consecutive or self.worker.client.has_rings:
            return None  # pieces are large: the link is the bound
        return self.space.bare_gbps(min(self.document_bytes, 1 << 30), self.page_bytes)

    def _fill(self) -> list[Pages]:
        """Random bytes into every block; returns, per layer, what a page repeats."""
        rng = np.random.default_rng(1)
        period = min(self.page_bytes, _PERIOD_BYTES)
        known = []
        for layer in range(self.spec.layers):
            known.append(rng.integers(0, 256, (len(self._blocks), period), np.uint8))
            pages = np.tile(known[-1], (1, 1, self.page_bytes // period))
            self.space.write(layer, self._blocks, pages)
        return known

    def _store(self) -> float:
        """Store every document; returns the rate of stores like it in GB/s."""
        rates = []
        for _ in range(_STORE_ROUNDS):
            throwaway = [random_keys(len(document.keys)) for document in self.documents]
            rates.append(self._store_once(throwaway))
            self.worker.client.ask(protocol.Clear)
        self._store_once([document.keys for document in self.documents])
        return statistics.median(rates)

    def _store_once(self, keys: list[list[bytes]]) -> float:
        started_s = time.perf_counter()
        stores = [
            self.worker.begin_store(document_keys, document.source)
            for document, document_keys in zip(self.documents, keys, strict=True)
        ]
        self.worker.wait(lambda: all(s.is_over and s.is_settled for s in stores), pause_s=0)
        elapsed_s = time.perf_counter() - started_s
        for store in stores:
            expect_whole(store)
        return len(stores) * self.document_bytes / elapsed_s / 1e9

    def _wrong_bytes(self, count: int) -> int:
        """Bytes of the destinations that are not the document's, over every layer."""
        wrong = 0
        for layer, known in enumerate(self._known):
            pages = self.space.read(layer, self._blocks).reshape(len(known), -1, known.shape[1])
            for document in self.documents[:count]:
                expected = known[document.source][:, None, :]
                wrong += int((pages[document.target] != expected).sum())
        return wrong


def _cpu_s(pid: int) -> float:
    """User and system time of a process, all threads (proc(5))."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    fields = stat.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
