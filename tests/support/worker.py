"""A worker without a model: KV memory full of known bytes, with a client around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.client import Client, Retrieve, Store
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import BlockIds, Geometry, Group, Layer, PageMap, PlanePages
from lamina.settings import ClientSettings
from tests.support.wait import eventually

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
POISON = 0xA5


def small_geometry(layers: int = 8, page_bytes: int = 512, planes: int = 1) -> Geometry:
    """One group, `layers` equal layers."""
    return Geometry(
        CHUNK_TOKENS,
        (Group(BLOCK_TOKENS),),
        tuple(Layer(f"layers.{i}", 0, planes, page_bytes) for i in range(layers)),
    )


class PageWorker:
    """One region per layer; `pages[layer]` has shape (planes, blocks, page bytes)."""

    def __init__(
        self,
        socket: Path,
        geometry: Geometry | None = None,
        blocks: int = 64,
        clock: Callable[[], float] = time.monotonic,
        engine: str | None = None,
        description: bytes = b"",
        device: HostWorkerDevice | None = None,
        model: str = "",
        **settings: Any,
    ) -> None:
        self.geometry = geometry or small_geometry()
        self.blocks = blocks
        self.pages = [
            np.full((layer.planes, blocks, layer.page_bytes), POISON, np.uint8)
            for layer in self.geometry.layers
        ]
        settings = {"suspect_after_ms": 5_000, "lookup_timeout_ms": 5_000, **settings}
        self.client = Client(
            ClientSettings(socket=socket, **settings),
            device or HostWorkerDevice(),
            "worker",
            engine,
            clock,
            model,
        )
        page_map = PageMap(
            (blocks,),
            tuple(
                tuple(
                    PlanePages(index, plane * blocks * layer.page_bytes, layer.page_bytes)
                    for plane in range(layer.planes)
                )
                for index, layer in enumerate(self.geometry.layers)
            ),
        )
        regions = [
            self.client.device.export(pages.ctypes.data, pages.nbytes) for pages in self.pages
        ]
        self.client.register(self.geometry, page_map, regions, description)
        self.client.connect()

    def fill(self, block_ids: Sequence[int], seed: int = 0) -> None:
        """Random bytes into these blocks of every layer."""
        rng = np.random.default_rng(seed)
        for pages in self.pages:
            shape = (pages.shape[0], len(block_ids), pages.shape[2])
            pages[:, list(block_ids)] = rng.integers(0, 256, shape, np.uint8)

    def poison(self, block_ids: Sequence[int]) -> None:
        for pages in self.pages:
            pages[:, list(block_ids)] = POISON

    def read(self, block_ids: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """A copy of these blocks' pages, one array a layer."""
        return [pages[:, list(block_ids)].copy() for pages in self.pages]

    def save(self, keys: Sequence[bytes], block_ids: Sequence[int], parent: bytes = b"") -> Store:
        """Store full chunks and wait for the end."""
        store = self.begin_save(keys, block_ids, parent)
        self.wait(lambda: store.is_over)
        return store

    def begin_save(
        self, keys: Sequence[bytes], block_ids: Sequence[int], parent: bytes = b""
    ) -> Store:
        """Begin to store full chunks."""
        store = self.client.store(parent, keys, [ids(block_ids)], self.client.write_ticket())
        assert store is not None
        return store

    def retrieve(
        self, request: str, keys: Sequence[bytes], block_ids: Sequence[int], width: int = 1
    ) -> Retrieve:
        """Look keys up, which must all be there, and begin to retrieve them."""
        result = self.client.lookup(request, keys).wait(20)
        assert result is not None
        assert result.chunks == len(keys)
        retrieve = self.client.retrieve(request, result.lease, 0, [ids(block_ids)], width)
        assert retrieve is not None
        return retrieve

    def wait(self, condition: Callable[[], object]) -> None:
        """Poll the client until `condition` holds."""

        def polled() -> object:
            self.client.poll()
            return condition()

        eventually(polled)

    def close(self) -> None:
        self.client.close()


def ids(block_ids: Sequence[int]) -> BlockIds:
    return np.array(block_ids, np.int32)


def random_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]
