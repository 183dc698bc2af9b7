"""Blocks that are still being retrieved: who shares them, preemption, abort in every state."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lamina.board import TransferStatus
from lamina.client import FixedPolicy
from lamina.errors import DeviceError
from lamina_lab.reference.request import Request, State
from tests.lab.reference.engines import (
    BLOCK,
    CHUNK,
    HIT,
    HIT_BLOCKS,
    LAYER_BY_LAYER,
    PROMPT,
    SHARED,
    SYNCHRONOUS,
    Engine,
    assert_like_a_recompute,
    assert_never_written_again,
    hit,
    pass_slices_layer_by_layer,
    release_first_slice,
    state_of,
    tokens_of,
    wait_for_lookup,
)
from tests.support.server import ServerThread
from tests.support.wait import PATIENCE_S, eventually

# Blocks that are still being retrieved.


def test_a_sharer_of_draining_blocks_waits_for_their_slices(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.retrieves.close()
    owner = engine.add("owner", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: owner.state is State.RETRIEVING)
    release_first_slice(engine, populated, owner)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)
    pass_slices_layer_by_layer(engine, populated, first=1)
    tables: list[tuple[list[int], list[int]]] = []
    engine.after_wait = lambda layer: tables.append((owner.blocks[:], sharer.blocks[:]))
    engine.serve(owner, sharer)
    owners, sharers = tables[0]
    assert sharers[:HIT_BLOCKS] == owners[:HIT_BLOCKS], "it did not share: nothing was tested"
    assert sharer.gate is None
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)


def test_a_sharer_of_a_synchronous_retrieve_waits_in_the_same_step(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.retrieves.close()
    owner = engine.add("owner", PROMPT, policy=SYNCHRONOUS)
    wait_for_lookup(owner)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)
    pass_slices_layer_by_layer(engine, populated, first=0)
    engine.step()
    assert (owner.state, sharer.computed_tokens) == (State.FINISHED, HIT + 20)
    engine.serve(sharer)
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)


def test_a_sharer_fails_with_the_retrieve_of_its_blocks_and_recomputes(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.retrieves.close()
    owner = engine.add("owner", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: owner.state is State.RETRIEVING)
    release_first_slice(engine, populated, owner)
    sharer = engine.add("sharer", SHARED + tokens_of(20, seed=7), 3)

    def break_the_link(layer: int) -> None:
        if layer == 2:
            populated.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
        if 0 < layer <= 2:
            populated.device.retrieves.let_pass(1)

    engine.before_layer = break_the_link
    engine.step()
    assert (owner.computed_tokens, sharer.computed_tokens) == (0, 0), "their tokens are void"
    populated.device.retrieves.open()
    engine.serve(owner, sharer)
    assert_like_a_recompute(engine, owner)
    assert_like_a_recompute(engine, sharer)
    assert (owner.failures, sharer.failures) == (1, 0)


# Preemption.


def test_requests_preempted_by_a_small_pool_end_like_a_recompute(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(num_blocks=13)
    prompts = [tokens_of(90, seed=8), tokens_of(90, seed=9)]
    preempted: set[str] = set()
    requests = [
        engine.add(f"r{number}", prompt, 20, LAYER_BY_LAYER)
        for number, prompt in enumerate(prompts)
    ]

    def note(_: int) -> None:
        preempted.update(r.name for r in requests if r.state is State.PREEMPTED)

    engine.before_layer = note
    engine.serve(*requests)
    assert preempted, "the pool was large enough: nothing was tested"
    for request in requests:
        assert_like_a_recompute(engine, request)


def test_a_request_preempted_while_draining_leaves_no_block_that_is_still_written(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """A running request grows into the last blocks just as a released one begins to drain."""
    grower_prompt = tokens_of(5 * BLOCK - 2, seed=10)
    needed = -(-len(PROMPT) // BLOCK)
    engine = make_engine(num_blocks=5 + needed)
    grower = engine.add("grower", grower_prompt, 4)
    engine.step()  # its prompt fills its blocks but for two tokens
    populated.device.retrieves.close()
    victim = engine.add("victim", PROMPT, policy=LAYER_BY_LAYER)
    wait_for_lookup(victim)
    engine.step()
    assert state_of(victim) is State.RETRIEVING
    blocks = victim.blocks[:HIT_BLOCKS]
    gate = victim.gate
    assert gate is not None
    populated.device.retrieves.wait_until_held()
    populated.device.retrieves.let_pass(1)
    eventually(lambda: gate.is_released)
    populated.device.retrieves.wait_until_held()
    engine.step()
    assert (state_of(victim), len(grower.output)) == (State.RUNNING, 3)
    assert not gate.is_settled
    engine.step()
    assert victim.state is not State.RUNNING, "it was not preempted: nothing was tested"
    assert not set(blocks) & set(grower.blocks), "blocks were given away before their end"
    assert engine.pool.num_free < engine.pool.num_blocks - len(grower.blocks)
    populated.device.retrieves.open()
    engine.serve(grower, victim)
    assert_like_a_recompute(engine, grower)
    assert_like_a_recompute(engine, victim)


# Abort, in every state.


def test_abort_while_waiting_for_the_lookup(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    assert state_of(request) is State.WAITING
    engine.abort(request)
    assert state_of(request) is State.ABORTED
    eventually(lambda: populated.gauges()["leases"] == 0)
    hit(engine)


def test_abort_while_waiting_for_blocks_with_a_lease(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(num_blocks=20)
    running = engine.add("running", tokens_of(60, seed=11), 30)
    engine.step()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    wait_for_lookup(request)
    engine.step()
    assert request.state is State.WAITING
    assert populated.gauges()["leases"] == 1
    engine.abort(request)
    eventually(lambda: populated.gauges()["leases"] == 0)
    engine.serve(running)
    assert_like_a_recompute(engine, running)
    hit(engine)


@pytest.mark.parametrize("landed", [0, 1])
def test_abort_while_retrieving(
    populated: ServerThread, make_engine: Callable[..., Engine], landed: int
) -> None:
    engine = make_engine(num_blocks=40)
    populated.device.retrieves.close()
    policy = FixedPolicy(1, release_after_slices=3)
    request = engine.add("aborted", PROMPT, policy=policy)
    engine.step_until(lambda: request.state is State.RETRIEVING)
    for _ in range(landed):
        populated.device.retrieves.wait_until_held()
        populated.device.retrieves.let_pass(1)
    populated.device.retrieves.wait_until_held()
    abort_while_held(engine, populated, request)


def test_abort_while_running_and_draining(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    """The blocks are in the engine's own prefix cache by then, and must leave it."""
    engine = make_engine(num_blocks=40)
    populated.device.retrieves.close()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.RETRIEVING)
    release_first_slice(engine, populated, request)
    abort_while_held(engine, populated, request)


def abort_while_held(engine: Engine, server: ServerThread, request: Request) -> None:
    """Abort a request whose next slice is held; its blocks are free when that has ended."""
    assert request.gate is not None
    blocks, retrieve = request.blocks[:HIT_BLOCKS], request.gate.retrieve
    engine.abort(request)
    assert engine.pool.num_free == engine.pool.num_blocks - HIT_BLOCKS
    neighbour = engine.add("neighbour", tokens_of(100, seed=12))
    engine.serve(neighbour)
    assert_like_a_recompute(engine, neighbour)
    assert not set(engine.recorder.tables["neighbour"]) & set(blocks)
    assert not retrieve.is_over
    server.after_reading(server.device.retrieves.open)
    engine.step_until_drained()
    assert retrieve.outcome is TransferStatus.CANCELLED
    assert engine.pool.num_free == engine.pool.num_blocks
    assert_never_written_again(engine, blocks)


def test_abort_while_decoding_and_while_its_chunks_are_being_stored(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.stores.close()
    request = engine.add("aborted", tokens_of(150, seed=13), 50, LAYER_BY_LAYER)
    engine.step_until(lambda: len(request.output) == 3)
    populated.device.stores.wait_until_held()
    engine.abort(request)
    assert engine.pool.num_free == engine.pool.num_blocks - 2 * CHUNK // BLOCK
    populated.device.stores.open()
    engine.step_until_drained()
    assert engine.pool.num_free == engine.pool.num_blocks
    again = make_engine()
    request = hit(again, tokens_of(150, seed=13))
    assert request.hit_tokens == 2 * CHUNK


def test_abort_while_preempted(populated: ServerThread, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    request = engine.add("aborted", PROMPT, 9, LAYER_BY_LAYER)
    engine.step_until(lambda: len(request.output) == 2)
    engine.scheduler.preempt(request)
    assert request.state is State.PREEMPTED
    engine.abort(request)
    eventually(lambda: populated.gauges()["leases"] == 0)
    hit(engine)


def test_a_finished_request_holds_nothing(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    request = hit(engine, new_tokens=3)
    assert request.prefix is not None
    assert (request.blocks, request.gate, request.prefix.lookup) == ([], None, None)
    engine.step_until_drained()
    assert engine.pool.num_free == engine.pool.num_blocks
    eventually(lambda: populated.gauges()["pins"] == populated.gauges()["leases"] == 0)


def test_drain_ends_after_an_abort(
    populated: ServerThread, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    populated.device.retrieves.close()
    request = engine.add("aborted", PROMPT, policy=LAYER_BY_LAYER)
    engine.step_until(lambda: request.state is State.RETRIEVING)
    populated.device.retrieves.wait_until_held()
    engine.abort(request)
    populated.after_reading(populated.device.retrieves.open)
    draining = threading.Thread(target=engine.drain, daemon=True)
    draining.start()
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert engine.pool.num_free == engine.pool.num_blocks
