"""The worker's side of the connector: KV memory, transfers, waits, settling.

Each step, in the order in which vLLM calls: `begin_early` submits retrieves as soon as the
scheduler has built the step, where both sides live on one thread; `begin_step` submits the other
transfers and arms the gates; `before_forward` sees whether layer hooks will fire; `before_layer`
makes the compute stream wait for a layer's slices; `end_step` settles what the step has read and
reports."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Client, Gate, Retrieve, StepGates, Store
from lamina.devices.base import WorkerDevice
from lamina.engines.vllm.layout import KvLayout
from lamina.engines.vllm.loaded import LoadedWeights
from lamina.engines.vllm.messages import (
    Account,
    RetrieveSpec,
    StepMetadata,
    StepReport,
    StoreSpec,
    TransferState,
)
from lamina.engines.vllm.stats import WorkerCounts
from lamina.engines.vllm.tracked import NULL_BLOCK

log = logging.getLogger(__name__)

ACKNOWLEDGE_S = 2.0
"""How long a failed retrieve of a waiting request may take to be acknowledged where the request
then computes in the same blocks. Past it the request ends in an error; its blocks stay held."""


_MOST_UNACCOUNTED = 64
"""Retrieves that have landed and of which the server's account is awaited. It may never come."""


class _Look(NamedTuple):
    """One moment of a retrieve that goes on meanwhile, so that all decisions of a step agree."""

    is_over: bool
    is_released: bool
    outcome: TransferStatus | None


@dataclass(eq=False)
class _Retrieving:
    """A retrieve on its way. Without a `gate` it never began: there is no server."""

    spec: RetrieveSpec
    gate: Gate | None
    began_s: float
    state: TransferState
    give_up_at_s: float | None = None
    is_cancelled: bool = False
    """Whether it has failed on another rank, before its request ran."""

    def look(self) -> _Look:
        if self.gate is None:
            return _Look(is_over=True, is_released=True, outcome=TransferStatus.SERVER_DIED)
        # In this order: what is over or released by failing says so with its outcome too.
        is_over, is_released = self.gate.retrieve.is_over, self.gate.is_released
        return _Look(is_over, is_released, self.gate.retrieve.outcome)


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
        """`recomputes_elsewhere`: a waiting request whose retrieve failed gets other blocks."""
        self.client = client
        self._weights = weights
        self._weights_now: list[tuple[int, str | None]] = []
        self._recomputes_elsewhere = recomputes_elsewhere
        self._device = device
        self._layer_of = layout.layer_of
        layers = layout.geometry.layers
        self._layers = len(layers)
        self._block_bytes = sum(layer.planes * layer.page_bytes for layer in layers)
        self._retrieves: dict[int, _Retrieving] = {}
        self._stores: dict[int, Store] = {}
        self._ended_stores: list[int] = []
        self._unaccounted: deque[_Retrieving] = deque(maxlen=_MOST_UNACCOUNTED)
        self._thread: int | None = None
        self._step: StepMetadata | None = None
        self._step_gates: StepGates | None = None
        self.invalid_blocks: set[int] = set()
        """Blocks of this step that hold no KV though vLLM counts on it."""
        self.counts = WorkerCounts()

    def begin_early(self, step: StepMetadata) -> None:
        """Submit the retrieves of a step that was just built, where scheduler and worker share a
        thread: the bytes travel while vLLM prepares the step. `begin_step` follows.

        Not those that must wait for work which the step itself enqueues.
        """
        if self._thread == threading.get_ident():
            for retrieve in step.retrieves:
                if not retrieve.needs_ticket:
                    self._begin_retrieve(retrieve, None)

    def begin_step(self, step: StepMetadata, stream: Any) -> None:
        """Submit the step's transfers, retrieves first, and arm its gates."""
        self._thread = threading.get_ident()
        self.client.poll()
        self._step = step
        self.invalid_blocks = set()
        if step.give_up_stores:
            self._ended_stores += self.give_up_stores()
        for number in step.cancelled:
            retrieving = self._retrieves.get(number)
            if retrieving is not None and retrieving.state <= TransferState.RELEASED:
                retrieving.is_cancelled = True
                self._cancel(retrieving, retrieving.look())
        if step.look_at_weights:
            self._weights_now = [(step.look_at_weights, self._weights.change())]
        for retrieve in step.retrieves:
            if retrieve.number not in self._retrieves:
                self._begin_retrieve(retrieve, stream)
        for store in step.stores:
            self._begin_store(store, stream)
        self._step_gates = None
        armed = [self._retrieves[number] for number in step.gates if number in self._retrieves]
        gates = [retrieving.gate for retrieving in armed if retrieving.gate is not None]
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
        for number, retrieving in list(self._retrieves.items()):
            look = retrieving.look()
            if retrieving.is_cancelled and retrieving.state <= TransferState.RELEASED:
                self._recompute(number, retrieving, released, report)
            if retrieving.state is TransferState.WAITING:
                self._try_release(number, retrieving, look, released, report)
            if retrieving.state is TransferState.RELEASED and look.outcome:
                retrieving.state = TransferState.FAILED
                report.states[number, TransferState.FAILED] = 1
                self.invalid_blocks.update(retrieving.spec.blocks)
            if retrieving.state is not TransferState.WAITING and look.is_over:
                report.states[number, TransferState.OVER] = 1
                del self._retrieves[number]
                if not look.outcome:
                    self._count_end(retrieving)
        over = [number for number, store in self._stores.items() if store.is_over]
        for number in over:
            del self._stores[number]
        for number in [*over, *self._ended_stores]:
            report.states[number, TransferState.OVER] = 1
        self._ended_stores.clear()
        report.accounts = self._take_accounts()
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

    def _begin_retrieve(self, spec: RetrieveSpec, stream: Any) -> None:
        retrieve = None
        if NULL_BLOCK in spec.blocks:  # all requests share that one: the retrieve fails
            self.client.end_lease(spec.lease)
        else:
            retrieve = self.client.retrieve(
                spec.request,
                spec.lease,
                spec.start_tokens,
                [np.array(spec.blocks, np.int32)],
                min(spec.layers_per_slice, self._layers),  # a pipeline stage has its own
                self.client.write_ticket(stream) if spec.needs_ticket else None,
                spec.number,
                spec.deadline_s,
            )
        gate = Gate(retrieve, spec.release_after_slices) if retrieve is not None else None
        is_waited_for = spec.release_after_slices > 0
        state = TransferState.WAITING if is_waited_for else TransferState.RELEASED
        self._retrieves[spec.number] = _Retrieving(spec, gate, time.monotonic(), state)

    def _begin_store(self, spec: StoreSpec, stream: Any) -> None:
        ticket = self.client.write_ticket(stream)
        blocks = [np.array(spec.blocks, np.int32)]
        store = self.client.store(spec.parent, spec.keys, blocks, ticket, spec.number)
        if store is None:
            self._ended_stores.append(spec.number)
        else:
            self._stores[spec.number] = store

    def _settle(self) -> None:
        """Wait for the final counts of the retrieves that this step has read.

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
        for retrieving in self._retrieves.values():
            if retrieving.gate is not None and id(retrieving.gate.retrieve) in bad:
                self.invalid_blocks.update(retrieving.spec.blocks)

    def _try_release(
        self,
        number: int,
        retrieving: _Retrieving,
        look: _Look,
        released: set[str],
        report: StepReport,
    ) -> None:
        """Release a waiting request once its first slices are in, or its retrieve has failed."""
        if not look.is_released:
            return
        if not look.outcome:
            retrieving.state = TransferState.RELEASED
            self.counts.release_s += time.monotonic() - retrieving.began_s
            self.counts.releases += 1
        elif look.is_over or self._recomputes_elsewhere:
            self._recompute(number, retrieving, released, report)
            self._cancel(retrieving, look)
            return
        elif retrieving.give_up_at_s is None:
            self._cancel(retrieving, look)
            retrieving.give_up_at_s = time.monotonic() + ACKNOWLEDGE_S
            return
        elif time.monotonic() < retrieving.give_up_at_s:
            return
        else:
            retrieving.state = TransferState.RELEASED  # and failed at once
        released.add(retrieving.spec.request)

    def _recompute(
        self, number: int, retrieving: _Retrieving, released: set[str], report: StepReport
    ) -> None:
        """Its request computes instead: its blocks are nobody's to read."""
        if retrieving.state is TransferState.WAITING:  # else vLLM was told before
            released.add(retrieving.spec.request)
        retrieving.state = TransferState.RECOMPUTED
        report.states[number, TransferState.RECOMPUTED] = 1

    def _cancel(self, retrieving: _Retrieving, look: _Look) -> None:
        if retrieving.gate is not None and not look.is_over:
            self.client.cancel(retrieving.gate.retrieve)

    def _count_end(self, retrieving: _Retrieving) -> None:
        self.counts.retrieved_bytes += len(retrieving.spec.blocks) * self._block_bytes
        self._unaccounted.append(retrieving)

    def _take_accounts(self) -> list[Account]:
        """What the server has told since the last time about retrieves that are over."""
        told = []
        for retrieving in list(self._unaccounted):
            account = retrieving.gate.retrieve.ended if retrieving.gate is not None else None
            if account is not None:
                self._unaccounted.remove(retrieving)
                end_s = retrieving.began_s + account.total_us / 1e6
                number = retrieving.spec.number
                told.append(Account(number, account.nbytes, retrieving.began_s, end_s))
                self.counts.copies += 1
                self.counts.copy_s += account.total_us / 1e6
        return told


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
