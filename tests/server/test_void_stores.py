"""Stores that their engine has given up: nothing of them is found, whatever is copied since."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lamina.board import TransferStatus
from lamina_lab.known.content import random_keys
from tests.support.giving_up import (
    BATCHES,
    BLOCKS,
    CHUNKS,
    STAGES,
    WAYS,
    Scene,
    at_its_deadline,
    before_the_first_copy,
    copied_but_not_done,
    half_copied,
    queued,
    ticket_awaited,
    with_all_others,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually

Stage = Callable[[Scene], None]
Way = Callable[[Scene], None]


@pytest.fixture
def scene(server: ServerThread) -> Iterator[Scene]:
    scene = Scene(server.settings.socket, server)
    yield scene
    scene.close()


@pytest.fixture(params=STAGES, ids=lambda stage: stage.__name__)
def stage(scene: Scene, request: pytest.FixtureRequest) -> Stage:
    """The scene has come to a stage of a store."""
    stage: Stage = request.param
    stage(scene)
    return stage


def check_nothing_is_found(scene: Scene) -> None:
    """Now that all copies pass, whoever they were for."""
    scene.let_all_pass()
    assert scene.found() == 0
    totals = scene.server.totals()
    assert totals["stores_void"] + totals["stores_failed"] == 1  # failed: its session ended before


@pytest.mark.parametrize("give_up", WAYS, ids=lambda way: way.__name__)
def test_nothing_is_found_of_a_store_that_was_given_up(
    scene: Scene, stage: Stage, give_up: Way
) -> None:
    give_up(scene)
    scene.use_pages()
    check_nothing_is_found(scene)
    assert scene.found(scene.keys_ahead) == (CHUNKS if stage is queued else 0)
    scene.check_store_again()


def test_nothing_is_found_of_a_store_whose_engine_has_closed_its_client(
    scene: Scene, stage: Stage
) -> None:
    """Its memory may be anything by then."""
    scene.worker.client.close()
    scene.use_pages()
    check_nothing_is_found(scene)


def test_nothing_is_found_of_a_store_whose_session_had_ended_before(
    scene: Scene, server: ServerThread, stage: Stage
) -> None:
    """The server reads the former connection's board for as long as it copies for it."""
    assert scene.worker.client._link is not None
    session = server.server.sessions.find(scene.worker.client._link.session)
    assert session is not None
    server.on_loop(session.hang_up)
    eventually(lambda: session not in set(server.server.sessions))
    scene.worker.wait(lambda: scene.worker.client._lost)
    assert not scene.store.is_over
    at_its_deadline(scene)
    scene.use_pages()
    check_nothing_is_found(scene)
    scene.check_store_again()


@pytest.mark.parametrize("give_up", WAYS, ids=lambda way: way.__name__)
def test_what_was_stored_before_it_was_given_up_stays_found(scene: Scene, give_up: Way) -> None:
    """Only the answer had not been read."""
    scene.begin()
    eventually(lambda: scene.server.totals()["stored_chunks"] == CHUNKS)
    if give_up is at_its_deadline:
        give_up = with_all_others  # a poll would read the answer first
    give_up(scene)
    scene.use_pages()
    assert scene.found() == CHUNKS
    assert scene.server.totals()["stores_void"] == 0


def test_a_store_whose_ticket_is_not_there_is_dropped_at_once(
    scene: Scene, server: ServerThread
) -> None:
    ticket_awaited(scene)
    assert scene.server.gauges()["arena_reserved_bytes"] > 0
    with_all_others(scene)
    scene.wait_for_gauges(queued_transfers=0, arena_reserved_bytes=0, pins=0, chunks=0)
    assert scene.server.totals()["stores_void"] == 1
    assert scene.server.totals()["stores_failed"] == 0
    assert server.device.stores.passed == 0
    gauges = scene.server.gauges()
    assert gauges["arena_free_bytes"] == gauges["arena_capacity_bytes"]


def test_a_store_that_waits_for_its_turn_is_not_copied(scene: Scene, server: ServerThread) -> None:
    queued(scene)
    with_all_others(scene)
    scene.let_all_pass()
    assert server.device.stores.passed == BATCHES, "only the one before it"


def test_a_store_that_is_half_copied_is_copied_no_further(
    scene: Scene, server: ServerThread
) -> None:
    half_copied(scene)
    with_all_others(scene)
    scene.let_all_pass()
    assert server.device.stores.passed == BATCHES // 2 + 1, "more than the copy that was held"


@pytest.mark.parametrize("reach", [before_the_first_copy, copied_but_not_done])
def test_what_was_present_stays_and_the_engine_is_told(scene: Scene, reach: Stage) -> None:
    present = CHUNKS // 2
    scene.other().populate(scene.keys[:present], range(BLOCKS // 2))
    reach(scene)
    with_all_others(scene)
    scene.let_all_pass()
    scene.worker.wait(lambda: scene.store.ended is not None)
    answer = scene.store.ended
    assert answer is not None
    assert answer.status == TransferStatus.CANCELLED
    assert (answer.stored, answer.present, answer.dropped) == (0, present, CHUNKS - present)
    assert scene.found() == present


def test_only_the_overdue_of_several_stores_are_void(scene: Scene) -> None:
    """Also where their tickets wrap."""
    assert scene.worker.client._link is not None
    transfers = scene.worker.client._link.transfers
    assert transfers is not None
    for tickets in (2**30, 2**31, 3 * 2**30, 2**32 - 2):
        transfers._tickets = tickets
        scene.worker.client.write_ticket()
    before_the_first_copy(scene)
    overdue, keys = [scene.store], random_keys(CHUNKS)
    scene.begin(random_keys(CHUNKS))
    overdue.append(scene.store)
    scene.now_s += 1
    scene.begin(keys)
    assert [store.ticket for store in (*overdue, scene.store)] == [0, 1, 2]
    scene.now_s += scene.worker.client.settings.store_timeout_ms / 1000 - 1
    scene.worker.client.poll()
    assert [store.given_up for store in (*overdue, scene.store)] == [True, True, False]
    scene.let_all_pass()
    scene.worker.wait(lambda: scene.store.is_over)
    assert not scene.store.given_up
    assert scene.found(keys) == CHUNKS
    assert scene.found() == 0
    assert scene.server.totals()["stores_void"] == 2
