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

from lamina.board import TransferStatus
from lamina.client.transfers import Retrieve
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
        self._waits: dict[int, list[tuple[Retrieve, int]]] = {}
        for gate in self.gates:
            for part in gate.retrieve.slices:
                target = gate.retrieve.base + part.number + 1
                self._waits.setdefault(part.first_layer, []).append((gate.retrieve, target))
        self.waited_s = 0.0
        """Time spent in `before_layer`: the stall, on a synchronous device."""

    def before_layer(self, layer: int) -> None:
        """Make the compute stream wait for the slices that begin at `layer`.

        Layers run in order, so the later layers of a slice need no wait of their own.
        """
        if waits := self._waits.get(layer):
            started = time.perf_counter()
            for retrieve, target in waits:
                self._device.wait_landed(retrieve.board, retrieve.slot, target, self._stream)
            self.waited_s += time.perf_counter() - started

    def before_all(self) -> None:
        """Wait for everything at once: for a step whose layers cannot be hooked."""
        for layer in sorted(self._waits):
            self.before_layer(layer)

    def settle(self) -> list[Retrieve]:
        """Wait on the CPU until every gate of this step has settled; return those that failed.

        Call it after the pass and before its tokens are used. The watchdog ends the wait at each
        retrieve's deadline, or when the server dies.
        """
        failed = [gate.retrieve for gate in self._failed_before]
        for gate in self.gates:
            while (outcome := gate.retrieve.outcome) is None:
                time.sleep(_SETTLE_POLL_S)
            if outcome is not TransferStatus.OK:
                failed.append(gate.retrieve)
        return failed
