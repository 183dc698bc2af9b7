"""The ranks of one engine: which shard of the KV each keeps, and what they are together.

Pipeline stages keep layers of their own. Tensor-parallel ranks keep KV heads of their own; where
there are more ranks than heads, and with MLA, several keep the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lamina.engines.vllm.config import has_several_ranks
from lamina.engines.vllm.messages import WorkerDescription
from lamina.errors import GeometryError, LaminaError
from lamina.shards import ALONE, Shard, digest_of


class UnlikeRanksError(LaminaError):
    """Ranks of one engine of which no key can tell what they are together."""


def shard_of(vllm_config: Any, layers: Mapping[str, Any], names: Iterable[str]) -> Shard:
    """The shard of the rank that this process is. `layers` is vLLM's static forward context,
    `names` are those that have KV. Raises `GeometryError` where layers are divided in other ways
    than by whole KV heads."""
    from vllm.distributed import get_pp_group, get_tp_group

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks = parallel.tensor_parallel_size
    if not has_several_ranks(parallel):
        return ALONE
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    replicas = max(1, ranks // heads)
    for name in names:
        own = getattr(layers.get(name), "num_kv_heads", None)
        if own is None or own * ranks != heads * replicas:
            raise GeometryError(
                f"layer {name!r} has {own} of {heads} KV heads on each of {ranks} ranks",
                "That is not proven yet: use a --tensor-parallel-size that divides the KV heads, "
                "or is a multiple of them",
            )
    shards, rank = ranks // replicas, get_tp_group().rank_in_group
    number = get_pp_group().rank_in_group * shards + rank // replicas
    return Shard(number, parallel.pipeline_parallel_size * shards, rank % replicas, replicas)


def joined(told: Iterable[bytes]) -> WorkerDescription | None:
    """What the ranks that have told of themselves are together: layers and bytes of the largest;
    None until all have. Raises `UnlikeRanksError`."""
    ranks = {each.shard.rank: each for each in map(WorkerDescription.decode, told)}
    first = next(iter(ranks.values())).shard
    if len(ranks) < first.ranks:
        return None
    _check_alike("attention backends", {each.backend for each in ranks.values()})
    shards = [ranks[number * first.replicas] for number in range(first.shards)]
    for each in ranks.values():
        of_shard = shards[each.shard.number]
        what = (each.geometry_digest.hex()[:8], each.layout, each.scales)
        like = (of_shard.geometry_digest.hex()[:8], of_shard.layout, of_shard.scales)
        _check_alike(f"replicas of shard {each.shard.number}", {what, like})
    return msgspec.structs.replace(
        shards[0],
        geometry_digest=digest_of([each.geometry_digest for each in shards]),
        layers=max(each.layers for each in shards),
        token_bytes=max(each.token_bytes for each in shards),
        layout=_of_all(each.layout for each in shards),
        scales=_of_all(each.scales for each in shards),
        watches_weights=all(each.watches_weights for each in ranks.values()),
    )


def _of_all(texts: Iterable[str]) -> str:
    """What all shards say, or what each says where they differ."""
    said = list(texts)
    return said[0] if len(set(said)) == 1 else " / ".join(said)


def _check_alike(what: str, values: set[Any]) -> None:
    if len(values) > 1:
        one, other, *_ = sorted(map(str, values))
        raise UnlikeRanksError(
            f"the ranks of this engine have unlike {what}: {one} and {other}",
            "Start all ranks with the same settings on GPUs of one kind",
        )
