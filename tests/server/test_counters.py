"""What the server counts of the bytes that it moves."""

from __future__ import annotations

from lamina_lab.known.content import random_keys
from tests.support.server import ServerThread
from tests.support.worker import PageWorker


def test_bytes_that_were_stored_and_retrieved_add_up(
    server: ServerThread, worker: PageWorker
) -> None:
    keys, nbytes = random_keys(2), 2 * worker.geometry.chunk_bytes

    def retrieve(request: str) -> None:
        retrieve = worker.retrieve(request, keys, range(20, 28))
        worker.wait(lambda: retrieve.is_acknowledged)

    def counted() -> tuple[int, int]:
        totals = server.totals()
        return totals["stored_bytes"], totals["retrieved_bytes"]

    worker.store(keys, range(8))
    assert counted() == (nbytes, 0)
    retrieve("r1")
    assert counted() == (nbytes, nbytes)
    retrieve("r2")
    assert counted() == (nbytes, 2 * nbytes)
