"""An engine with three streams that run one command at a time, chosen by a seed; and its server,
which stops, dies, loses the connection and lets copies pass when the seed says so."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Gate, Retrieve, StepGates
from lamina.client.store import Store
from lamina_lab.known.content import POISON, Pages, content_of_run, random_keys
from tests.rings.compute_device import ComputeDevice
from tests.rings.ring_worker import BLOCKS, CHUNKS, GEOMETRY, RECORDS, RingWorker
from tests.support.fault_server import FaultServer
from tests.support.wait import eventually
from tests.support.worker import PageWorker

ACTIONS = 400
_BLOCKS = BLOCKS * ACTIONS
_PROMPTS = 4
_VALVES = "retrieves", "stores"
_MAX_IN_FLIGHT = 6


@dataclass
class Wanted:
    """A retrieve, and what must be in its blocks; `reads` are what steps have read of it."""

    retrieve: Retrieve
    blocks: range
    content: Pages
    reads: list[bool] = field(default_factory=list)
    is_noted: bool = False


class RandomOrder:
    """`act` does something; `finish` lets everything come to its end; `check` looks at it."""

    def __init__(self, socket: Path, seed: int, make_worker: Callable[..., RingWorker]) -> None:
        self._socket = socket
        self._rng = random.Random(seed)
        self.server = FaultServer(socket)
        self._is_stopped = False
        self._device = ComputeDevice()
        self._worker = make_worker(device=self._device, blocks=_BLOCKS)
        rings = self._worker.rings
        if seed % 3 == 0:  # as all streams may share one queue of the hardware
            rings.gather_stream.close()
            self._device.compute.close()
            rings.gather_stream = self._device.compute = rings.place_stream
        self._streams = list({rings.place_stream, rings.gather_stream, self._device.compute})
        rings.synchronize = self._let_all_run  # type: ignore[method-assign]
        for stream in self._streams:
            stream.hold()
        self._used_blocks = 0
        self._wanted: list[Wanted] = []
        self._stores: list[tuple[Store, range]] = []
        self._prompts = [random_keys(CHUNKS) for _ in range(_PROMPTS)]
        self._keys = list(self._prompts)
        self._stock()
        self.ended: dict[TransferStatus | None, int] = {}

    def act(self) -> None:
        actions: dict[Callable[[], None], int] = {
            self._run_some_commands: 160,
            self._poll_some: 60,
            self._retrieve: 40,
            self._store: 20,
            self._take_step: 20,
            self._let_copies_pass: 20,
            self._cancel: 6,
            self._close_a_valve: 10,
            self._open_a_valve: 10,
            self._stop: 5,
            self._go_on: 20,
            self._pass_deadlines: 2,
            self._give_up_stores: 3,
            self._lose_connection: 5,
            self._kill: 1,
        }
        self._rng.choices(list(actions), list(actions.values()))[0]()
        self._look()

    def finish(self) -> None:
        """Whatever the server does: all that was enqueued is passed, one command at a time."""
        self._worker.clock.pass_deadlines()

        def is_passed() -> bool:
            self._run_one_command()
            self._poll()
            self._look()
            are_passed = all(wanted.retrieve.is_passed for wanted in self._wanted)
            return are_passed and not any(stream.enqueued for stream in self._streams)

        eventually(is_passed)
        for wanted in self._wanted:
            self.ended[wanted.retrieve.outcome] = self.ended.get(wanted.retrieve.outcome, 0) + 1
        assert None not in self.ended

    def check(self, reader: Callable[..., RingWorker]) -> None:
        """Nothing came late, nobody keeps anything, and all that is found is right."""
        for stream in self._streams:
            stream.go_on()
        self._go_on()
        for valve in _VALVES:
            self.server.call(f"{valve}.open")
        self._worker.reconnect()
        self._worker.wait(lambda: not self._worker.client.transfers_in_flight)
        self._look()
        for wanted in self._wanted:
            if wanted.retrieve.outcome is TransferStatus.OK:
                self._worker.expect(wanted.blocks, wanted.content, "a late write")
                assert all(wanted.reads), "a step has read too early"
            else:
                self._worker.expect(wanted.blocks, POISON, "a late write")
        eventually(lambda: self.server.gauges()["queued_transfers"] == 0)
        other = reader()
        for keys in self._keys:
            found = other.client.lookup("found", keys).wait(20)
            assert found is not None
            if found.chunks:
                blocks = range(found.chunks * BLOCKS // CHUNKS)
                other.check_hit("found", keys[: found.chunks], blocks)
        assert self.server.gauges()["pins"] == 0
        assert self.server.gauges()["arena_reserved_bytes"] == 0
        assert self.server.call("errors") == []

    def _let_all_run(self) -> None:
        """What a GPU does by itself while a thread waits for it."""
        for stream in self._streams:
            stream.go_on()
        for stream in self._streams:
            stream.synchronize()
        for stream in self._streams:
            stream.hold()

    def _look(self) -> None:
        """At what has ended: right bytes, or pages that are used for something else."""
        for wanted in self._wanted:
            if wanted.is_noted or not wanted.retrieve.is_over:
                continue
            wanted.is_noted = True
            if wanted.retrieve.outcome is TransferStatus.OK:
                self._worker.expect(wanted.blocks, wanted.content)
            else:
                self._worker.poison(wanted.blocks)
        for store, blocks in list(self._stores):
            if store.is_over:
                self._worker.poison(blocks)
                self._stores.remove((store, blocks))

    def _run_one_command(self) -> None:
        self._rng.choice(self._streams).step()

    def _run_some_commands(self) -> None:
        for _ in range(self._rng.randint(1, 40)):
            self._run_one_command()

    def _poll(self) -> None:
        self._worker.clock.now_s += 0.002
        self._worker.client.poll()

    def _poll_some(self) -> None:
        for _ in range(self._rng.randint(1, 10)):
            self._poll()

    def _new_blocks(self) -> range:
        self._used_blocks += BLOCKS
        return range(self._used_blocks - BLOCKS, self._used_blocks)

    def _store(self) -> None:
        keys, blocks = random_keys(self._rng.choice([1, 1, 2, CHUNKS])), self._new_blocks()
        blocks = blocks[: len(keys) * BLOCKS // CHUNKS]
        client = self._worker.client
        self._worker.compute(keys, blocks)
        store = client.store(b"", keys, [np.array(blocks, np.int32)], client.write_ticket())
        if store is not None:
            self._stores.append((store, blocks))
            self._keys.append(keys)

    def _retrieve(self) -> None:
        client = self._worker.client
        open_ = [wanted for wanted in self._wanted if wanted.retrieve.outcome is None]
        if (
            self._is_stopped
            or not client.is_usable
            or not self._keys
            or len(open_) > _MAX_IN_FLIGHT
        ):
            return
        keys, name = self._rng.choice(self._keys), f"retrieve {len(self._wanted)}"
        found = client.lookup(name, keys).wait(20)
        if found is None or not found.chunks:
            return
        keys = keys[: found.chunks]
        blocks = self._new_blocks()[: found.chunks * BLOCKS // CHUNKS]
        self._worker.poison(blocks)
        ticket = client.write_ticket() if self._rng.random() < 0.5 else None
        width = self._rng.choice([1, 2, 3, 8])
        ids = [np.array(blocks, np.int32)]
        retrieve = client.retrieve(name, found.lease, 0, ids, width, ticket)
        if retrieve is not None:
            self._wanted.append(Wanted(retrieve, blocks, content_of_run(keys, GEOMETRY)))

    def _take_step(self) -> None:
        """Enqueue a forward pass that reads some of what is in flight."""
        in_flight = [wanted for wanted in self._wanted if wanted.retrieve.outcome is None]
        armed = self._rng.sample(in_flight, self._rng.randint(0, len(in_flight)))
        gates = StepGates(self._device, [Gate(wanted.retrieve, 1) for wanted in armed])
        for layer in range(RECORDS):
            gates.before_layer(layer)
            for wanted in armed:
                self._device.compute.enqueue(self._reads(wanted, layer))

    def _reads(self, wanted: Wanted, layer: int) -> Callable[[], bool]:
        def read() -> bool:
            is_right = (
                self._worker.space.read(layer, wanted.blocks) == wanted.content[layer]
            ).all()
            wanted.reads.append(bool(is_right))
            return True

        return read

    def _cancel(self) -> None:
        if self._wanted:
            self._worker.client.cancel(self._rng.choice(self._wanted).retrieve)

    def _let_copies_pass(self) -> None:
        if not self._is_stopped:
            valve = self._rng.choice(_VALVES)
            if self.server.call(f"{valve}._permits") is not None:
                self.server.call(f"{valve}.let_pass", self._rng.randint(1, 4))

    def _close_a_valve(self) -> None:
        if not self._is_stopped:
            self.server.call(f"{self._rng.choice(_VALVES)}.close")

    def _open_a_valve(self) -> None:
        if not self._is_stopped:
            self.server.call(f"{self._rng.choice(_VALVES)}.open")

    def _stop(self) -> None:
        if not self._is_stopped:
            self.server.send(signal.SIGSTOP)
            self._is_stopped = True

    def _go_on(self) -> None:
        self.server.send(signal.SIGCONT)
        self._is_stopped = False

    def _pass_deadlines(self) -> None:
        self._worker.clock.pass_deadlines()

    def _give_up_stores(self) -> None:
        self._worker.client.give_up_stores()

    def _lose_connection(self) -> None:
        if self._worker.client._link is not None:
            self._worker.lose_connection()

    def _kill(self) -> None:
        self.server.kill()
        self.server, self._is_stopped = FaultServer(self._socket), False
        self._stock()

    def _stock(self) -> None:
        """Another engine stores what this one may retrieve."""
        other = PageWorker(self._socket, GEOMETRY, BLOCKS)
        for keys in self._prompts:
            other.populate(keys, range(BLOCKS))
        other.close()
