"""KV memory without an engine, on any device: what the transfer benchmark stores and checks."""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from lamina.copies import CopyList, batches
from lamina.devices import cuda_driver as driver
from lamina.devices.base import WorkerDevice
from lamina.devices.cuda import CudaWorkerDevice
from lamina.devices.host import HostWorkerDevice
from lamina.errors import SettingsError
from lamina.linux import copy_between
from lamina_lab import gpu_memory

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5


class KvSpace(ABC):
    """One allocation per layer on some device, filled with poison."""

    device: WorkerDevice

    def __init__(self, layers: int, layer_bytes: int) -> None:
        self.layer_bytes = layer_bytes
        self.addresses = [self.allocate(layer_bytes) for _ in range(layers)]
        self.poison()

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of device memory, kept until the process ends."""

    @abstractmethod
    def write(self, address: int, data: Bytes) -> None:
        """Copy host bytes to device memory and wait."""

    @abstractmethod
    def read(self, address: int, nbytes: int) -> Bytes:
        """Copy device memory to the host."""

    @abstractmethod
    def poison(self) -> None:
        """Set everything to `POISON`."""

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
    """CPU memory; the link is a copy between processes by the kernel."""

    def __init__(self, layers: int, layer_bytes: int) -> None:
        self.device = HostWorkerDevice()
        self._arrays: dict[int, Bytes] = {}
        super().__init__(layers, layer_bytes)

    def allocate(self, nbytes: int) -> int:
        array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._arrays[array.ctypes.data] = array
        return int(array.ctypes.data)

    def write(self, address: int, data: Bytes) -> None:
        self._view(address, len(data))[:] = data

    def read(self, address: int, nbytes: int) -> Bytes:
        return self._view(address, nbytes).copy()

    def poison(self) -> None:
        for array in self._arrays.values():
            array[:] = POISON

    def link_gbps(self, nbytes: int, *, to_device: bool) -> float:
        source, target = (np.full(nbytes, fill, np.uint8) for fill in (1, 2))
        pieces = [np.array([[array.ctypes.data, nbytes]], np.uint64) for array in (source, target)]
        started = time.perf_counter()
        copy_between(os.getpid(), *pieces, into_remote=True)
        return nbytes / (time.perf_counter() - started) / 1e9

    def _view(self, address: int, nbytes: int) -> Bytes:
        start = max(base for base in self._arrays if base <= address)
        return self._arrays[start][address - start : address - start + nbytes]


class CudaKvSpace(KvSpace):
    """Memory of the first visible GPU."""

    def __init__(self, layers: int, layer_bytes: int) -> None:
        driver.set_context(driver.retain_primary_context(0))
        self.device = CudaWorkerDevice()
        super().__init__(layers, layer_bytes)

    def allocate(self, nbytes: int) -> int:
        return gpu_memory.allocate(nbytes)

    def write(self, address: int, data: Bytes) -> None:
        gpu_memory.write(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        gpu_memory.read(data.ctypes.data, address, nbytes)
        return data

    def poison(self) -> None:
        for address in self.addresses:
            gpu_memory.fill(address, POISON, self.layer_bytes)

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


def kv_space(device: str, layers: int, layer_bytes: int) -> KvSpace:
    """Memory on `host` or `cuda`."""
    spaces = {"host": HostKvSpace, "cuda": CudaKvSpace}
    if device not in spaces:
        raise SettingsError(f"there is no device {device!r}", f"Use {' or '.join(spaces)}")
    return spaces[device](layers, layer_bytes)
