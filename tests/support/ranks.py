"""An engine of several workers, each of which keeps a shard of every chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lamina.board import TransferStatus
from lamina.client import Store
from lamina.shards import ChunkLayout, Shard
from lamina_lab.known.content import equal_layers
from lamina_lab.known.stream import StreamDevice
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

CHUNKS = 4
GEOMETRIES = (equal_layers(3), equal_layers(2, 256), equal_layers(4), equal_layers(1, 1024))
"""Of shards 0 to 3."""
SOURCE, TARGET = range(CHUNKS * BLOCKS_PER_CHUNK), range(32, 32 + CHUNKS * BLOCKS_PER_CHUNK)
Make = Callable[..., PageWorker]


class Engine:
    """Its workers, in the order of their ranks."""

    def __init__(
        self,
        make: Make,
        name: str,
        shards: int = 2,
        replicas: int = 1,
        ranks: Sequence[Shard] = (),
        **options: Any,
    ) -> None:
        self._make = make
        self._options = {"device": StreamDevice(), "data_path": "direct", **options}
        self.name = name
        self.ranks = ranks or [
            Shard(n, shards, r, replicas) for n in range(shards) for r in range(replicas)
        ]
        self.workers = [self.worker(shard) for shard in self.ranks]
        self.requests = 0

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(GEOMETRIES[: self.ranks[0].shards])

    def worker(self, shard: Shard) -> PageWorker:
        geometry = GEOMETRIES[shard.number]
        return self._make(geometry=geometry, engine=self.name, shard=shard, **self._options)

    def store(self, keys: Sequence[bytes], *ranks: int) -> list[Store]:
        """By these ranks, or by all, one after the other."""
        return [store(self.workers[rank], keys) for rank in ranks or range(len(self.ranks))]

    def found(self, keys: Sequence[bytes]) -> int:
        """How many of the chunks are found; every rank retrieves them, and looks at each byte."""
        self.requests += 1
        request = f"{self.name} {self.requests}"
        found = self.workers[0].client.lookup(request, keys).wait(20)
        assert found is not None
        blocks = TARGET[: found.chunks * BLOCKS_PER_CHUNK]
        for worker in self.workers if found.chunks else ():
            worker.poison(blocks)
            assert retrieve(worker, request, found.lease, blocks) is TransferStatus.OK
            worker.expect_chunks(keys[: found.chunks], blocks)
        return found.chunks


def begin(
    worker: PageWorker, keys: Sequence[bytes], parent: bytes = b"", *, is_computed: bool = True
) -> Store:
    blocks = SOURCE[: len(keys) * BLOCKS_PER_CHUNK]
    worker.compute(keys, blocks)
    begun = worker.begin_store(keys, blocks, parent)
    if is_computed and isinstance(worker.space.device, StreamDevice):
        worker.space.device.compute()
    return begun


def store(worker: PageWorker, keys: Sequence[bytes], parent: bytes = b"") -> Store:
    """Ended or given up."""
    begun = begin(worker, keys, parent)
    worker.wait(lambda: begun.is_over and begun.is_settled)
    return begun


def wait_for_end(worker: PageWorker, begun: Store) -> None:
    worker.wait(lambda: begun.ended is not None)


def retrieve(
    worker: PageWorker, request: str, lease: int, blocks: Sequence[int] = TARGET
) -> TransferStatus | None:
    """How it has ended."""
    begun = worker.begin_leased(request, lease, blocks)
    worker.wait(lambda: begun.is_acknowledged)
    return begun.outcome


def counts(begun: Store) -> tuple[int, int, int]:
    assert begun.ended is not None
    return begun.ended.stored, begun.ended.present, begun.ended.dropped


def check_all_comes_back(server: ServerThread) -> None:
    """Nothing is pinned, leased or reserved, and a cleared arena is free to the last byte."""
    eventually(lambda: not any(server.gauges()[n] for n in ("pins", "arena_reserved_bytes")))
    assert server.gauges()["leases"] == 0

    def clear() -> None:
        for _ in server.server.index.clear():
            pass

    server.on_loop(clear)
    gauges = server.gauges()
    assert (gauges["chunks"], gauges["arena_free_bytes"]) == (0, gauges["arena_capacity_bytes"])
