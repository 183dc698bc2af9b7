"""What a step waits for that reads several retrieves of one ring."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from lamina.board import PLACED, reached
from lamina.client import Gate, StepGates
from lamina.client.retrieve import RingRetrieve
from tests.rings.ring_worker import CHUNKS, RECORDS, RingWorker, WaitingDevice
from tests.support.server import ServerThread

RETRIEVES = 4


class Step:
    """Retrieves of several widths in flight, of which nothing has landed."""

    def __init__(self, worker: RingWorker, device: WaitingDevice) -> None:
        self.device = device
        keys = worker.store_new(CHUNKS)
        self.leases = [worker.find(f"lease {number}", keys) for number in range(RETRIEVES)]
        self.retrieves: list[RingRetrieve] = []
        self.worker = worker

    def begin(self, widths: tuple[int, ...] = (1,) * RETRIEVES) -> None:
        for number, (lease, width) in enumerate(zip(self.leases, widths, strict=True)):
            blocks = self.worker.blocks_of(number + 1)
            retrieve = self.worker.begin_leased(f"retrieve {number}", lease, blocks, width)
            assert isinstance(retrieve, RingRetrieve)
            self.retrieves.append(retrieve)

    def gates(self, order: list[int]) -> StepGates:
        return StepGates(self.device, [Gate(self.retrieves[number], 1) for number in order])

    def check_waited(self, layer: int) -> None:
        """Nobody's record of this layer comes after what the stream waits for."""
        for retrieve in self.retrieves:
            needed = retrieve.span.number(retrieve.lasts[retrieve.slice_of(layer)])
            assert any(
                slot == PLACED and board is retrieve.board and reached(count, needed)
                for board, slot, count in self.device.waits
            )


@pytest.fixture
def step(server: ServerThread, make_ring_worker: Callable[..., RingWorker]) -> Iterator[Step]:
    device = WaitingDevice()
    worker = make_ring_worker(device=device)
    step = Step(worker, device)
    server.device.retrieves.close()
    yield step
    server.device.retrieves.open()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_one_wait_a_layer_serves_all(step: Step, order: list[int]) -> None:
    """That for the latest record, in whatever order the gates are armed."""
    step.begin()
    gates = step.gates(order)
    for layer in range(RECORDS):
        gates.before_layer(layer)
        assert len(step.device.waits) == layer + 1
        latest = step.retrieves[-1]
        assert step.device.waits[-1] == (latest.board, PLACED, latest.span.number(layer))
        step.check_waited(layer)
        gates.before_layer(layer)
        assert len(step.device.waits) == layer + 1
    assert gates.unwaited() == []


@pytest.mark.parametrize("seed", range(8))
def test_each_retrieve_is_waited_for(step: Step, seed: int) -> None:
    """Whatever their widths, and whatever the order of gates and layers."""
    rng = random.Random(seed)
    step.begin(tuple(rng.choice([1, 2, 3, 5, 8]) for _ in range(RETRIEVES)))
    gates = step.gates(rng.sample(range(RETRIEVES), RETRIEVES))
    layers = rng.sample(range(RECORDS), RECORDS) if seed % 2 else range(RECORDS)
    for number, layer in enumerate(layers, 1):
        gates.before_layer(layer)
        step.check_waited(layer)
        assert len(step.device.waits) <= number


def test_one_wait_for_everything_serves_all(step: Step) -> None:
    step.begin()
    step.gates([1, 0, 3, 2]).before_all()
    latest = step.retrieves[-1]
    assert step.device.waits == [(latest.board, PLACED, latest.span.last_number)]


def test_a_layer_that_there_is_not_leaves_the_others_to_be_waited_for(step: Step) -> None:
    step.begin()
    gates = step.gates([0, 1, 2, 3])
    with pytest.raises(Exception, match="there is no layer 8"):
        gates.before_layer(8)
    gates.before_layer(0)
    step.check_waited(0)
