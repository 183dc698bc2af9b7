"""A worker without a model: a client around pages of which every byte is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lamina.board import TransferStatus
from lamina.client import Client, Retrieve, Store
from lamina.errors import LaminaError
from lamina.settings import ClientSettings
from lamina.shards import ALONE, Shard
from lamina_lab.known.content import (
    Blocks,
    Pages,
    content_of_run,
    ids,
    keys_of_shard,
    random_keys,
)
from lamina_lab.known.memory import HostKvSpace, KvSpace

_PAUSE_S = 0.5e-3


class WrongBytesError(Exception):
    """Something is in the pages, or not in them, that an invariant forbids."""


def expect_whole(store: Store) -> None:
    """Raise `LaminaError` unless a store has ended with all of its chunks there."""
    if store.ended is None or store.ended.dropped or store.ended.status:
        raise LaminaError("chunks were not stored whole", "Look at the server's log")


class KnownWorker:
    """Its client has registered `space` and is not connected yet. What it does not do, its client
    does: everything here is for chunks that are there and transfers that go well.

    `settings` are the client's, patient where nothing is said: a small host may be busy. Raises
    `LaminaError` when a transfer does not begin, or not end within `patience_s`.
    """

    def __init__(
        self,
        socket: Path,
        space: KvSpace,
        label: str = "worker",
        *,
        engine: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        description: bytes = b"",
        shard: Shard = ALONE,
        patience_s: float = 20.0,
        **settings: Any,
    ) -> None:
        self.space = space
        self.geometry = space.geometry
        self.shard = shard
        self.checked_bytes = 0
        self._patience_s = patience_s
        settings = {"suspect_after_ms": 5_000, "lookup_timeout_ms": 5_000, **settings}
        self.client = Client(
            ClientSettings(socket=socket, **settings), space.device, label, engine, clock, model
        )
        self.client.register(self.geometry, space.page_map, space.allocations, description, shard)

    @property
    def pages(self) -> Pages:
        """The memory itself, on a host: shape (layers, planes, blocks, page bytes)."""
        assert isinstance(self.space, HostKvSpace)
        return self.space.pages

    def compute(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        """Write the content of chunks to these blocks."""
        for layer, pages in enumerate(self._content(keys)):
            self.space.write(layer, blocks, pages)

    def poison(self, blocks: Blocks) -> None:
        self.space.poison(blocks)

    def expect(
        self, blocks: Blocks, wanted: Pages | int, otherwise: str = "wrong bytes", layers: int = 0
    ) -> None:
        """Raise `WrongBytesError` unless these blocks hold this, shape (layers, planes, blocks,
        page bytes), or this in every byte; in the first `layers`, or in all."""
        for layer in range(layers or len(self.geometry.layers)):
            got = self.space.read(layer, blocks)
            self.checked_bytes += got.nbytes
            if not (got == (wanted if isinstance(wanted, int) else wanted[layer])).all():
                raise WrongBytesError(otherwise)

    def expect_chunks(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        """Raise `WrongBytesError` unless these blocks hold the content of these chunks."""
        self.expect(blocks, self._content(keys))

    def _content(self, keys: Sequence[bytes]) -> Pages:
        """What this worker keeps of these chunks."""
        return content_of_run(keys_of_shard(keys, self.shard.number), self.geometry)

    def begin_store(self, keys: Sequence[bytes], blocks: Blocks, parent: bytes = b"") -> Store:
        """Begin to store what is in these blocks."""
        store = self.client.store(parent, keys, [ids(blocks)], self.client.write_ticket())
        if store is None:
            raise LaminaError("the server is gone", "Look at its log")
        return store

    def store(self, keys: Sequence[bytes], blocks: Blocks, parent: bytes = b"") -> Store:
        """The same, and wait for the end."""
        store = self.begin_store(keys, blocks, parent)
        self.wait(lambda: store.is_over and store.is_settled)
        return store

    def store_new(self, chunks: int) -> list[bytes]:
        """Populate the first blocks under keys of their own; returns these."""
        keys = random_keys(chunks)
        self.populate(keys, range(chunks * self.geometry.blocks_per_chunk(0)))
        return keys

    def populate(self, keys: Sequence[bytes], blocks: Blocks) -> Store:
        """Compute chunks in these blocks, and store them whole."""
        self.compute(keys, blocks)
        store = self.store(keys, blocks)
        expect_whole(store)
        return store

    def find(self, request: str, keys: Sequence[bytes]) -> int:
        """The lease of chunks that must all be there."""
        found = self.client.lookup(request, keys).wait(self._patience_s)
        if found is None or found.chunks != len(keys):
            raise LaminaError("stored chunks are missing", "Look at the server's log")
        return found.lease

    def begin_leased(self, request: str, lease: int, blocks: Blocks, width: int = 1) -> Retrieve:
        """Begin to retrieve what is leased, from its first chunk, `width` layers a slice."""
        retrieve = self.client.retrieve(request, lease, 0, [ids(blocks)], width)
        if retrieve is None:
            raise LaminaError("the server is gone", "Look at its log")
        return retrieve

    def begin_retrieve(
        self, request: str, keys: Sequence[bytes], blocks: Blocks, width: int = 1
    ) -> Retrieve:
        """Find chunks, which must all be there, and begin to retrieve them."""
        return self.begin_leased(request, self.find(request, keys), blocks, width)

    def retrieve(
        self, request: str, keys: Sequence[bytes], blocks: Blocks, width: int = 1
    ) -> Retrieve:
        """The same, and wait until it is acknowledged, however it ended."""
        retrieve = self.begin_retrieve(request, keys, blocks, width)
        self.wait(lambda: retrieve.is_acknowledged)
        return retrieve

    def check_hit(
        self, request: str, keys: Sequence[bytes], blocks: Blocks, width: int = 1
    ) -> None:
        """Retrieve chunks to these blocks, and compare every byte. Raises `WrongBytesError`."""
        self.poison(blocks)
        outcome = self.retrieve(request, keys, blocks, width).outcome
        if outcome is not TransferStatus.OK:
            raise WrongBytesError(f"a retrieve ended as {outcome!r}")
        self.expect_chunks(keys, blocks)

    def wait(self, condition: Callable[[], object], pause_s: float = _PAUSE_S) -> None:
        """Poll the client until `condition` holds."""
        until_s = time.monotonic() + self._patience_s
        self.client.poll()
        while not condition():
            if time.monotonic() > until_s:
                raise LaminaError("what was waited for did not happen", "Look at the server's log")
            if pause_s:
                time.sleep(pause_s)
            self.client.poll()

    def close(self) -> None:
        self.client.close()
