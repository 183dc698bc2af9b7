"""Transfers and streams for tests of lanes: they do and note what the test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from lamina.board import Board
from lamina.copies import CopyList, CopyPlan
from lamina.devices.base import CopyStream, EngineMemory
from lamina.errors import DeviceError
from lamina.geometry import Geometry, Group, Layer, PageMap
from lamina.server.lane import Lane
from lamina.server.routes import DirectRoute
from lamina.server.transfer import Transfer

PATIENCE_S = 20.0
NO_COPIES = CopyList(*(np.empty(0, np.int64) for _ in range(3)))
NO_PLAN = CopyPlan(
    Geometry(1, (Group(1),), (Layer("0", 0, 1, 1),)),
    PageMap((1,), ((),)),
    region_addresses=(),
    chunk_addresses=(),
    start_tokens=0,
    block_ids=(np.empty(0, np.int32),),
)


class NoMemory:
    """Memory of an engine that is not there."""

    addresses = ()

    def close(self) -> None: ...


class ScriptedStream:
    """What is enqueued takes effect at once, or (`holds_back`) when the test says so."""

    def __init__(self, holds_back: bool = False, only_enqueues: bool = False) -> None:
        self.only_enqueues = only_enqueues
        self._holds_back = holds_back
        self._mark = 0
        self._done = 0
        self.fault: DeviceError | None = None
        """Raised once, by the call named `faulty`."""
        self.faulty = "is_done"
        self.drained = threading.Event()
        """`drain` waits for it."""
        self.drained.set()

    def copy(self, memory: EngineMemory, copies: CopyList) -> None: ...

    def announce(self, memory: EngineMemory, slot: int, count: int) -> None: ...

    def mark(self) -> int:
        self._break_in("mark")
        self._mark += 1
        return self._mark

    def is_done(self, mark: int) -> bool:
        self._break_in("is_done")
        return not self._holds_back or mark <= self._done

    def drain(self) -> None:
        assert self.drained.wait(PATIENCE_S), "the test left a drain held"

    def complete(self, mark: int) -> None:
        self._done = mark

    def _break_in(self, call: str) -> None:
        if call == self.faulty and self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


class Log:
    """What happened, in order, from any thread."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, entry: str) -> None:
        self.entries.append(entry)


class BareTransfer(Transfer):
    """A store of nothing by an engine that is not there; nobody waits for its end."""

    def __init__(self, memory: EngineMemory, board: Board, ticket: int | None) -> None:
        route = DirectRoute(NO_PLAN, (), board, ticket)
        super().__init__(0, memory, board, ticket, route, 0.0, lambda call: call())


class ScriptedTransfer(BareTransfer):
    """Notes `name.0`, `name.1`, … and `name.end`; may be held before a step, or break there."""

    def __init__(
        self,
        log: Log,
        board: Board,
        name: str,
        steps: int = 1,
        ticket: int | None = None,
        hold_before: int | None = None,
        break_before: int | None = None,
        fault: Exception | None = None,
    ) -> None:
        super().__init__(NoMemory(), board, ticket)
        self._log = log
        self._name = name
        self._steps = steps
        self._hold_before = hold_before
        self._break_before = break_before
        self._fault = fault
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self.over = threading.Event()

    def run(self, stream: CopyStream) -> Iterator[None]:
        for step in range(self._steps):
            if step == self._hold_before:
                self.is_held.set()
                assert self.go_on.wait(PATIENCE_S), "the test left a transfer held"
            if step == self._break_before and self._fault is not None:
                raise self._fault
            if self.cancelled_as:
                return
            stream.copy(self.memory, NO_COPIES)
            self._log(f"{self._name}.{step}")
            yield

    def end(self, error: DeviceError | None) -> None:
        self.error = error
        self._log(f"{self._name}.end")
        assert not self.over.is_set(), "ended twice"
        self.over.set()

    def wait(self) -> None:
        assert self.over.wait(PATIENCE_S), f"{self._name} has not ended"


class Make:
    """Makes transfers and remembers them, so that none stays held."""

    def __init__(self, log: Log, board: Board) -> None:
        self._log = log
        self._board = board
        self._made: list[ScriptedTransfer] = []

    def __call__(self, name: str, **options: Any) -> ScriptedTransfer:
        self._made.append(ScriptedTransfer(self._log, self._board, name, **options))
        return self._made[-1]

    def let_all_go(self) -> None:
        for transfer in self._made:
            transfer.go_on.set()


def stop(lane: Lane) -> None:
    """Stop a lane whose transfers can all end; a broken one fails the test instead of hanging."""
    stopper = threading.Thread(target=lane.stop, daemon=True)
    stopper.start()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive(), "the lane does not stop"
