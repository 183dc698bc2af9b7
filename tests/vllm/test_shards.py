"""Which part of the KV each rank keeps, and what ranks are together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import distributed

from lamina.engines.vllm.config import ConnectorSettings, settings_for
from lamina.engines.vllm.messages import WorkerDescription
from lamina.engines.vllm.ranks import UnlikeRanksError, joined, shard_of
from lamina.errors import GeometryError
from lamina.settings import AUTO, WHOLE
from lamina.shards import Shard

NAMES = ("layers.0", "layers.1")
WORKER = WorkerDescription(
    geometry_digest=b"g" * 32,
    layers=8,
    token_bytes=1024,
    layout="a",
    backend="FLASH_ATTN on cuda 9.0",
    scales="s",
    watches_weights=True,
)


def shards(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    heads: int,
    stages: int = 1,
    is_mla: bool = False,
    own_heads: int | None = None,
) -> list[Shard]:
    """Of every rank of every stage."""
    found = []
    own = max(1, heads // ranks) if own_heads is None else own_heads
    layers = {name: SimpleNamespace(num_kv_heads=own) for name in NAMES}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(use_mla=is_mla, get_total_num_kv_heads=lambda: heads),
    )
    for stage in range(stages):
        for rank in range(ranks):
            group: Any = SimpleNamespace
            pipeline, tensor = group(rank_in_group=stage), group(rank_in_group=rank)
            monkeypatch.setattr(distributed, "get_pp_group", lambda found=pipeline: found)
            monkeypatch.setattr(distributed, "get_tp_group", lambda found=tensor: found)
            found.append(shard_of(config, layers, NAMES))
    return found


def test_a_rank_alone_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards(monkeypatch, 1, 8) == [Shard()]


def test_each_rank_keeps_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards(monkeypatch, 4, 8) == [Shard(n, 4) for n in range(4)]


def test_more_ranks_than_heads_keep_the_same_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours do, as vLLM gives heads to ranks."""
    assert shards(monkeypatch, 4, 2) == [
        Shard(0, 2, 0, 2), Shard(0, 2, 1, 2), Shard(1, 2, 0, 2), Shard(1, 2, 1, 2)
    ]  # fmt: skip


def test_all_ranks_of_mla_keep_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shards(monkeypatch, 8, 128, is_mla=True, own_heads=1)
    assert found == [Shard(0, 1, n, 8) for n in range(8)]


def test_stages_keep_layers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shards(monkeypatch, 2, 8, stages=2)
    assert found == [Shard(n, 4) for n in range(4)]
    assert len({shard.rank for shard in shards(monkeypatch, 4, 2, stages=3)}) == 12


@pytest.mark.parametrize(("ranks", "heads", "own"), [(4, 6, 1), (3, 2, 1), (2, 8, 8), (2, 8, None)])
def test_heads_that_are_divided_in_another_way_are_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, heads: int, own: int | None
) -> None:
    if own is None:
        layers: dict[str, Any] = {name: SimpleNamespace() for name in NAMES}
        parallel = SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1)
        model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: heads)
        config = SimpleNamespace(parallel_config=parallel, model_config=model)
        with pytest.raises(GeometryError, match="has None of 8 KV heads"):
            shard_of(config, layers, NAMES)
        return
    with pytest.raises(GeometryError, match=f"has {own} of {heads} KV heads on each of {ranks}"):
        shards(monkeypatch, ranks, heads, own_heads=own)


def told(*shards: Shard, **others: Any) -> list[bytes]:
    """What ranks say; `others` are what the last one says besides."""
    workers = [msgspec.structs.replace(WORKER, shard=shard) for shard in shards]
    workers[-1] = msgspec.structs.replace(workers[-1], **others)
    return [worker.encode() for worker in workers]


def test_nothing_is_known_before_all_ranks_have_told() -> None:
    one, other = Shard(0, 2), Shard(1, 2)
    assert joined(told(one)) is None
    assert joined(told(other, other)) is None
    both = joined(told(other, one))
    assert both is not None
    assert both == joined(told(one, other))
    assert both.geometry_digest != WORKER.geometry_digest
    assert (both.layout, both.scales, both.layers) == ("a", "s", 8)


def test_replicas_are_one_shard_whatever_their_number() -> None:
    """So engines of an MLA model share KV that have other numbers of ranks."""
    alone = joined(told(Shard()))
    several = joined(told(*(Shard(0, 1, n, 4) for n in range(4))))
    assert alone is not None
    assert several is not None
    assert alone.geometry_digest == several.geometry_digest == WORKER.geometry_digest


def test_stages_of_unlike_sizes() -> None:
    stages = told(Shard(0, 2), Shard(1, 2), layers=9, token_bytes=2048, scales="t")
    both = joined(stages)
    assert both is not None
    assert (both.layers, both.token_bytes, both.scales) == (9, 2048, "s / t")


@pytest.mark.parametrize(
    "other", [{"backend": "TRITON_ATTN on cuda 9.0"}, {"shard": Shard(0, 1, 1, 2), "layout": "b"}]
)
def test_ranks_that_are_unlike(other: dict[str, Any]) -> None:
    first = Shard(0, 1, 0, 2) if "shard" in other else Shard(0, 2)
    with pytest.raises(UnlikeRanksError, match="the ranks of this engine have unlike"):
        joined(told(first, Shard(1, 2), **other))


@pytest.mark.parametrize(("engines", "spreads"), [(2, True), (1, True), (2, False)])
def test_where_experts_are_spread_over_engines_retrieves_are_whole(
    engines: int, spreads: bool
) -> None:
    parallel = SimpleNamespace(data_parallel_size=engines, enable_expert_parallel=spreads)
    overlap = settings_for(parallel, ConnectorSettings()).layerwise_overlap
    assert overlap == (WHOLE if engines > 1 and spreads else AUTO)
    forced = ConnectorSettings(layerwise_overlap=3)
    assert settings_for(parallel, forced).layerwise_overlap == 3
