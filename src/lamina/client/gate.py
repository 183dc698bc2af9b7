"""The gate: when a request may be released, and what each layer of a step waits for.

`Gate` belongs to one retrieve and answers once: released, when its first slices have landed (or it
failed: somebody must then see to it). `StepGates` arms every retrieve that a step may read, also
those of other requests whose blocks it shares: before a layer's attention, the compute stream
waits for that layer's slice, once per slice; after the step, `settle` says which retrieves failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lamina.board import Board, TransferStatus, reached
from lamina.client.retrieve import Retrieve
from lamina.devices.base import WorkerDevice

_SETTLE_POLL_S = 50e-6


class Gate:
    """Releases a retrieve's request after `release_after_slices` slices (0: at once)."""

    def __init__(self, retrieve: Retrieve, release_after_slices: int) -> None:
        self.retrieve = retrieve
        self.release_after_slices = min(release_after_slices, len(retrieve.slices))

    @property
    def is_released(self) -> bool:
        """Whether the request may run, or must be looked after because its retrieve failed."""
        if self.retrieve.outcome is not None:
            return True
        return self.retrieve.landed_slices >= self.release_after_slices

    @property
    def is_settled(self) -> bool:
        """Whether all slices have landed or the retrieve has failed: no layer needs to wait."""
        return self.retrieve.outcome is not None


class StepGates:
    """The waits of one forward pass. Called by the thread that launches the model."""

    def __init__(self, device: WorkerDevice, gates: Sequence[Gate], stream: Any = None) -> None:
        self._device = device
        self._stream = stream
        self.gates = tuple(gate for gate in gates if not gate.is_settled)
        self._failed_before = tuple(gate for gate in gates if gate.retrieve.outcome)
        self._waited = [0] * len(self.gates)
        """How many slices of each gate the stream waits for already."""
        self._reached: dict[tuple[Board, int], int] = {}
        """The last count that the stream waits for, by board and slot: those of a ring are one
        order, so that one wait serves all retrieves before it."""
        self._layers: set[int] = set()
        """Those that said that they are about to run."""
        self._is_all_waited = False
        self.waited_s = 0.0
        """Time spent in waits: the stall, on a synchronous device."""

    def before_layer(self, layer: int) -> None:
        """Make the compute stream wait for the slices of `layer`, unless it does already.

        Slices land in order, so a wait for one is a wait for all before it: a slice is waited for
        at the first of its layers that runs, whatever the order of the layers. Raises `UsageError`
        as `Retrieve.slice_of`.
        """
        self._layers.add(layer)
        self._wait([gate.retrieve.slice_of(layer) + 1 for gate in self.gates])

    def before_all(self) -> None:
        """Wait for everything at once: for a step whose layers cannot be hooked."""
        self._is_all_waited = True
        self._wait([len(gate.retrieve.slices) for gate in self.gates])

    def _wait(self, slices: Sequence[int]) -> None:
        """For so many slices of each gate, with one wait for all counts of one slot."""
        latest: dict[tuple[Board, int], int] = {}
        for index, (gate, needed) in enumerate(zip(self.gates, slices, strict=True)):
            if needed <= self._waited[index]:
                continue
            self._waited[index] = needed
            retrieve = gate.retrieve
            if retrieve.is_acknowledged:
                continue  # over since the step was armed; its board may be gone
            slot, count = retrieve.awaited(needed)
            waited = latest.get((retrieve.board, slot), self._reached.get((retrieve.board, slot)))
            if waited is None or not reached(waited, count):
                latest[retrieve.board, slot] = count
        for (board, slot), count in latest.items():
            self._reached[board, slot] = count
            started = time.perf_counter()
            self._device.wait_landed(board, slot, count, self._stream)
            self.waited_s += time.perf_counter() - started

    def unwaited(self) -> list[Retrieve]:
        """Retrieves some layer of which ran without a wait: read too early, if they were read.

        A layer that did not say that it runs may have run before its slice was waited for, whatever
        was waited for afterwards.
        """
        if self._is_all_waited:
            return []
        return [
            gate.retrieve
            for gate in self.gates
            if len(self._layers) < gate.retrieve.slices[-1].end_layer
        ]

    def settle(self) -> list[Retrieve]:
        """Wait on the CPU until every gate of this step has settled; return those that failed, and
        those that are `unwaited`: tokens computed from either are wrong.

        Call it after the pass and before its tokens are used. The watchdog ends the wait at each
        retrieve's deadline, or when the server dies.
        """
        failed = [gate.retrieve for gate in self._failed_before]
        for gate in self.gates:
            while (outcome := gate.retrieve.outcome) is None:
                time.sleep(_SETTLE_POLL_S)
            if outcome is not TransferStatus.OK:
                failed.append(gate.retrieve)
        return failed + [early for early in self.unwaited() if early not in failed]
