"""Ranks of one engine give a retrieve up at one time: what they are told counts, not when they
began."""

from __future__ import annotations

import time

import pytest

from lamina.board import TransferStatus
from lamina_lab.known.content import ids
from tests.support.misused import KEYS
from tests.support.server import ServerThread
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker


@pytest.mark.parametrize("early_s", [0.0, 1.0])
def test_a_deadline_that_is_given_takes_the_place_of_the_time_out(
    server: ServerThread, worker: PageWorker, early_s: float
) -> None:
    server.device.retrieves.close()
    blocks = ids(range(32, 32 + len(KEYS) * BLOCKS_PER_CHUNK))
    began_s = time.monotonic()
    retrieve = worker.client.retrieve(
        "r", worker.find("r", KEYS), 0, [blocks], 1, deadline_s=began_s - early_s
    )
    assert retrieve is not None
    assert retrieve.deadline_s == began_s - early_s
    worker.wait(lambda: retrieve.outcome)
    assert retrieve.outcome is TransferStatus.TIMED_OUT
    assert time.monotonic() < began_s + worker.client.settings.retrieve_timeout_ms / 1000
    server.device.retrieves.open()
    worker.wait(lambda: retrieve.is_over)


def test_without_one_the_time_out_counts_from_the_call(
    server: ServerThread, worker: PageWorker
) -> None:
    blocks = range(32, 32 + len(KEYS) * BLOCKS_PER_CHUNK)
    timeout_s = worker.client.settings.retrieve_timeout_ms / 1000
    earliest_s = time.monotonic() + timeout_s
    retrieve = worker.begin_retrieve("r", KEYS, blocks)
    assert earliest_s <= retrieve.deadline_s <= time.monotonic() + timeout_s
    worker.wait(lambda: retrieve.is_acknowledged)
