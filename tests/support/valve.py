"""Hold points: a server device whose copies pass through valves that a test opens and closes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lamina.board import Board
from lamina.copies import CopyList
from lamina.devices.base import CopyStream, Direction, EngineMemory, ServerDevice
from lamina.devices.host import HostServerDevice
from lamina.errors import DeviceError
from lamina.linux import Peer
from lamina.protocol import Region

PATIENCE_S = 20.0
"""After this long a hold point that is never reached fails its test."""


class Valve:
    """Copies of one direction wait here while it is closed. Open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: open
        self._waiting = False
        self._fault: DeviceError | None = None
        self.passed = 0
        """Copies that went through."""
        self._ends_held = False
        self._ending = False

    def close(self) -> None:
        """Let no further copy pass."""
        with self._changed:
            self._permits = 0

    def open(self) -> None:
        """Let everything pass."""
        with self._changed:
            self._permits = None
            self._ends_held = self._ending = False
            self._changed.notify_all()

    def let_pass(self, copies: int) -> None:
        """Let this many more copies pass a closed valve."""
        with self._changed:
            self._permits = (self._permits or 0) + copies
            self._changed.notify_all()

    def hold_ends(self) -> None:
        """Let no copy that went through be done: as if it were still on the wire."""
        with self._changed:
            self._ends_held = True

    def let_end(self) -> None:
        with self._changed:
            self._ends_held = self._ending = False

    def wait_until_ending(self) -> None:
        """Return once a transfer only waits for its copies to be done."""
        with self._changed:
            ending = self._changed.wait_for(lambda: self._ending, PATIENCE_S)
        assert ending, "no transfer came to its end"

    def may_end(self) -> bool:
        """The lane's side: whether copies may be done."""
        with self._changed:
            self._ending = self._ends_held
            self._changed.notify_all()
            return not self._ends_held

    def fail_next(self, error: DeviceError) -> None:
        """Make the next copy raise instead of copying."""
        with self._changed:
            self._fault = error

    def heal(self) -> None:
        """Take back a `fail_next` that no copy has met."""
        with self._changed:
            self._fault = None

    @property
    def has_fault(self) -> bool:
        """Whether the next copy will raise."""
        return self._fault is not None

    @property
    def is_holding(self) -> bool:
        """Whether a copy waits at the closed valve."""
        return self._waiting and self._permits == 0

    def wait_until_held(self) -> None:
        """Return once a copy waits at the closed valve."""
        with self._changed:
            held = self._changed.wait_for(lambda: self.is_holding, PATIENCE_S)
        assert held, "no copy came to the valve"

    def pass_one(self) -> None:
        """The lane's side: wait for a permit, or raise the fault."""
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
            passed = self._changed.wait_for(lambda: self._permits != 0, PATIENCE_S)
            self._waiting = False
            if not passed:
                raise DeviceError("the test left a valve closed", "Open it")
            if self._permits is not None:
                self._permits -= 1
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            self.passed += 1


class _ValvedStream:
    def __init__(self, inner: CopyStream, valve: Valve) -> None:
        self._inner = inner
        self._valve = valve

    @property
    def only_enqueues(self) -> bool:
        return self._inner.only_enqueues

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        self._valve.pass_one()
        self._inner.copy(memory, copies)

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None:
        self._inner.announce(memory, slot, count)

    def mark(self) -> int:
        return self._inner.mark()

    def is_done(self, mark: int) -> bool:
        return self._valve.may_end() and self._inner.is_done(mark)

    def drain(self) -> None:
        self._inner.drain()


class ValvedDevice:
    """A host device with a valve per direction."""

    def __init__(self, inner: ServerDevice | None = None) -> None:
        self._inner = inner or HostServerDevice()
        self.retrieves = Valve()
        self.stores = Valve()

    def near_cpus(self) -> set[int] | None:
        return self._inner.near_cpus()

    def pin(self, address: int, nbytes: int) -> None:
        self._inner.pin(address, nbytes)

    def open(self, peer: Peer, board: Board, regions: Sequence[Region]) -> EngineMemory:
        return self._inner.open(peer, board, regions)

    def stream(self, direction: Direction) -> CopyStream:
        valve = self.retrieves if direction is Direction.RETRIEVE else self.stores
        return _ValvedStream(self._inner.stream(direction), valve)
