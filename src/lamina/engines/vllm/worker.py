"""The worker's side of the connector: KV memory, transfers, waits, settling.

Each step, in the order in which vLLM calls: `begin_early` submits loads as soon as the scheduler
has built the step, where both sides live on one thread; `begin_step` submits the other transfers
and arms the gates; `before_forward` sees whether layer hooks will fire; `before_layer` makes the
compute stream wait for a layer's slices; `end_step` settles what the step has read and reports.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Client, Gate, Retrieve, StepGates, Store
from lamina.devices.base import WorkerDevice
from lamina.engines.vllm.layout import KvLayout
from lamina.engines.vllm.loaded import LoadedWeights
from lamina.engines.vllm.messages import (
    LandedLoad,
    LoadSpec,
    StepMetadata,
    StepReport,
    StoreSpec,
)
from lamina.engines.vllm.stats import WorkerCounts
from lamina.engines.vllm.tracked import NULL_BLOCK

log = logging.getLogger(__name__)

ACKNOWLEDGE_S = 2.0
"""How long a failed load of a waiting request may take to be acknowledged where the request then
computes in the same blocks. Past it the request ends in an error; its blocks stay held."""


_MOST_UNACCOUNTED = 64
"""Loads that have landed and of which the server's account is awaited. It may never come."""


@dataclass(eq=False)
class _Loading:
    """A load on its way. Without a `gate` it never began: there is no server."""

    spec: LoadSpec
    gate: Gate | None
    began_s: float
    released: bool
    reported_failed: bool = False
    give_up_at_s: float | None = None

    @property
    def outcome(self) -> TransferStatus | None:
        return TransferStatus.SERVER_DIED if self.gate is None else self.gate.retrieve.outcome

    @property
    def is_over(self) -> bool:
        return self.gate is None or self.gate.retrieve.is_over


class WorkerSide:
    """Called by vLLM's model runner, on the thread that launches the model."""

    def __init__(
        self,
        client: Client,
        device: WorkerDevice,
        layout: KvLayout,
        weights: LoadedWeights,
        recomputes_elsewhere: bool,
    ) -> None:
        """`recomputes_elsewhere`: a waiting request whose load failed gets other blocks."""
        self.client = client
        self._weights = weights
        self._weights_now: list[tuple[int, str | None]] = []
        self._recomputes_elsewhere = recomputes_elsewhere
        self._device = device
        self._layer_of = layout.layer_of
        layers = layout.geometry.layers
        self._block_bytes = sum(layer.planes * layer.page_bytes for layer in layers)
        self._loads: dict[int, _Loading] = {}
        self._stores: dict[int, Store] = {}
        self._stores_never_begun: list[int] = []
        self._unaccounted: deque[_Loading] = deque(maxlen=_MOST_UNACCOUNTED)
        self._thread: int | None = None
        self._step: StepMetadata | None = None
        self._step_gates: StepGates | None = None
        self.invalid_blocks: set[int] = set()
        """Blocks of this step that hold no KV though vLLM counts on it."""
        self.counts = WorkerCounts()

    def begin_early(self, step: StepMetadata) -> None:
        """Submit the loads of a step that was just built, where scheduler and worker share a
        thread: the bytes travel while vLLM prepares the step. `begin_step` follows.

        Not those that must wait for work which the step itself enqueues.
        """
        if self._thread == threading.get_ident():
            for load in step.loads:
                if not load.needs_ticket:
                    self._begin_load(load, None)

    def begin_step(self, step: StepMetadata, stream: Any) -> None:
        """Submit the step's transfers, loads first, and arm its gates."""
        self._thread = threading.get_ident()
        self.client.poll()
        self._step = step
        self.invalid_blocks = set()
        if step.look_at_weights:
            self._weights_now = [(step.look_at_weights, self._weights.change())]
        for load in step.loads:
            if load.number not in self._loads:
                self._begin_load(load, stream)
        for store in step.stores:
            self._begin_store(store, stream)
        self._step_gates = None
        armed = [self._loads[number] for number in step.gates if number in self._loads]
        gates = [loading.gate for loading in armed if loading.gate is not None]
        if gates and step.tokens:
            self._step_gates = StepGates(self._device, gates, stream)

    def before_forward(self, hooks_fire: bool) -> None:
        """In a step whose layers are not hooked (a full CUDA graph), wait for all slices first."""
        if self._step_gates is not None and not hooks_fire:
            self._step_gates.before_all()

    def before_layer(self, name: str) -> None:
        """The layer `name` is about to read KV."""
        if self._step_gates is None:
            return
        layer = self._layer_of.get(name)
        if layer is None:
            self._step_gates.before_all()  # a layer that we do not know may read any other's KV
        else:
            self._step_gates.before_layer(layer)

    def end_step(self) -> tuple[set[str], StepReport]:
        """Settle the gates of this step; returns the requests released now, and the report."""
        self.client.poll()
        self._settle()
        released: set[str] = set()
        report = StepReport()
        for number, loading in list(self._loads.items()):
            if not loading.released:
                self._try_release(number, loading, released, report)
            if loading.released and loading.outcome and not loading.reported_failed:
                loading.reported_failed = True
                report.loads_failed[number] = 1
                self.invalid_blocks.update(loading.spec.blocks)
            if loading.released and loading.is_over:
                report.loads_over[number] = 1
                del self._loads[number]
                self._count_end(loading)
        for number in [n for n, store in self._stores.items() if store.is_over]:
            report.stores_over[number] = 1
            del self._stores[number]
        for number in self._stores_never_begun:
            report.stores_over[number] = 1
        self._stores_never_begun.clear()
        report.landed = self._take_accounts()
        report.weights, self._weights_now = self._weights_now, []
        if self._step is not None and self._step.tokens:
            report.step = self._step.number
            self.invalid_blocks |= self._step.bad_blocks
        self._step_gates = self._step = None
        return released, report

    def give_up_stores(self) -> list[int]:
        """Give up the stores under way; returns their numbers: nobody reads their blocks now."""
        self.client.give_up_stores()
        given_up = [number for number, store in self._stores.items() if store.is_over]
        for number in given_up:
            del self._stores[number]
        return given_up

    def _begin_load(self, spec: LoadSpec, stream: Any) -> None:
        retrieve = None
        if NULL_BLOCK not in spec.blocks:  # all requests share that one: the load fails
            retrieve = self.client.retrieve(
                spec.request,
                spec.lease,
                spec.start_tokens,
                [np.array(spec.blocks, np.int32)],
                spec.layers_per_slice,
                self.client.write_ticket(stream) if spec.needs_ticket else None,
            )
        gate = Gate(retrieve, spec.release_after_slices) if retrieve is not None else None
        released = not spec.release_after_slices
        self._loads[spec.number] = _Loading(spec, gate, time.monotonic(), released)

    def _begin_store(self, spec: StoreSpec, stream: Any) -> None:
        ticket = self.client.write_ticket(stream)
        blocks = [np.array(spec.blocks, np.int32)]
        store = self.client.store(spec.parent, spec.keys, blocks, ticket)
        if store is None:
            self._stores_never_begun.append(spec.number)
        else:
            self._stores[spec.number] = store

    def _settle(self) -> None:
        """Wait for the final counts of the loads that this step has read.

        A gate that a forward did not wait for was read too early, whatever its outcome: that must
        never happen, and must never pass unnoticed.
        """
        gates = self._step_gates
        if gates is None:
            return
        failed: list[Retrieve] = gates.settle()
        unwaited = gates.unwaited()
        if unwaited:
            log.error("a forward read KV without waiting for it; its requests fail")
        self.counts.stall_s += gates.waited_s
        bad = {id(retrieve) for retrieve in [*failed, *unwaited]}
        for loading in self._loads.values():
            if loading.gate is not None and id(loading.gate.retrieve) in bad:
                self.invalid_blocks.update(loading.spec.blocks)

    def _try_release(
        self, number: int, loading: _Loading, released: set[str], report: StepReport
    ) -> None:
        """Release a waiting request once its first slices are in, or its load has failed."""
        name = loading.spec.request
        if not loading.outcome:
            assert loading.gate is not None
            if loading.gate.is_released:
                loading.released = True
                released.add(name)
                self.counts.release_s += time.monotonic() - loading.began_s
                self.counts.releases += 1
        elif loading.is_over or self._recomputes_elsewhere:
            released.add(name)
            report.loads_to_recompute[number] = 1
            loading.released = loading.reported_failed = True  # its blocks are nobody's to read
            if not loading.is_over:
                assert loading.gate is not None
                self.client.cancel(loading.gate.retrieve)
        elif loading.give_up_at_s is None:
            assert loading.gate is not None
            self.client.cancel(loading.gate.retrieve)
            loading.give_up_at_s = time.monotonic() + ACKNOWLEDGE_S
        elif time.monotonic() >= loading.give_up_at_s:
            loading.released = True
            released.add(name)

    def _count_end(self, loading: _Loading) -> None:
        if loading.outcome:
            self.counts.failed += 1
        else:
            self.counts.loaded_bytes += len(loading.spec.blocks) * self._block_bytes
            self._unaccounted.append(loading)

    def _take_accounts(self) -> list[LandedLoad]:
        """What the server has told since the last time about loads that are over."""
        told = []
        for loading in list(self._unaccounted):
            account = loading.gate.retrieve.ended if loading.gate is not None else None
            if account is not None:
                self._unaccounted.remove(loading)
                end_s = loading.began_s + account.total_us / 1e6
                number = loading.spec.number
                told.append(LandedLoad(number, account.nbytes, loading.began_s, end_s))
                self.counts.copies += 1
                self.counts.copy_s += account.total_us / 1e6
        return told


def export_all(device: WorkerDevice, layout: KvLayout) -> list[Any]:
    """The regions of a layout's allocations."""
    return [device.export(a.address, a.nbytes) for a in layout.allocations]


def device_of(kv_caches: Mapping[str, Any]) -> WorkerDevice:
    """The device that holds the tensors. Raises `DeviceError` for one that Lamina has not."""
    from lamina.devices.cuda import CudaWorkerDevice
    from lamina.devices.host import HostWorkerDevice
    from lamina.errors import DeviceError

    kind = next(iter(kv_caches.values())).device.type
    if kind == "cpu":
        return HostWorkerDevice()
    if kind == "cuda":
        return CudaWorkerDevice()
    raise DeviceError(f"the KV lies on a {kind!r} device", "Lamina serves CPU and CUDA memory")


def kind_of(kv_caches: Mapping[str, Any]) -> str:
    """What computes: vLLM chooses kernels by it, some of which round where others do not."""
    import torch

    device = next(iter(kv_caches.values())).device
    if device.type == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
