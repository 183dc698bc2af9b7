"""What a worker may say of its part, and where the columns of a chunk lie."""

from __future__ import annotations

import random

import pytest

from lamina.errors import GeometryError
from lamina.shards import ALONE, ChunkLayout, Shard, digest_of
from lamina_lab.known.content import equal_layers


@pytest.mark.parametrize(
    "numbers", [(1, 1), (-1, 2), (0, 0), (0, 2, 2, 2), (0, 2, -1, 1), (0, 1, 0, 0), (0, 1025)]
)
def test_what_does_not_add_up_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="shard"):
        Shard(*numbers)


def test_every_rank_has_a_number_of_its_own() -> None:
    ranks = [Shard(n, 3, r, 4) for n in range(3) for r in range(4)]
    assert [shard.rank for shard in ranks] == list(range(12)) == list(range(ranks[0].ranks))
    assert (ALONE.rank, ALONE.ranks) == (0, 1)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_replicas_share_the_writing(replicas: int) -> None:
    """Each key is written by one of them, and none has much more to do than another."""
    draw = random.Random(replicas)
    keys = [draw.randbytes(32) for _ in range(4000)]
    writers = [Shard(0, 1, replica, replicas) for replica in range(replicas)]
    written = [sum(writer.writes(key) for key in keys) for writer in writers]
    assert sum(written) == len(keys)
    assert all(sum(writer.writes(key) for writer in writers) == 1 for key in keys)
    assert min(written) > 0.8 * len(keys) / replicas


def test_columns_lie_one_after_another() -> None:
    geometries = [equal_layers(layers, page_bytes) for layers, page_bytes in ((3, 1000), (5, 512))]
    layout = ChunkLayout(geometries)
    sizes = [geometry.chunk_bytes for geometry in geometries]
    assert layout.offsets_bytes == (0, sizes[0])
    assert layout.chunk_bytes == sum(sizes)
    assert layout.all_columns == 0b11


def test_the_digest_tells_shards_and_their_order() -> None:
    one, other = (equal_layers(layers).digest for layers in (3, 5))
    assert digest_of([one]) == one
    assert len({digest_of(d) for d in ([one], [one, one], [one, other], [other, one])}) == 4
