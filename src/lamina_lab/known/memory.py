"""KV memory without an engine, on any device, and what its link does at best."""

from __future__ import annotations

import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from lamina.copies import CopyList, batches
from lamina.devices import cuda_driver as driver
from lamina.devices.base import WorkerDevice
from lamina.devices.cuda import CudaWorkerDevice
from lamina.devices.host import HostWorkerDevice
from lamina.errors import SettingsError
from lamina.geometry import Allocation, Geometry, PageMap, PlanePages
from lamina.linux import copy_between
from lamina.protocol import Region
from lamina_lab import gpu_memory
from lamina_lab.known.content import POISON, Blocks, Pages, ids


class KvSpace(ABC):
    """The pages of equal layers, full of poison: plane after plane, a layer a region or more."""

    def __init__(
        self, geometry: Geometry, blocks: int, device: WorkerDevice, layers_per_region: int = 1
    ) -> None:
        layer = geometry.layers[0]
        self.geometry = geometry
        self.blocks = blocks
        self.device = device
        self.layer_shape = layer.planes, blocks, layer.page_bytes
        self.layer_bytes = math.prod(self.layer_shape)
        self.layers_per_region = layers_per_region
        self.addresses = self.allocate()
        self.poison(range(blocks))

    @property
    def page_map(self) -> PageMap:
        planes, blocks, page_bytes = self.layer_shape

        def plane(layer: int, number: int) -> PlanePages:
            region, layer = divmod(layer, self.layers_per_region)
            offset_bytes = (layer * planes + number) * blocks * page_bytes
            return PlanePages(region, offset_bytes, page_bytes)

        layers = range(len(self.addresses))
        return PageMap(
            (blocks,), tuple(tuple(plane(layer, n) for n in range(planes)) for layer in layers)
        )

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        firsts = self.addresses[:: self.layers_per_region]
        nbytes = self.layers_per_region * self.layer_bytes
        return tuple(Allocation(first, nbytes) for first in firsts)

    def export(self) -> tuple[Region, ...]:
        """For whoever registers without a client."""
        return tuple(map(self.device.export, self.allocations))

    @abstractmethod
    def allocate(self) -> list[int]:
        """The address of each layer, kept as long as the space."""

    @abstractmethod
    def write(self, layer: int, blocks: Blocks, pages: Pages) -> None:
        """Copy pages, shape (planes, blocks, page bytes), to device memory and wait."""

    @abstractmethod
    def read(self, layer: int, blocks: Blocks) -> Pages:
        """Copy pages to the host, in that shape."""

    @abstractmethod
    def poison(self, blocks: Blocks) -> None:
        """Set these blocks to `POISON` in every layer."""

    def make_current(self) -> None:  # noqa: B027
        """Let the calling thread use the device; the one that makes the space can."""

    @abstractmethod
    def link_gbps(self, nbytes: int, *, to_device: bool) -> float:
        """The ceiling: one plain copy of `nbytes` between host and device, in GB/s."""

    def bare_gbps(self, nbytes: int, piece_bytes: int) -> float | None:
        """What a bare loop of the driver's copy calls reaches with scattered pieces, in GB/s.

        No server, no planning: the bound of any server that makes these calls. None where the
        question makes no sense.
        """
        return None


class HostKvSpace(KvSpace):
    """CPU memory, `pages` of shape (layers, planes, blocks, page bytes); the link is a copy between
    processes by the kernel."""

    pages: Pages

    def __init__(
        self,
        geometry: Geometry,
        blocks: int,
        device: WorkerDevice | None = None,
        layers_per_region: int = 1,
    ) -> None:
        super().__init__(geometry, blocks, device or HostWorkerDevice(), layers_per_region)

    def allocate(self) -> list[int]:
        layers = len(self.geometry.layers)
        memory = np.frombuffer(mmap.mmap(-1, layers * self.layer_bytes), np.uint8)
        self.pages = memory.reshape(layers, *self.layer_shape)
        return [int(pages.ctypes.data) for pages in self.pages]

    def write(self, layer: int, blocks: Blocks, pages: Pages) -> None:
        self.pages[layer][:, ids(blocks)] = pages

    def read(self, layer: int, blocks: Blocks) -> Pages:
        pages: Pages = self.pages[layer]
        return pages[:, ids(blocks)]  # a copy: indexed by an array

    def poison(self, blocks: Blocks) -> None:
        self.pages[:, :, ids(blocks)] = POISON

    def link_gbps(self, nbytes: int, *, to_device: bool) -> float:
        source, target = (np.full(nbytes, fill, np.uint8) for fill in (1, 2))
        pieces = [np.array([[array.ctypes.data, nbytes]], np.uint64) for array in (source, target)]
        started = time.perf_counter()
        copy_between(os.getpid(), *pieces, into_remote=True)
        return nbytes / (time.perf_counter() - started) / 1e9


class CudaKvSpace(KvSpace):
    """Memory of the first visible GPU."""

    def __init__(self, geometry: Geometry, blocks: int) -> None:
        self._context = driver.retain_primary_context(0)
        self.make_current()
        super().__init__(geometry, blocks, CudaWorkerDevice())

    def allocate(self) -> list[int]:
        return [gpu_memory.allocate(self.layer_bytes) for _ in self.geometry.layers]

    def write(self, layer: int, blocks: Blocks, pages: Pages) -> None:
        for plane, run, address in self._runs(layer, blocks):
            part = np.ascontiguousarray(pages[plane, run])
            gpu_memory.write(address, part.ctypes.data, part.nbytes)

    def read(self, layer: int, blocks: Blocks) -> Pages:
        planes, _, page_bytes = self.layer_shape
        pages = np.empty((planes, len(blocks), page_bytes), np.uint8)
        for plane, run, address in self._runs(layer, blocks):
            part = pages[plane, run]
            gpu_memory.read(part.ctypes.data, address, part.nbytes)
        return pages

    def poison(self, blocks: Blocks) -> None:
        _, _, page_bytes = self.layer_shape
        for layer in range(len(self.addresses)):
            for _, run, address in self._runs(layer, blocks):
                gpu_memory.fill(address, POISON, (run.stop - run.start) * page_bytes)
        driver.synchronize_context()  # side streams do not wait for the fills

    def make_current(self) -> None:
        driver.set_context(self._context)

    def _runs(self, layer: int, blocks: Blocks) -> Iterator[tuple[int, slice, int]]:
        """Runs of consecutive blocks: plane, which of `blocks` they are, address."""
        planes, plane_blocks, page_bytes = self.layer_shape
        wanted = ids(blocks).astype(np.int64)
        ends = (np.flatnonzero(np.diff(wanted, append=-1) != 1) + 1).tolist()
        for plane in range(planes):
            for start, end in zip([0, *ends], ends, strict=False):
                first = plane * plane_blocks + int(wanted[start])
                yield plane, slice(start, end), self.addresses[layer] + first * page_bytes

    def link_gbps(self, nbytes: int, *, to_device: bool) -> float:
        host = np.full(nbytes, 1, np.uint8)
        pointer, stream = gpu_memory.allocate(nbytes), driver.create_stream()
        driver.pin(host.ctypes.data, nbytes)
        target, source = (pointer, host.ctypes.data) if to_device else (host.ctypes.data, pointer)
        rates = []
        for _ in range(5):
            started = time.perf_counter()
            driver.copy_one(target, source, nbytes, stream, to_device=to_device)
            driver.synchronize(stream)
            rates.append(nbytes / (time.perf_counter() - started) / 1e9)
        driver.unpin(host.ctypes.data)
        gpu_memory.free(pointer)
        return max(rates)

    def bare_gbps(self, nbytes: int, piece_bytes: int) -> float | None:
        host = np.full(nbytes, 1, np.uint8)
        pointer, stream = gpu_memory.allocate(nbytes), driver.create_stream()
        driver.pin(host.ctypes.data, nbytes)
        offsets = np.arange(nbytes // piece_bytes, dtype=np.int64) * piece_bytes
        sources = host.ctypes.data + offsets
        targets = pointer + np.random.default_rng(2).permutation(offsets)
        pieces = CopyList(targets, sources, np.full(len(offsets), piece_bytes, np.int64))
        rates = []
        for _ in range(5):
            started = time.perf_counter()
            for engine, source, size in batches(pieces):
                arrays = engine.ctypes.data, source.ctypes.data, size.ctypes.data
                driver.copy_batch(*arrays, len(size), stream, to_device=True)
            driver.synchronize(stream)
            rates.append(nbytes / (time.perf_counter() - started) / 1e9)
        driver.unpin(host.ctypes.data)
        gpu_memory.free(pointer)
        return max(rates)


def kv_space(device: str, geometry: Geometry, blocks: int) -> KvSpace:
    """Memory on `host` or `cuda`."""
    spaces: dict[str, Callable[[Geometry, int], KvSpace]] = {
        "host": HostKvSpace,
        "cuda": CudaKvSpace,
    }
    if device not in spaces:
        raise SettingsError(f"there is no device {device!r}", f"Use {' or '.join(spaces)}")
    return spaces[device](geometry, blocks)
