"""What a device that fails leaves held: nothing of the engines it served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lamina.board import Board
from lamina.devices.base import CopyStream, Direction, EngineMemory
from lamina.devices.host import HostMemory, HostServerDevice
from lamina.errors import DeviceError, RequestRefusedError
from lamina.linux import Peer
from lamina.protocol import Region
from lamina_lab.known.content import random_keys
from tests.e2e.strangers import open_fds
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker

FAULT = DeviceError("the device failed", "Mend it")
OTHER_FAULT = DeviceError("the link broke", "Mend it")


class _Memory(HostMemory):
    def __init__(
        self, device: FailingDevice, peer: Peer, board: Board, regions: Sequence[Region]
    ) -> None:
        super().__init__(peer, board, regions)
        self._device = device

    def close(self) -> None:
        if self._device.fails_to_close:
            raise FAULT
        self._device.opened.remove(self)


class FailingDevice(HostServerDevice):
    """A host device that fails while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[EngineMemory] = []
        self.fails_to_make_streams = False
        self.fails_to_close = False

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        self.opened.append(_Memory(self, peer, board, regions))
        return self.opened[-1]

    def stream(self, direction: Direction) -> CopyStream:
        if self.fails_to_make_streams:
            raise FAULT
        return super().stream(direction)


@pytest.fixture
def device() -> FailingDevice:
    return FailingDevice()


@pytest.fixture
def server(device: FailingDevice, socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path, device)
    yield thread
    thread.stop()


def test_a_worker_that_gets_no_stream_leaves_nothing_opened(
    device: FailingDevice, server: ServerThread, make_worker: Callable[..., PageWorker]
) -> None:
    device.fails_to_make_streams = True
    with pytest.raises(RequestRefusedError, match="the device failed"):
        make_worker()
    eventually(lambda: server.gauges()["sessions"] == 0)
    assert not device.opened
    device.fails_to_make_streams = False
    make_worker()
    assert len(device.opened) == 1


def begin_retrieve(worker: PageWorker) -> None:
    worker.begin_retrieve("r", worker.store_new(1), range(4, 8))


def begin_store(worker: PageWorker) -> None:
    worker.begin_store(random_keys(1), range(4))


@pytest.mark.parametrize("direction", ["retrieves", "stores"])
def test_why_transfers_fail_is_said_once_until_one_does_not(
    server: ServerThread, worker: PageWorker, caplog: pytest.LogCaptureFixture, direction: str
) -> None:
    """A thousand may fail of an engine that dies, and say so while the server has better to do."""
    keys = worker.store_new(1)

    def transfer(fault: DeviceError | None) -> str:
        """What it is called."""
        valve = server.device.retrieves if direction == "retrieves" else server.device.stores
        if fault is not None:
            valve.fail_next(fault)
        if direction == "retrieves":
            return f"retrieve {worker.retrieve('r', keys, range(4, 8)).number}"
        return f"store {worker.store(random_keys(1), range(4)).number}"

    faults = (FAULT, FAULT, None, FAULT, OTHER_FAULT, OTHER_FAULT)
    names = [transfer(fault) for fault in faults]
    assert len(set(names)) == len(faults)
    assert [record.getMessage() for record in caplog.records] == [
        f"{names[n]} of worker (pid {os.getpid()}) failed: {faults[n]}" for n in (0, 3, 4)
    ]


@pytest.mark.parametrize("begin", [begin_retrieve, begin_store])
def test_memory_that_cannot_be_given_back_keeps_no_pin_no_budget_and_no_descriptor(
    device: FailingDevice,
    server: ServerThread,
    socket_path: Path,
    caplog: pytest.LogCaptureFixture,
    begin: Callable[[PageWorker], None],
) -> None:
    """A session closes it with its last transfer, whose own account must not be cut short."""
    files = open_fds()
    worker = PageWorker(socket_path)
    valve = server.device.stores if begin is begin_store else server.device.retrieves
    valve.close()
    begin(worker)
    valve.wait_until_held()  # a store that is given up sooner is dropped at once
    assert server.gauges()["queued_transfers"] == 1
    device.fails_to_close = True
    worker.client.close()
    eventually(lambda: server.gauges()["sessions"] == 0)
    held = server.gauges()
    assert held["pins"] or held["arena_reserved_bytes"]
    valve.open()

    def is_all_given_back() -> bool:
        gauges = server.gauges()
        return gauges["pins"] == gauges["arena_reserved_bytes"] == 0

    eventually(is_all_given_back)
    eventually(lambda: open_fds() == files)  # closed by a thread of the server's
    assert "could not be given back" in caplog.text
