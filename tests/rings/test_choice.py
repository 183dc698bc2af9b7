"""Who gets rings: small pages on a GPU that has room for them; everybody else goes without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamina.devices import cuda_driver as driver
from lamina.devices.base import EngineRings
from lamina.devices.cuda import CudaWorkerDevice
from lamina.devices.host import HostWorkerDevice
from lamina.errors import DeviceError
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap
from lamina_lab.known.content import equal_layers
from tests.support.server import ServerThread
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaWorkerDevice:
    monkeypatch.setattr(driver, "current_device_uuid", lambda: "GPU-0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return CudaWorkerDevice()


@pytest.mark.parametrize(
    ("page_bytes", "wanted"), [(4096, True), (16 << 10, True), (32 << 10, False), (1 << 20, False)]
)
def test_small_pages_on_a_gpu_get_rings(
    gpu: CudaWorkerDevice, page_bytes: int, wanted: bool
) -> None:
    assert gpu.prefers_rings(equal_layers(page_bytes=page_bytes)) is wanted


@pytest.mark.parametrize(("small_layers", "wanted"), [(1, False), (7, True)])
def test_what_counts_is_the_mean_of_all_pages(
    gpu: CudaWorkerDevice, small_layers: int, wanted: bool
) -> None:
    sizes = [4096] * small_layers + [64 << 10] * 4
    layers = tuple(Layer(f"l{i}", 0, 1, size) for i, size in enumerate(sizes))
    assert gpu.prefers_rings(Geometry(64, (Group(16),), layers)) is wanted


def test_where_all_streams_share_a_queue_there_are_no_rings(
    gpu: CudaWorkerDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else would wait behind a record that has not landed."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not gpu.prefers_rings(equal_layers(page_bytes=4096))


class FullDevice(HostWorkerDevice):
    """Would take rings, and has no room for them."""

    def prefers_rings(self, geometry: Geometry) -> bool:
        return True

    def rings(
        self, geometry: Geometry, page_map: PageMap, allocations: Sequence[Allocation]
    ) -> EngineRings:
        raise DeviceError("there is no GPU memory for rings", "Leave some")


def test_without_room_for_rings_pages_are_copied_one_by_one(
    server: ServerThread, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        worker = PageWorker(socket_path, device=FullDevice())
    assert "copied one by one: there is no GPU memory for rings. Leave some" in caplog.text
    keys = worker.store_new(2)
    worker.check_hit("r", keys, range(32, 32 + 2 * BLOCKS_PER_CHUNK), width=3)
    worker.close()


def test_rings_that_were_asked_for_and_cannot_be_had_are_an_error(
    server: ServerThread, socket_path: Path
) -> None:
    with pytest.raises(DeviceError, match="no GPU memory for rings"):
        PageWorker(socket_path, device=FullDevice(), data_path="ring")
