"""A worker whose KV goes through small rings, and whose side streams a test holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lamina.board import Board, reached
from lamina.client import Retrieve
from lamina.client.connection import Connection
from lamina.client.retrieve import RingRetrieve
from lamina.devices.host import HostWorkerDevice
from lamina.devices.host_rings import HostRings
from lamina_lab.known.content import equal_layers
from tests.support.wait import PATIENCE_S, eventually
from tests.support.worker import PageWorker

RETRIEVE_RING_BYTES = 64 << 10
STORE_RING_BYTES = 32 << 10
CHUNKS = 4
"""A retrieve of so many has a record a layer, a quarter of its ring, and takes two rings' room."""
GEOMETRY = equal_layers(8, 512, 2)
RECORDS = 8
BLOCKS = CHUNKS * GEOMETRY.blocks_per_chunk(0)
COMMANDS_A_RECORD = 3
"""Of the place stream: wait, move, count."""


class ManualClock:
    """Virtual time, for deadlines."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_deadlines(self) -> None:
        """Of every transfer in flight."""
        self.now_s += 60.0


class WaitingDevice(HostWorkerDevice):
    """Its compute stream waits for what it is told to, and no call does."""

    def __init__(self) -> None:
        self.waits: list[tuple[Board, int, int]] = []
        """Board, slot and count of all waits, in order."""

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        self.waits.append((board, slot, count))

    @property
    def may_go_on(self) -> bool:
        """Whether every wait is over."""
        return all(reached(board.landed(slot), count) for board, slot, count in self.waits)


class RingWorker(PageWorker):
    """Connected. `clock` is of its deadlines."""

    def __init__(self, socket: Path, blocks: int = 16 * BLOCKS, **options: Any) -> None:
        self.clock = ManualClock()
        options = {"clock": self.clock, "geometry": GEOMETRY, "reconnect_every_ms": 1, **options}
        super().__init__(socket, blocks=blocks, data_path="ring", **options)

    @property
    def rings(self) -> HostRings:
        memory = self.client._memory
        assert memory is not None
        assert isinstance(memory.rings, HostRings)
        return memory.rings

    @property
    def connection(self) -> Connection:
        assert self.client._link is not None
        return self.client._link.connection

    def blocks_of(self, number: int) -> range:
        """The blocks of the retrieve or store of that number; those of 0 are `store_new`'s."""
        return range(number * BLOCKS, (number + 1) * BLOCKS)

    def begin(self, number: int, keys: Sequence[bytes]) -> RingRetrieve:
        """Begin to retrieve into blocks of its own, which are poisoned first."""
        return self.begin_with(number, self.find(f"retrieve {number}", keys))

    def begin_with(self, number: int, lease: int) -> RingRetrieve:
        """The same, of what has been found before."""
        self.poison(self.blocks_of(number))
        retrieve = self.begin_leased(f"retrieve {number}", lease, self.blocks_of(number))
        assert isinstance(retrieve, RingRetrieve)
        return retrieve

    def check(self, number: int, keys: Sequence[bytes]) -> None:
        """Retrieve, and compare every byte."""
        self.check_hit(f"check {number}", keys, self.blocks_of(number))

    def lose_connection(self) -> None:
        """The server learns of it when it reads again."""
        self.connection.close()
        self.client.poll()

    def reconnect(self) -> None:
        """Poll until there is a connection over which transfers go."""

        def is_back() -> bool:
            self.clock.now_s += 0.001
            self.client.poll()
            return self.client.is_usable

        eventually(is_back)

    def let_streams_go(self) -> None:
        self.rings.place_stream.go_on()
        self.rings.gather_stream.go_on()

    def close(self) -> None:
        if self.client._memory is not None:
            self.let_streams_go()
        must_return(super().close)


def passed(retrieve: Retrieve) -> Callable[[], bool]:
    return lambda: retrieve.is_passed


def must_return(call: Callable[[], object]) -> None:
    """Make a call that would hang for ever if the product were wrong."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the call does not return"
