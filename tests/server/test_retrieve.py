"""Retrieves end to end: bytes, widths, cancellation, failures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from lamina.board import TransferStatus
from lamina.client import Retrieve
from lamina.errors import DeviceError
from lamina_lab.known.content import POISON, equal_layers, random_keys
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 32])
def test_every_width_gives_back_every_byte_of_32_layers(
    server: ServerThread, make_worker: Callable[..., PageWorker], width: int, planes: int
) -> None:
    worker = make_worker(geometry=equal_layers(layers=32, planes=planes))
    source, target = (
        list(range(0, 16)),
        [40, 41, 17, 63, 30, 29, 28, 33, 50, 52, 54, 56, 20, 21, 22, 23],
    )
    keys = random_keys(4)
    worker.populate(keys, source)
    others = [block for block in range(64) if block not in target]
    before = worker.pages[:, :, others]
    worker.check_hit("r", keys, target, width)
    worker.expect(others, before, "bytes outside the retrieve were touched")


def test_slices_land_one_after_another_and_nothing_lands_before_its_count(
    server: ServerThread, worker: PageWorker
) -> None:
    keys, source, target = worker.store_new(2), range(8), range(20, 28)
    worker.poison(target)
    server.device.retrieves.close()
    retrieve = worker.begin_retrieve("r", keys, target)
    for layer in range(8):
        server.device.retrieves.wait_until_held()
        assert retrieve.landed_slices == layer
        assert (worker.pages[layer][:, target] == POISON).all(), "a page changed before its turn"
        server.device.retrieves.let_pass(1)
        worker.wait(partial(_has_landed, retrieve, layer + 1))
        assert np.array_equal(worker.pages[layer][:, target], worker.pages[layer][:, source])
    worker.wait(lambda: retrieve.is_acknowledged)


def _is_any_cancelled(server: ServerThread) -> bool:
    in_flight = [t for session in server.server.sessions for t in session.transfers.values()]
    return any(transfer.cancelled_as for transfer in in_flight)


def _has_landed(retrieve: Retrieve, slices: int) -> bool:
    return retrieve.landed_slices >= slices


def test_nothing_is_written_after_a_cancel_is_acknowledged(
    server: ServerThread, worker: PageWorker
) -> None:
    keys, target = worker.store_new(2), range(20, 28)
    server.device.retrieves.close()
    retrieve = worker.begin_retrieve("r", keys, target)
    server.device.retrieves.wait_until_held()
    worker.client.cancel(retrieve)
    eventually(lambda: server.on_loop(lambda: _is_any_cancelled(server)))
    worker.client.poll()
    assert not retrieve.is_over, "its copy is held at the valve and will still write"
    server.device.retrieves.open()
    worker.wait(lambda: retrieve.is_over)
    assert retrieve.outcome is TransferStatus.CANCELLED
    worker.poison(target)
    worker.retrieve("s", keys, range(30, 38))  # the lane goes on with the next
    worker.expect(target, POISON)
    assert server.gauges()["pins"] == 0


def test_a_failed_copy_ends_every_wait_with_its_status(
    server: ServerThread, worker: PageWorker
) -> None:
    keys = worker.store_new(2)
    server.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    retrieve = worker.retrieve("r", keys, range(20, 28))
    assert retrieve.outcome is TransferStatus.COPY_FAILED
    again = worker.retrieve("r", keys, range(20, 28))
    assert again.outcome is TransferStatus.OK, "the chunks and the lane are unharmed"
    assert server.gauges()["pins"] == 0
