"""The CUDA device: the conformance suite, unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lamina.devices import cuda_driver as driver
from lamina.devices.cuda import CudaServerDevice, CudaWorkerDevice
from lamina.devices.cuda_memory import PinnedSegments
from lamina_lab import gpu_memory
from tests.devices.conformance import DeviceConformance, Kit, WorkerSide


class CudaSide:
    """A worker whose KV is plain device memory."""

    def __init__(self) -> None:
        self._context = driver.retain_primary_context(0)
        self.use_here()
        self.device = CudaWorkerDevice()
        self.stream = driver.create_stream()

    def use_here(self) -> None:
        driver.set_context(self._context)

    def allocate(self, nbytes: int) -> int:
        return gpu_memory.allocate(nbytes)

    def free(self, address: int) -> None:
        gpu_memory.free(address)

    def write(self, address: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        driver.copy_one(address, source.ctypes.data, len(data), self.stream, to_device=True)

    def read(self, address: int, nbytes: int) -> bytes:
        target = np.empty(nbytes, np.uint8)
        driver.copy_one(target.ctypes.data, address, nbytes, self.stream, to_device=False)
        driver.synchronize(self.stream)
        return target.tobytes()


class CudaKit:
    worker_side: Callable[[], WorkerSide] = CudaSide
    notices_death = False

    def server_device(self) -> CudaServerDevice:
        return CudaServerDevice(0, PinnedSegments())


@pytest.fixture(scope="module")
def kit() -> Kit:
    return CudaKit()


class TestCudaDevice(DeviceConformance):
    """All of the suite."""


class TestWithoutBatchCopies(DeviceConformance):
    """All of it again as on a driver without batch copies, or with memory that is not pinned."""

    @pytest.fixture(autouse=True)
    def _no_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CudaServerDevice, "can_batch", False)
