"""What the server counts of the bytes that it moves."""

from __future__ import annotations

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
