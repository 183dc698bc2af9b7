"""KV memory of any geometry: planes apart or interleaved, gaps between pages, guards around all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lamina.client import Client, Retrieve, Store
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Allocation, BlockIds, Geometry, PageMap, PlanePages
from lamina.settings import ClientSettings
from lamina_lab.known.content import POISON, ids
from tests.support.wait import eventually

Bytes = npt.NDArray[np.uint8]
DataPath = Literal["direct", "ring"]
_GUARD_BYTES = 64


class RandomMemory:
    """`chunks` chunks of blocks, full of random bytes: the same for the same `seed`."""

    def __init__(self, geometry: Geometry, chunks: int, seed: int) -> None:
        rng = random.Random(seed)
        self.geometry = geometry
        self.blocks = [
            chunks * geometry.blocks_per_chunk(group) for group in range(len(geometry.groups))
        ]
        ends = [_GUARD_BYTES] * rng.randint(1, 3)
        planes = [tuple(self._lay_out(layer, ends, rng)) for layer in range(len(geometry.layers))]
        self.page_map = PageMap(tuple(self.blocks), tuple(planes))
        content = np.random.default_rng(seed)
        self.regions: list[Bytes] = [
            content.integers(0, 256, end + _GUARD_BYTES, np.uint8) for end in ends
        ]
        self.allocations = [Allocation(int(r.ctypes.data), r.nbytes) for r in self.regions]

    def _lay_out(self, number: int, ends: list[int], rng: random.Random) -> Iterator[PlanePages]:
        """The planes of a layer behind what a region has so far."""
        layer, region = self.geometry.layers[number], rng.randrange(len(ends))
        blocks = self.blocks[layer.group]
        gap = rng.choice([0, 0, 1, 7, 32])
        if rng.random() < 0.5:  # block after block, each with all planes
            stride = layer.planes * (layer.page_bytes + gap)
            for plane in range(layer.planes):
                yield PlanePages(region, ends[region] + plane * (layer.page_bytes + gap), stride)
            ends[region] += blocks * stride
        else:
            for _ in range(layer.planes):
                yield PlanePages(region, ends[region], layer.page_bytes + gap)
                ends[region] += blocks * (layer.page_bytes + gap) + gap

    def pages(self, block_ids: Sequence[BlockIds]) -> list[bytes]:
        """What is in the pages of these blocks, plane by plane."""
        found = []
        for layer, planes in zip(self.geometry.layers, self.page_map.planes, strict=True):
            for plane in planes:
                for block in block_ids[layer.group]:
                    begin = plane.offset_bytes + int(block) * plane.stride_bytes
                    page = self.regions[plane.region][begin : begin + layer.page_bytes]
                    found.append(page.tobytes())
        return found

    def poison(self, block_ids: Sequence[BlockIds]) -> None:
        """Fill the pages of these blocks with what nobody has stored."""
        for layer, planes in zip(self.geometry.layers, self.page_map.planes, strict=True):
            for plane in planes:
                for block in block_ids[layer.group]:
                    begin = plane.offset_bytes + int(block) * plane.stride_bytes
                    self.regions[plane.region][begin : begin + layer.page_bytes] = POISON

    def without(self, block_ids: Sequence[BlockIds]) -> list[bytes]:
        """All bytes, guards and gaps too, with those of these blocks as zeros."""
        rest = [region.copy() for region in self.regions]
        for layer, planes in zip(self.geometry.layers, self.page_map.planes, strict=True):
            for plane in planes:
                for block in block_ids[layer.group]:
                    begin = plane.offset_bytes + int(block) * plane.stride_bytes
                    rest[plane.region][begin : begin + layer.page_bytes] = 0
        return [region.tobytes() for region in rest]


class MemoryWorker:
    """A connected client around it."""

    def __init__(self, socket: Path, memory: RandomMemory, data_path: DataPath) -> None:
        self.memory = memory
        self.client = Client(
            ClientSettings(
                socket=socket,
                data_path=data_path,
                suspect_after_ms=5_000,
                lookup_timeout_ms=5_000,
                retrieve_timeout_ms=20_000,
                store_timeout_ms=20_000,
            ),
            HostWorkerDevice(),
            data_path,
        )
        self.client.register(memory.geometry, memory.page_map, memory.allocations)
        self.client.connect()

    def wait(self, transfers: Sequence[Retrieve | Store]) -> None:
        """Until the server has answered all."""

        def are_over() -> bool:
            self.client.poll()
            return all(
                each.is_acknowledged if isinstance(each, Retrieve) else each.is_settled
                for each in transfers
            )

        eventually(are_over)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[BlockIds]) -> None:
        """Store chunks, whole."""
        store = self.client.store(b"", keys, block_ids, self.client.write_ticket())
        assert store is not None
        self.wait([store])
        assert store.ended is not None
        assert store.ended.stored == len(keys)

    def begin(
        self,
        request: str,
        keys: Sequence[bytes],
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        width: int,
    ) -> Retrieve:
        found = self.client.lookup(request, keys).wait(20)
        assert found is not None
        assert found.chunks == len(keys)
        retrieve = self.client.retrieve(request, found.lease, start_tokens, block_ids, width)
        assert retrieve is not None
        return retrieve


def random_blocks(memory: RandomMemory, tokens: int, rng: random.Random) -> list[BlockIds]:
    """Blocks for so many tokens, in no order."""
    return [
        ids(rng.sample(range(blocks), tokens // group.block_tokens))
        for blocks, group in zip(memory.blocks, memory.geometry.groups, strict=True)
    ]
