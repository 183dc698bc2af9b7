"""Retrieves that fail, leases that run out, servers that die: the request recomputes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lamina.board import TransferStatus
from lamina.client import Gate, ReleasePolicy, WholePolicy
from lamina.errors import DeviceError
from lamina_lab.reference.request import State
from tests.lab.reference.engines import (
    CHUNK,
    HIT,
    HIT_BLOCKS,
    LAYER_BY_LAYER,
    PROMPT,
    SHARED,
    SMALL,
    SYNCHRONOUS,
    Engine,
    assert_everything_is_given_back,
    assert_like_a_recompute,
    assert_never_written_again,
    hit,
    new_client,
    populate,
    release_first_slice,
    tokens_of,
    wait_for_lookup,
)
from tests.support.server import ServerProcess, ServerThread
from tests.support.wait import eventually

# Failed retrieves.


def assert_bad_blocks_are_gone(engine: Engine, blocks: Sequence[int]) -> None:
    """No later request finds what a failed retrieve left behind."""
    engine.step_until_drained()
    for number, prompt in enumerate([PROMPT, SHARED[:128] + tokens_of(9, seed=14)]):
        request = engine.add(f"later{number}", prompt, policy=LAYER_BY_LAYER)
        engine.serve(request)
        assert_like_a_recompute(engine, request)


@pytest.mark.parametrize("policy", [LAYER_BY_LAYER, WholePolicy(), SYNCHRONOUS], ids=str)
def test_a_failed_copy_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine], policy: ReleasePolicy
) -> None:
    engine = make_engine()
    populated.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    request = hit(engine, policy=policy)
    assert request.failures == 1
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def has_landed(gate: Gate, slices: int) -> bool:
    return gate.retrieve.landed_slices == slices


@pytest.mark.parametrize("slices", [0, 1, 2, 3])
@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_failed_slice_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine], slices: int, is_acknowledged: bool
) -> None:
    """`slices` land, the next one fails; the engine sees the count alone, or the reply as well."""
    engine = make_engine()
    retrieves = populated.device.retrieves
    retrieves.close()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.RETRIEVING)
    gate = request.gate
    assert gate is not None
    for landed in range(slices):
        retrieves.wait_until_held()
        retrieves.let_pass(1)
        eventually(functools.partial(has_landed, gate, landed + 1))
    if slices:
        engine.step_until(lambda: request.state is State.RUNNING)
    retrieves.wait_until_held()
    before = populated.totals()["retrieves"]
    retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    retrieves.let_pass(1)
    eventually(lambda: gate.retrieve.outcome is TransferStatus.COPY_FAILED)
    if is_acknowledged:
        eventually(lambda: populated.totals()["retrieves"] > before)
    retrieves.open()
    engine.serve(request)
    assert request.failures == 1
    assert_like_a_recompute(engine, request)
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def test_a_lease_that_ran_out_while_the_request_waited_for_blocks_ends_in_recompute(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(num_blocks=20)
    running = engine.add("running", tokens_of(60, seed=11), 5)
    engine.step()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    wait_for_lookup(request)
    engine.step()
    assert request.state is State.WAITING
    expire_leases(populated)
    engine.serve(running, request)
    assert request.failures == 1
    assert_like_a_recompute(engine, request)
    assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))


def expire_leases(server: ServerThread) -> None:
    def expire() -> int:
        server.clock_s += server.settings.lease_ttl_s
        return server.server.leases.expire()

    assert server.on_loop(expire)


@pytest.mark.parametrize("slices", [0, 1])
def test_a_retrieve_past_its_deadline_ends_in_recompute_on_other_blocks(
    populated: ServerThread, make_engine: Callable[..., Engine], slices: int
) -> None:
    """A slow server may still write: the blocks stay quarantined until it has answered."""
    clock_s = 0.0
    engine = make_engine(clock=lambda: clock_s)
    client = engine.client
    assert client is not None
    populated.device.retrieves.close()
    request = engine.add("hit", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.RETRIEVING)
    if slices:
        release_first_slice(engine, populated, request)
    populated.device.retrieves.wait_until_held()
    blocks = request.blocks[:HIT_BLOCKS]
    assert request.gate is not None
    retrieve = request.gate.retrieve
    clock_s += client.settings.retrieve_timeout_ms / 1000
    engine.serve(request)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert_like_a_recompute(engine, request)
    assert not set(engine.recorder.tables["hit"]) & set(blocks)
    assert client.quarantined == 1
    assert engine.pool.num_free == engine.pool.num_blocks - HIT_BLOCKS
    populated.device.retrieves.open()
    engine.step_until_drained()
    assert client.quarantined == 0
    assert_never_written_again(engine, blocks)


def test_without_a_free_slot_a_hit_is_recomputed(
    populated: ServerThread, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.client.link.BOARD_SLOTS", 1)
    engine = make_engine()
    populated.device.retrieves.close()
    first = engine.add("first", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: first.state is State.RETRIEVING)
    populated.device.retrieves.wait_until_held()
    second = engine.add("second", PROMPT, policy=LAYER_BY_LAYER)
    engine.serve(second)
    assert_like_a_recompute(engine, second)
    assert first.state is State.RETRIEVING
    populated.device.retrieves.open()
    engine.serve(first)
    assert_like_a_recompute(engine, first)
    assert (first.hit_tokens, second.hit_tokens) == (HIT, 0)


def test_what_is_stored_after_a_failure_is_right(
    cache: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """A request that recomputed stores what it computed, not what the failed retrieve left."""
    prompt = tokens_of(HIT + 2 * CHUNK, seed=15)
    populate(make_engine(), prompt[:HIT])
    engine = make_engine()
    cache.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    request = engine.add("failed", prompt, policy=LAYER_BY_LAYER)
    engine.serve(request)
    engine.step_until_drained()
    assert request.failures == 1
    later = hit(make_engine(), [*prompt, 1])
    assert later.hit_tokens == HIT + 2 * CHUNK


# Without a server.


def test_without_a_server_requests_are_served_plainly(socket_path: Path) -> None:
    client = new_client(socket_path, reconnect_every_ms=1)
    engine = Engine(SMALL, 64, client=client)
    request = hit(engine)
    assert request.hit_tokens == 0
    server = ServerThread(socket_path, arena_bytes=4 << 20)
    try:
        engine.step_until(lambda: client.is_usable)
        populate(engine, PROMPT)
        other = Engine(SMALL, 64, client=new_client(socket_path))
        other.step_until(lambda: other.client is not None and other.client.is_usable)
        assert hit(other).hit_tokens == HIT, "a server that comes later is used"
        assert_everything_is_given_back(other)
        other.close()
    finally:
        server.stop()
    engine.step_until(lambda: not client.is_usable)
    engine.pool.evict(range(engine.pool.num_blocks))
    assert hit(engine).hit_tokens == 0, "a server that stops is not missed"
    assert_everything_is_given_back(engine)
    engine.close()


def test_a_server_killed_in_mid_retrieve_ends_in_recompute(socket_path: Path) -> None:
    """At 1 MB/s each slice takes 65 ms: the retrieve is under way when its server dies."""
    server = ServerProcess(
        socket_path, "--arena", "16MiB", "--chunk-tokens", str(CHUNK), "--host-link-gbps", "0.001"
    )
    try:
        server.wait_until_filled()
        engine = Engine(SMALL, 64, client=new_client(socket_path, reconnect_every_ms=1))
        engine.step_until(lambda: engine.client is not None and engine.client.is_usable)
        populate(engine, PROMPT[:CHUNK])
        engine.pool.evict(range(engine.pool.num_blocks))
        request = engine.add("hit", PROMPT, 3, LAYER_BY_LAYER)
        engine.step_until(lambda: request.state is State.RETRIEVING)
        gate = request.gate
        server.process.kill()
        engine.serve(request)
        assert gate is not None
        assert gate.retrieve.outcome is TransferStatus.SERVER_DIED
        assert_like_a_recompute(engine, request)
        assert_bad_blocks_are_gone(engine, range(HIT_BLOCKS))
        assert_everything_is_given_back(engine)
        engine.close()
    finally:
        server.process.kill()
        server.process.wait(20)
