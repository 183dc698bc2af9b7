"""What the scheduler's side makes of identities: adapters, resets, and waits for either."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.client import Offer, Prefixes, Release
from lamina.engines.vllm.adapters import Adapters
from lamina.engines.vllm.retrieves import Retrieves
from lamina.engines.vllm.stats import SchedulerCounts
from lamina.engines.vllm.tracked import NULL_BLOCK, HeldBlocks, Tracked
from lamina.engines.vllm.worker import WorkerSide
from lamina.keys import KeyChain
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import BLOCK, CHUNK

ASKED = prompt(1, 100)


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


class Named:
    """Adapters whose names a test sets; `None` while one is being read."""

    def __init__(self, **names: str | None) -> None:
        self.names = names
        self.reading = True

    def identity(self, lora: Any) -> str | None:
        return self.names[lora.lora_name]

    def is_being_read(self, lora: Any, at_most_s: float) -> bool:
        return self.reading and self.names[lora.lora_name] is None


def add(rig: Rig, name: str, adapter: str) -> None:
    """A request with an adapter; the toy model knows none, so keys are all that differs."""
    number = sum(map(ord, adapter))
    lora = SimpleNamespace(lora_name=adapter, lora_int_id=number, lora_path=adapter)
    add_request = rig.scheduler.add_request

    def with_adapter(request: Any) -> None:
        request.lora_request = lora
        add_request(request)

    rig.scheduler.add_request = with_adapter
    rig.add(name, ASKED)
    rig.scheduler.add_request = add_request


def asking(name: str, adapter: str | None, salt: str | None = None) -> Any:
    """A request as vLLM's scheduler has it before its first step."""
    lora = None if adapter is None else SimpleNamespace(lora_name=adapter, lora_int_id=1)
    return SimpleNamespace(
        request_id=name,
        lora_request=lora,
        cache_salt=salt,
        prompt_embeds=None,
        resumable=False,
        kv_transfer_params=None,
        mm_features=[],
        skip_reading_prefix_cache=False,
        all_token_ids=ASKED,
        num_tokens=len(ASKED),
        num_output_tokens=0,
    )


def keys_of(rig: Rig, adapter: str | None, salt: str | None = None) -> list[bytes]:
    tracked = rig.side._track(asking("K", adapter, salt))
    assert tracked is not None
    del rig.side._tracked["K"]
    return tracked.prefix._chain.extend(ASKED)


def test_adapters_of_other_content_have_other_keys(rig: Rig) -> None:
    rig.side._identity.adapters = Named(a="one", b="two", c="one")  # type: ignore[assignment]
    a, b, c = (keys_of(rig, name) for name in "abc")
    assert a == c
    plain = KeyChain(rig.side._namespace, CHUNK).extend(ASKED)  # type: ignore[arg-type]
    assert not set(a) & set(b)
    assert not (set(a) | set(b)) & set(plain)


def test_salts_have_keys_of_their_own(rig: Rig) -> None:
    """With adapters and without; the empty salt is none, as for vLLM."""
    rig.side._identity.adapters = Named(a="one")  # type: ignore[assignment]
    asked = [(adapter, salt) for adapter in (None, "a") for salt in (None, "one", "other")]
    keys = [keys_of(rig, *names) for names in asked]
    assert len(set().union(*keys)) == sum(map(len, keys)), "two tenants share a chunk"
    assert keys == [keys_of(rig, *names) for names in asked]
    assert keys_of(rig, None, "") == keys[0]
    assert keys[0] == KeyChain(rig.side._namespace, CHUNK).extend(ASKED)  # type: ignore[arg-type]


def test_a_request_waits_until_its_adapter_is_read(rig: Rig) -> None:
    adapters = Named(a=None)
    rig.side._identity.adapters = adapters  # type: ignore[assignment]
    assert rig.side.matched_tokens(asking("W", "a"), 0) == (None, False)
    assert not rig.side.is_tracked("W")
    adapters.names["a"] = "one"
    assert rig.side.matched_tokens(asking("W", "a"), 0) != (None, False)
    assert rig.side.is_tracked("W")


def test_a_request_whose_adapter_cannot_be_told_goes_without_the_cache(rig: Rig) -> None:
    adapters = Named(a=None)
    adapters.reading = False
    rig.side._identity.adapters = adapters  # type: ignore[assignment]
    assert rig.side.matched_tokens(asking("W", "a"), 0) == (0, False)
    tracked = rig.side._tracked["W"]
    assert not tracked.prefix.may_retrieve
    assert not tracked.prefix.may_store


def test_a_request_waits_until_the_weights_were_looked_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset; every pass asks, until the worker's side has said."""
    rig.client.is_swift = True
    rig.side._identity.epochs.watched(True)
    answers: list[tuple[int, str | None]] = []
    look = WorkerSide.begin_step

    def answer(side: WorkerSide, step: Any, stream: Any) -> None:
        look(side, step, stream)
        side._weights_now = list(answers) if step.look_at_weights else []

    monkeypatch.setattr(WorkerSide, "begin_step", answer)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.side._namespace is None
    rig.add("A", ASKED)
    for _ in range(4):
        rig.step()
    assert not rig.steps_of("A")
    assert rig.steps[-1].told.look_at_weights == 1
    answers.append((1, ""))
    rig.run("A")
    assert rig.side._namespace is not None
    assert rig.side._namespace.epoch == ""
    assert rig.client.chunks  # and it was stored
    rig.close()


def test_nothing_is_asked_while_nobody_waits(rig: Rig) -> None:
    rig.side._identity.epochs.watched(True)
    assert rig.scheduler.reset_prefix_cache()
    rig.add("A", ASKED, retrieve=False, store=False)
    step = rig.side.build_step
    output = SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=0,
    )
    assert step(output).look_at_weights == 0


def retrieves_of(blocks: list[int]) -> tuple[Retrieves, Offer, Tracked]:
    """What `Retrieves` needs to begin a retrieve into these blocks."""
    held = HeldBlocks()
    held.hold = lambda blocks: None  # type: ignore[method-assign]
    table = SimpleNamespace(
        blocks=[[SimpleNamespace(block_id=block, is_null=False) for block in blocks]]
    )
    request = SimpleNamespace(request_id="A")
    prefix: Any = SimpleNamespace(take_lease=lambda: 1)
    offer = Offer(0, len(blocks) * BLOCK, len(blocks) * BLOCK, Release(1, 1))
    prefixes = Prefixes(None, CHUNK, BLOCK, 512)  # type: ignore[arg-type]
    retrieves = Retrieves(prefixes, held, SchedulerCounts(), {}, timeout_s=10.0)
    return retrieves, offer, Tracked(request, prefix, table=table)


@pytest.mark.parametrize(("written", "needed"), [({7}, True), ({9}, False), (set(), False)])
def test_a_retrieve_into_blocks_that_the_step_zeroes_needs_a_ticket(
    written: set[int], needed: bool
) -> None:
    retrieves, offer, tracked = retrieves_of([6, 7])
    retrieves.begin(tracked, offer)
    (spec,) = retrieves.take_new(written)
    assert spec.needs_ticket is needed


def test_a_null_block_never_travels(rig: Rig) -> None:
    """It is everybody's: a retrieve into it fails, and its request computes instead."""
    rig.hold(ASKED, 2)
    rig.client.is_swift = True
    take_new = rig.side.retrieves.take_new

    def with_null(written: set[int]) -> Any:
        from dataclasses import replace

        return [replace(s, blocks=[NULL_BLOCK, *s.blocks[1:]]) for s in take_new(written)]

    rig.side.retrieves.take_new = with_null  # type: ignore[method-assign]
    rig.add("A", ASKED)
    rig.run("A")
    assert rig.ended["A"] == "LENGTH"
    assert not rig.client.retrieves
    assert not rig.client.leases, "its lease has ended"
    rig.close()


def test_a_chunk_with_a_null_block_is_not_stored(rig: Rig) -> None:
    rig.client.is_swift = True
    allocated = rig.side.allocated

    def with_null(request: Any, table: Any, tokens: int) -> None:
        first = SimpleNamespace(block_id=NULL_BLOCK)
        view = SimpleNamespace(blocks=[[first, *table.blocks[0][1:]]])
        allocated(request, view, tokens)

    rig.side.allocated = with_null  # type: ignore[method-assign]
    rig.add("A", ASKED)
    rig.run("A")
    assert not rig.client.stores
    rig.close()


def test_adapters_are_the_real_ones(tmp_path: Path) -> None:
    """What `Named` stands in for."""
    for name in ("identity", "is_being_read"):
        assert callable(getattr(Adapters("e", 0), name))
