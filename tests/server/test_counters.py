"""What the server counts of the transfers that it runs."""

from __future__ import annotations

from lamina.errors import DeviceError
from lamina_lab.known.content import random_keys
from tests.support.server import ServerThread
from tests.support.worker import PageWorker


def test_bytes_that_were_stored_and_retrieved_add_up(
    server: ServerThread, worker: PageWorker
) -> None:
    nbytes = 2 * worker.geometry.chunk_bytes

    def counted() -> tuple[int, int]:
        totals = server.totals()
        return totals["stored_bytes"], totals["retrieved_bytes"]

    keys = worker.store_new(2)
    assert counted() == (nbytes, 0)
    worker.retrieve("r1", keys, range(20, 28))
    assert counted() == (nbytes, nbytes)
    worker.retrieve("r2", keys, range(20, 28))
    assert counted() == (nbytes, 2 * nbytes)


def test_retrieves_that_fail_are_counted_beside_those_that_do_not(
    server: ServerThread, worker: PageWorker
) -> None:
    keys = random_keys(2)

    def retrieve() -> None:
        retrieve = worker.retrieve("r", keys, range(20, 28))
        worker.wait(lambda: retrieve.is_acknowledged)

    worker.store(keys, range(8))
    retrieve()
    server.device.retrieves.fail_next(DeviceError("the link broke", "Mend it"))
    retrieve()
    retrieve()
    totals = server.totals()
    assert (totals["retrieves"], totals["retrieves_failed"]) == (3, 1)
    assert (totals["stores"], totals["stores_failed"]) == (1, 0)
