"""The namespace and the extras: each part of them makes other keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lamina.engines.vllm.adapters import Adapters
from lamina.engines.vllm.epochs import Epochs
from lamina.engines.vllm.identity import Identity, extras_of
from lamina.engines.vllm.messages import WorkerDescription
from lamina.engines.vllm.weights import Weights
from lamina.keys import Namespace
from tests.vllm.scheduler_config import engine_config

WORKER = WorkerDescription(
    geometry_digest=bytes(32),
    layers=3,
    token_bytes=8,
    layout="layout",
    backend="FLASH_ATTN on cuda 9.0",
    scales="scales",
    watches_weights=True,
)


@pytest.fixture(scope="module")
def config() -> Any:
    return engine_config(False, 64, "fail", 512, {})


def identity(config: Any, model_id: str = "m", version: str = "0.32.0") -> Identity:
    weights = Weights(config, model_id, None)
    weights.begin()
    return Identity(config, version, weights, Adapters("e", 0), Epochs("e"))


def namespace(found: Identity, worker: WorkerDescription = WORKER) -> Namespace:
    found.workers_told(WorkerDescription.decode(worker.encode()))
    name = found.namespace()
    assert name is not None
    return name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("geometry_digest", b"\x01" * 32),
        ("layout", "another"),
        ("backend", "TRITON_ATTN on cuda 9.0"),
        ("scales", "others"),
    ],
)
def test_what_the_worker_says_is_in_the_namespace(config: Any, field: str, value: Any) -> None:
    other = msgspec.structs.replace(WORKER, **{field: value})
    assert namespace(identity(config)).seed != namespace(identity(config), other).seed


def test_weights_and_configuration_are_in_the_namespace(config: Any) -> None:
    first = namespace(identity(config)).seed
    assert namespace(identity(config)).seed == first
    assert namespace(identity(config, "other")).seed != first
    assert namespace(identity(config, version="0.33.0")).seed != first


@pytest.mark.parametrize("field", ["dtype", "cache_dtype"])
def test_types_are_in_the_namespace(config: Any, field: str) -> None:
    first = namespace(identity(config))
    owner = config.model_config if field == "dtype" else config.cache_config
    was = getattr(owner, field)
    object.__setattr__(owner, field, "fp8")
    assert namespace(identity(config)).dtype != first.dtype
    object.__setattr__(owner, field, was)


def test_there_is_none_before_all_is_known(config: Any) -> None:
    found = identity(config)
    assert found.namespace() is None
    assert not found.is_known
    before = namespace(found)
    found.epochs.reset(forget=False)
    assert found.namespace() is None
    assert found.is_known
    found.epochs.looked(1, ["other weights"])
    after = found.namespace()
    assert after is not None
    assert after.seed != before.seed


def request(*items: tuple[str, int, int]) -> Any:
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=length))
        for name, at, length in items
    ]
    return SimpleNamespace(mm_features=features)


def test_an_item_counts_in_every_chunk_that_it_overlaps() -> None:
    assert extras_of(request(), 64) == {}
    assert extras_of(request(("a", 60, 4)), 64).keys() == {0}
    found = extras_of(request(("a", 60, 5), ("b", 130, 100)), 64)
    assert {
        chunk: [(e.identifier, e.offset) for e in extras] for chunk, extras in found.items()
    } == {
        0: [("a", 60)],
        1: [("a", -4)],
        2: [("b", 2)],
        3: [("b", -62)],
    }
