"""Block ids and leases that cannot be: refused at the call or by the server; nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lamina.client import MISS, ErrorCode, GeometryError, Ticket, TransferStatus
from lamina_lab.known.content import ids, random_keys
from tests.support.misused import BLOCKS, ELSEWHERE, KEYS, find, retrieve
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

# Block ids


@pytest.mark.parametrize(
    "given",
    [
        np.array(ELSEWHERE, np.int64),
        np.array(ELSEWHERE, np.uint16),
        np.array(ELSEWHERE, ">i4"),
        np.repeat(np.array(ELSEWHERE, np.int32), 2)[::2],
        list(ELSEWHERE),
    ],
)
def test_other_integers_are_taken_as_block_ids(worker: PageWorker, given: Any) -> None:
    begun = retrieve(worker, find(worker), block_ids=[given])
    assert begun.outcome is TransferStatus.OK
    worker.expect_chunks(KEYS, ELSEWHERE)
    ticket = worker.client.write_ticket()
    store = worker.client.store(b"", random_keys(2), [given], ticket)
    assert store is not None
    worker.wait(lambda: store.is_over)
    assert store.ended is not None
    assert store.ended.stored == 2


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (ids(ELSEWHERE), "no one-dimensional array"),
        (list(ELSEWHERE), "no one-dimensional array"),
        ([np.array([list(ELSEWHERE)])], "no one-dimensional array"),
        ([np.array(ELSEWHERE, np.float64)], "no one-dimensional array"),
        ([["a"] * len(ELSEWHERE)], "no one-dimensional array"),
        ([np.array(ELSEWHERE) + 2**32], "does not fit into 32 bits"),
        ([np.array(ELSEWHERE, np.uint64) + np.uint64(2**63)], "does not fit into 32 bits"),
        ([ids(ELSEWHERE), ids(ELSEWHERE)], "block ids for 2 groups, but the geometry has 1"),
        ([], "block ids for 0 groups"),
    ],
)
def test_block_ids_that_are_none_are_refused_at_the_call(
    worker: PageWorker, is_unharmed: Callable[[], bool], given: Any, cause: str
) -> None:
    lease = find(worker)
    ticket = worker.client.write_ticket()
    with pytest.raises(GeometryError, match=cause):
        worker.client.retrieve("r", lease, 0, given, 1)
    with pytest.raises(GeometryError, match=cause):
        worker.client.store(b"", KEYS, given, ticket)
    assert not worker.client.transfers_in_flight
    worker.client.end_lease(lease)
    assert is_unharmed()


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"block_ids": [ids([60, 61, 62, 64])]}, "outside [0, 64)"),
        ({"block_ids": [ids([1, 1, 2, 3])]}, "named twice"),
        ({"block_ids": [ids([])]}, "does not fit"),
        ({"start_tokens": 8}, "does not lie on blocks"),
        ({"start_tokens": 16}, "does not fit"),
    ],
)
def test_what_the_server_refuses_is_told_and_ends_the_lease(
    worker: PageWorker,
    is_unharmed: Callable[[], bool],
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, Any],
    cause: str,
) -> None:
    begun = retrieve(worker, find(worker), **wrong)
    assert begun.outcome is TransferStatus.REFUSED
    assert begun.refusal is not None
    assert begun.refusal.code is ErrorCode.BAD_REQUEST
    assert cause in begun.refusal.cause
    assert f"the server refused a retrieve of worker: {begun.refusal.cause}" in caplog.text
    assert is_unharmed()


# Leases


def test_a_retrieve_of_a_part_ends_the_whole_lease(
    worker: PageWorker, is_unharmed: Callable[[], bool]
) -> None:
    begun = retrieve(worker, find(worker), block_ids=[ids(ELSEWHERE[:BLOCKS_PER_CHUNK])])
    assert begun.outcome is TransferStatus.OK
    assert is_unharmed()


def test_a_lease_is_used_once(worker: PageWorker, is_unharmed: Callable[[], bool]) -> None:
    lease = find(worker)
    assert retrieve(worker, lease).outcome is TransferStatus.OK
    again = retrieve(worker, lease)
    assert again.outcome is TransferStatus.REFUSED
    assert again.refusal is not None
    assert again.refusal.code is ErrorCode.UNKNOWN_LEASE
    assert is_unharmed()


@pytest.mark.parametrize("lease", [0, -1, 2**62])
def test_a_lease_that_never_was(
    worker: PageWorker, is_unharmed: Callable[[], bool], lease: int
) -> None:
    begun = retrieve(worker, lease)
    assert begun.refusal is not None
    assert begun.refusal.code is ErrorCode.UNKNOWN_LEASE
    assert is_unharmed()


def test_the_lease_of_an_ended_request(worker: PageWorker, is_unharmed: Callable[[], bool]) -> None:
    lease = find(worker)
    for _ in range(3):
        worker.client.end_request("r")
        worker.client.end_lease(lease)
    begun = retrieve(worker, lease)
    assert begun.refusal is not None
    assert begun.refusal.code is ErrorCode.UNKNOWN_LEASE
    assert is_unharmed()


# Refusals


def test_a_lookup_and_a_store_say_why_they_were_refused(
    worker: PageWorker, caplog: pytest.LogCaptureFixture
) -> None:
    twice = [KEYS[0], KEYS[0]]
    for _ in range(3):
        lookup = worker.client.lookup("r", twice)
        assert lookup.wait(20) == MISS
        store = worker.store(twice, BLOCKS)
        for refusal in (lookup.refusal, store.refusal):
            assert refusal is not None
            assert refusal.cause == "a key is named twice"
    assert store.ended is None
    said = [record.getMessage() for record in caplog.records]
    kinds = [f"the server refused a {kind} of worker" for kind in ("lookup", "store")]
    assert [sum(kind in line for line in said) for kind in kinds] == [1, 1]
    caplog.clear()
    assert worker.client.lookup("r", KEYS).wait(20) != MISS
    worker.client.lookup("r", twice).wait(20)
    worker.store(twice, BLOCKS)
    said = [record.getMessage() for record in caplog.records]
    assert [sum(kind in line for line in said) for kind in kinds] == [1, 0], "lookups were well"


def test_a_retrieve_that_never_begins_ends_its_lease(
    server: ServerThread, worker: PageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots are taken, or the ticket is another connection's: nobody comes back for it."""
    transfers = worker.client._transfers()
    assert transfers is not None
    lease = find(worker)
    assert worker.client.retrieve("r", lease, 0, [ids(ELSEWHERE)], 1, Ticket(1, None)) is None
    eventually(lambda: not len(server.server.leases))
    lease = find(worker)
    monkeypatch.setattr(transfers, "_free_slots", [])
    assert worker.client.retrieve("r", lease, 0, [ids(ELSEWHERE)], 1) is None
    eventually(lambda: not len(server.server.leases))
