"""What ranks in processes of their own must do, on a host as on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

from lamina import protocol
from lamina.board import TransferStatus
from lamina.geometry import Geometry
from lamina.settings import DataPath
from lamina.shards import Shard
from lamina_lab.known.content import random_keys
from tests.support.rank_process import Rank
from tests.support.server import connected_client
from tests.support.wait import eventually

CHUNKS = 8
ROUNDS = 20


def ranks_of(
    socket: Path, geometry: Geometry, shards: int, replicas: int, on_gpu: bool, path: DataPath
) -> list[Rank]:
    """All ranks of one engine."""
    shapes = [Shard(n, shards, r, replicas) for n in range(shards) for r in range(replicas)]
    return [Rank(socket, "ranks", shard, geometry, on_gpu, path) for shard in shapes]


def blocks_of(geometry: Geometry, run: int) -> range:
    """The blocks of the run of that number, of `CHUNKS` chunks each."""
    blocks = CHUNKS * geometry.blocks_per_chunk(0)
    return range(run * blocks, (run + 1) * blocks)


def all_of(ranks: list[Rank], path: str, *arguments: object) -> list[object]:
    """Have all ranks do the same at once; what each returns."""
    for rank in ranks:
        rank.begin(path, *arguments)
    return [rank.result() for rank in ranks]


def check_together(ranks: list[Rank], geometry: Geometry, seed: int) -> None:
    """All store and retrieve their columns at once, again and again; sometimes one gives up."""
    draw = random.Random(seed)
    layers = len(geometry.layers)
    for number in range(ROUNDS):
        keys = random_keys(CHUNKS)
        all_of(ranks, "store", keys, blocks_of(geometry, 0))
        request, target = f"r{number}", blocks_of(geometry, 1 + number % 2)
        lease, width = ranks[0].call("find", request, keys), draw.choice([1, 3, layers])
        all_of(ranks, "begin", request, lease, target, width)
        quitter = draw.choice([*ranks, None])
        if quitter is not None:
            quitter.call("cancel_at", draw.randint(0, -(-layers // width)))
        ends = all_of(ranks, "finish", keys)
        for rank, end in zip(ranks, ends, strict=True):
            was_given_up = rank is quitter and end is TransferStatus.CANCELLED
            assert end is TransferStatus.OK or was_given_up
    expect_nothing_held(ranks[0])
    for rank in ranks:
        rank.kill()


def check_killed(ranks: list[Rank], geometry: Geometry, socket: Path) -> None:
    """The last of the ranks is killed in the middle of a retrieve: the others' land, and nothing
    stays pinned or leased for the dead."""
    keys = random_keys(CHUNKS)
    all_of(ranks, "store", keys, blocks_of(geometry, 0))
    lease = ranks[0].call("find", "r", keys)
    all_of(ranks, "begin", "r", lease, blocks_of(geometry, 1), 1)
    *living, dead = ranks
    dead.kill()
    assert set(all_of(living, "finish", keys)) == {TransferStatus.OK}
    for rank in living:
        rank.call("close")
        rank.join()
    client = connected_client(socket)

    def is_free() -> bool:
        stats = client.ask(protocol.GetStats)
        assert isinstance(stats, protocol.Stats)
        names = ("pins", "leases", "sessions", "queued_transfers")
        return not any(stats.values[name] for name in names)

    eventually(is_free)
    client.close()


def expect_nothing_held(rank: Rank) -> None:
    """After all retrieves have ended no lease is left."""
    gauges = rank.call("gauges")
    assert (gauges["leases"], gauges["pins"]) == (0, 0)
