"""`hazard`, and the functions that each take one guard away: what a test must then notice."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from lamina.client import Prefix, StepGates
from lamina.engines.vllm.connector import LaminaConnector
from lamina.engines.vllm.messages import TransferState
from lamina.engines.vllm.retrieves import Retrieves
from lamina.engines.vllm.scheduler import SchedulerSide
from lamina.engines.vllm.stores import Stores
from lamina.engines.vllm.tracked import HeldBlocks, Tracked
from lamina.engines.vllm.worker import WorkerSide
from tests.vllm.scheduler_harness import MODES, Rig
from tests.vllm.scripted_client import CHUNK, ScriptedClient

Patch = pytest.MonkeyPatch
Test = Callable[..., None]


def hazard(
    remove: Callable[[Patch], None],
    detects: str,
    detectable: Callable[[str], bool] = lambda mode: True,
    **options: Any,
) -> Callable[[Test], Test]:
    """Make a scenario two tests: it passes, and fails with `detects` once its guard is removed.

    `detectable` tells in which modes; `options` are the rig's.
    """

    def decorate(scenario: Test) -> Test:
        cases = [(mode, True) for mode in MODES]
        cases += [(mode, False) for mode in MODES if detectable(mode)]
        names = [f"{mode}-{'' if is_guarded else 'un'}guarded" for mode, is_guarded in cases]

        @pytest.mark.parametrize(("mode", "is_guarded"), cases, ids=names)
        def test(mode: str, is_guarded: bool, monkeypatch: Patch, **parameters: Any) -> None:
            if is_guarded:
                scenario(Rig(mode, **options), **parameters)
                return
            remove(monkeypatch)
            with pytest.raises(AssertionError, match=detects):
                scenario(Rig(mode, **options), **parameters)

        wanted = list(inspect.signature(test).parameters.values())[:-1]
        wanted += list(inspect.signature(scenario).parameters.values())[1:]
        test.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        made: Test = test
        return made

    return decorate


def _tell(patch: Patch, **fields: Any) -> None:
    """Tell the worker's side something else than the scheduler's side wants."""
    build = SchedulerSide.build_step
    patch.setattr(
        SchedulerSide,
        "build_step",
        lambda self, output: dataclasses.replace(build(self, output), **fields),
    )


# Blocks


def without_holds(patch: Patch) -> None:
    """Transfers take no reference on their blocks."""
    patch.setattr(HeldBlocks, "hold", lambda self, blocks: None)
    patch.setattr(HeldBlocks, "release", lambda self, blocks: None)


def with_blocks_of_before(patch: Patch) -> None:
    """A request keeps the table of blocks that it was first given."""
    allocated = SchedulerSide.allocated
    tables: dict[str, Any] = {}

    def keep(self: SchedulerSide, request: Any, table: Any, tokens: int) -> None:
        allocated(self, request, tables.setdefault(request.request_id, table), tokens)

    patch.setattr(SchedulerSide, "allocated", keep)


def without_cap(patch: Patch) -> None:
    """A full hit leaves nothing to compute."""

    def whole(self: Prefix, tokens: Any, wait_s: float) -> int:
        self.look_up(tokens)
        assert self.lookup is not None
        assert self.lookup.result is not None
        self.known_chunks = self.lookup.result.chunks
        return self.known_chunks * CHUNK

    patch.setattr(Prefix, "hit", whole)


def with_first_offer(patch: Patch) -> None:
    """What was offered first counts."""
    matched = SchedulerSide.matched_tokens
    offers: dict[Any, Any] = {}

    def first(self: SchedulerSide, request: Any, local: int) -> Any:
        answer = matched(self, request, local)
        tracked = self._tracked[request.request_id]
        tracked.offer = offers.setdefault(request, tracked.offer)
        return answer

    patch.setattr(SchedulerSide, "matched_tokens", first)


def with_any_number_held(patch: Patch) -> None:
    """No bound on what is held for stores."""
    store = Stores.store_confirmed

    def unbounded(self: Stores, *arguments: Any) -> None:
        self._most_held = 1_000_000
        store(self, *arguments)

    patch.setattr(Stores, "store_confirmed", unbounded)


# Gates


def without_gates(patch: Patch) -> None:
    """No step waits for a retrieve."""
    _tell(patch, gates=[])


def without_sharers(patch: Patch) -> None:
    """Only its own request waits for a retrieve."""
    patch.setattr(Retrieves, "note_reader", lambda self, tracked: None)


def without_sync_flag(patch: Patch) -> None:
    """vLLM is not asked to call `start_load_kv` before the forward."""

    def only_build(self: LaminaConnector, output: Any) -> Any:
        assert self._scheduler is not None
        return self._scheduler.build_step(output)

    patch.setattr(LaminaConnector, "build_connector_meta", only_build)


def with_two_releases(patch: Patch) -> None:
    """A request is released as long as its retrieve is under way."""
    once = WorkerSide._try_release

    def twice(self: WorkerSide, number: int, retrieving: Any, *out: Any) -> None:
        once(self, number, retrieving, *out)
        retrieving.state = TransferState.WAITING

    patch.setattr(WorkerSide, "_try_release", twice)


# Failures


def without_reports(patch: Patch) -> None:
    """vLLM is told of no bad block."""
    patch.setattr(LaminaConnector, "get_block_ids_with_load_errors", lambda self: set())


def without_second_report(patch: Patch) -> None:
    """vLLM is told of bad blocks once, and a waiting request does not compute instead."""
    without_recomputing(patch)
    _tell(patch, bad_blocks=set())


def with_readers_forgotten(patch: Patch) -> None:
    """Bad blocks are given back when their retrieve is over, whoever is yet to read them."""

    def end(self: Retrieves) -> None:
        for number, retrieve in list(self.open.items()):
            if retrieve.is_over:
                del self.open[number]
                self._held.release(retrieve.blocks)

    patch.setattr(Retrieves, "end", end)


def with_hooks_skipped(patch: Patch) -> None:
    """A gate that no forward waited for passes."""
    patch.setattr(StepGates, "unwaited", lambda self: [])


def without_failures(patch: Patch) -> None:
    """Nobody learns that a retrieve failed."""
    without_reports(patch)
    without_second_report(patch)


def without_recomputing(patch: Patch) -> None:
    """A request whose retrieve failed before it ran takes its tokens for computed."""
    patch.setattr(Retrieves, "_recompute", lambda self, retrieve: None)


def with_careless_recomputing(patch: Patch) -> None:
    """Such a request keeps its blocks and may find others."""

    def only_count(self: Retrieves, retrieve: Any) -> None:
        retrieve.tracked.prefix.may_retrieve = False
        retrieve.tracked.request.num_computed_tokens = retrieve.start_tokens

    patch.setattr(Retrieves, "_recompute", only_count)


def without_eviction(patch: Patch) -> None:
    """Bad blocks stay in the prefix cache."""
    patch.setattr(BlockPool, "evict_blocks", lambda self, blocks: None)


# Leases, stores, the end


def without_end_request(patch: Patch) -> None:
    """The server does not learn that a request is over."""
    patch.setattr(ScriptedClient, "end_request", lambda self, request: None)


def without_end_lease(patch: Patch) -> None:
    """An unused lease is not given back."""
    patch.setattr(Prefix, "give_back", lambda self: None)


def with_steps_in_flight(patch: Patch) -> None:
    """What is scheduled counts as computed."""
    store = Stores.store_confirmed

    def eager(self: Stores, tracked: Any, *arguments: Any) -> None:
        in_flight = tracked.request.num_in_flight_tokens
        tracked.request.num_in_flight_tokens = 0
        store(self, tracked, *arguments)
        tracked.request.num_in_flight_tokens = in_flight

    patch.setattr(Stores, "store_confirmed", eager)


def with_drafts(patch: Patch) -> None:
    """Drafts count as soon as they are scheduled."""
    _count(patch, lambda request: request.num_computed_tokens)


def with_last_tokens(patch: Patch) -> None:
    """What is known counts as computed."""
    _count(patch, lambda request: request.num_tokens)


def with_unknown_tokens(patch: Patch) -> None:
    """Accepted drafts count also where the request has ended before."""
    _count(patch, lambda request: request.num_computed_tokens - request.num_in_flight_tokens)


def _count(patch: Patch, computed: Callable[[Any], int]) -> None:
    """Store so many tokens of a request."""
    store = Stores.store_confirmed

    def other(self: Stores, tracked: Tracked, *arguments: Any) -> None:
        unstored = tracked.prefix.unstored
        tokens = computed(tracked.request)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(tracked.prefix, "unstored", lambda _: unstored(tokens))
            store(self, tracked, *arguments)

    patch.setattr(Stores, "store_confirmed", other)


def without_pending_work(patch: Patch) -> None:
    """An idle engine sleeps though blocks are held."""
    patch.setattr(LaminaConnector, "has_pending_push_work", lambda self: False)


def without_epochs(patch: Patch) -> None:
    """A reset changes nothing."""
    patch.setattr(SchedulerSide, "reset", lambda self, forget: None)
