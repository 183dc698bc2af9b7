"""Ranks of one engine in processes of their own, on a host or all on one GPU, with known bytes."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import Retrieve
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry
from lamina.settings import DataPath
from lamina.shards import Shard
from lamina_lab.known.content import POISON
from lamina_lab.known.memory import CudaKvSpace, HostKvSpace, KvSpace
from lamina_lab.known.worker import KnownWorker, expect_whole
from tests.support.remote import Remote, serve_commands

BLOCKS = 1024


class Rank(Remote):
    """`RankWorker` in a process; `call` reaches its methods."""

    def __init__(
        self,
        socket: Path,
        engine: str,
        shard: Shard,
        geometry: Geometry,
        on_gpu: bool,
        data_path: DataPath = "auto",
    ) -> None:
        super().__init__(_main, socket, engine, shard, geometry, on_gpu, data_path)
        self.call("connect")


class RankWorker:
    """The commands."""

    def __init__(
        self,
        socket: Path,
        engine: str,
        shard: Shard,
        geometry: Geometry,
        on_gpu: bool,
        data_path: DataPath,
    ) -> None:
        space: KvSpace
        if on_gpu:
            space = CudaKvSpace(geometry, BLOCKS)
        else:
            space = HostKvSpace(geometry, BLOCKS, HostWorkerDevice())
        self._worker = KnownWorker(
            socket, space, f"rank {shard.rank}", engine=engine, shard=shard, data_path=data_path
        )
        self._retrieve: Retrieve | None = None
        self._target: range = range(0)

    def connect(self) -> None:
        self._worker.client.connect()

    def store(self, keys: Sequence[bytes], blocks: range) -> None:
        """Compute this rank's part of chunks, and store it."""
        worker = self._worker
        worker.compute(keys, blocks)
        store = worker.store(keys, blocks)
        if worker.shard.replicas == 1:
            expect_whole(store)

    def find(self, request: str, keys: Sequence[bytes]) -> int:
        """The lease; for whichever rank does the scheduler's part."""
        return self._worker.find(request, keys)

    def begin(self, request: str, lease: int, target: range, width: int) -> None:
        self._worker.poison(target)
        self._retrieve = self._worker.begin_leased(request, lease, target, width)
        self._target = target

    def cancel_at(self, slices: int) -> None:
        """Once so many slices have landed."""
        retrieve = self._retrieve
        assert retrieve is not None
        worker = self._worker
        worker.wait(lambda: retrieve.landed_slices >= slices or retrieve.outcome is not None)
        worker.client.cancel(retrieve)

    def finish(self, keys: Sequence[bytes]) -> TransferStatus:
        """Wait for the end. What has landed is there byte for byte; where it was given up, nothing
        comes late."""
        retrieve, worker = self._retrieve, self._worker
        assert retrieve is not None
        worker.wait(lambda: retrieve.is_acknowledged)
        assert retrieve.outcome is not None
        if retrieve.outcome is TransferStatus.OK:
            worker.expect_chunks(keys, self._target)
        else:
            worker.poison(self._target)
            worker.expect(self._target, POISON)
        return retrieve.outcome

    def gauges(self) -> dict[str, float]:
        """What the server tells of itself."""
        stats = self._worker.client.ask(protocol.GetStats)
        assert isinstance(stats, protocol.Stats)
        return stats.values

    def close(self) -> None:
        self._worker.client.close()


def _main(
    commands: Connection,
    socket: Path,
    engine: str,
    shard: Shard,
    geometry: Geometry,
    on_gpu: bool,
    data_path: DataPath,
) -> None:
    worker = RankWorker(socket, engine, shard, geometry, on_gpu, data_path)
    serve_commands(worker, commands)
