"""A worker whose server holds a little, for tests of what goes wrong with it."""

from __future__ import annotations

from typing import Any

from lamina.client import Client, ClientSettings, HostWorkerDevice, Retrieve
from lamina_lab.known.content import ids, random_keys
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

KEYS = random_keys(2)
BLOCKS = range(2 * BLOCKS_PER_CHUNK)
ELSEWHERE = range(40, 40 + 2 * BLOCKS_PER_CHUNK)


def find(worker: PageWorker, request: str = "r") -> int:
    """The lease of a hit."""
    return worker.find(request, KEYS)


def retrieve(worker: PageWorker, lease: int, **changes: Any) -> Retrieve:
    """A retrieve of all that is leased, acknowledged."""
    options: dict[str, Any] = {
        "request": "r",
        "lease": lease,
        "start_tokens": 0,
        "block_ids": [ids(ELSEWHERE)],
        "layers_per_slice": 1,
    }
    begun = worker.client.retrieve(**{**options, **changes})
    assert begun is not None
    worker.wait(lambda: begun.is_acknowledged)
    return begun


def new_client(worker: PageWorker, **settings: Any) -> Client:
    options = {"suspect_after_ms": 5_000, "lookup_timeout_ms": 5_000, **settings}
    socket = worker.client.settings.socket
    return Client(ClientSettings(socket=socket, **options), HostWorkerDevice(), "another")
