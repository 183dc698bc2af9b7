"""Gates: when a request is released, what each layer waits for, and which retrieves failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.board import Board, TransferStatus, reached
from lamina.client import Gate, Retrieve, StepGates, UsageError
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry, Group, Layer

LAYERS = 8
PATIENCE_S = 20.0


class RecordingDevice(HostWorkerDevice):
    """Notes the waits instead of waiting."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, Any]] = []

    def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
        self.waits.append((slot, count, stream))


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(8)
    yield board
    board.close()


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


GEOMETRY = Geometry(64, (Group(16),), tuple(Layer(str(i), 0, 1, 8) for i in range(LAYERS)))
Begin = Callable[..., Retrieve]


def retrieve_on(board: Board, slot: int, width: int = 1, base: int = 0) -> Retrieve:
    """A retrieve of eight layers of which nothing has landed."""
    board.announce(slot, base)
    return Retrieve(1, "r", board, slot, base, GEOMETRY.slices(width), 1e9, lambda: False)


@pytest.fixture
def begin(board: Board) -> Begin:
    """Begins retrieves, each on a slot of its own."""
    slots = iter(range(board.slots))
    return lambda width=1, base=0: retrieve_on(board, next(slots), width, base)


def land(retrieve: Retrieve, slices: int | None = None) -> None:
    """The server's part: this many slices, or all, have landed."""
    count = len(retrieve.slices) if slices is None else slices
    retrieve.board.announce(retrieve.slot, retrieve.base + count)


def fail(retrieve: Retrieve, status: TransferStatus = TransferStatus.COPY_FAILED) -> None:
    """The server's part: it failed."""
    retrieve.board.fail(retrieve.slot, status, retrieve.final_count)


@pytest.mark.parametrize("base", [0, 100, 2**32 - 3])
@pytest.mark.parametrize("wanted", [1, 3, 7, 8])
def test_a_request_is_released_after_so_many_slices_and_not_before(
    begin: Begin, wanted: int, base: int
) -> None:
    retrieve = begin(base=base)
    gate = Gate(retrieve, wanted)
    for landed in range(LAYERS):
        land(retrieve, landed)
        assert gate.is_released == (landed >= wanted)
        assert not gate.is_settled
        assert retrieve.landed_slices == landed
    land(retrieve)
    assert gate.is_released
    assert gate.is_settled
    assert retrieve.outcome is TransferStatus.OK


def test_a_request_that_waits_for_no_slice_is_released_at_once(begin: Begin) -> None:
    gate = Gate(begin(), 0)
    assert gate.is_released
    assert not gate.is_settled


def test_more_slices_than_there_are_means_all(begin: Begin) -> None:
    gate = Gate(begin(width=3), 99)
    assert gate.release_after_slices == 3
    land(gate.retrieve, 2)
    assert not gate.is_released
    land(gate.retrieve)
    assert gate.is_released


@pytest.mark.parametrize("landed", [0, 2])
def test_a_failure_of_the_server_releases(begin: Begin, landed: int) -> None:
    gate = Gate(begin(), 5)
    land(gate.retrieve, landed)
    assert not gate.is_released
    fail(gate.retrieve)
    assert gate.is_released
    assert gate.is_settled
    assert gate.retrieve.outcome is TransferStatus.COPY_FAILED


def test_a_retrieve_that_was_given_up_releases(begin: Begin) -> None:
    gate = Gate(begin(), 5)
    gate.retrieve.force(TransferStatus.TIMED_OUT)
    assert gate.is_released
    assert gate.is_settled


def test_a_release_is_not_taken_back_by_a_late_count_or_the_slots_next_user(begin: Begin) -> None:
    given_up, landed = Gate(begin(), 5), Gate(begin(), 5)
    given_up.retrieve.force(TransferStatus.TIMED_OUT)
    assert given_up.is_released
    land(given_up.retrieve, 1)  # by a server that is late
    assert given_up.is_released
    land(landed.retrieve)
    landed.retrieve.acknowledge()
    landed.retrieve.board.announce(landed.retrieve.slot, landed.retrieve.final_count + 1)
    assert landed.is_released
    assert landed.retrieve.outcome is TransferStatus.OK


@pytest.mark.parametrize("base", [0, 100])
def test_a_count_below_its_base_means_that_nothing_has_landed(begin: Begin, base: int) -> None:
    gate = Gate(begin(base=base), 1)
    gate.retrieve.board.announce(gate.retrieve.slot, base - 1)
    assert gate.retrieve.landed_slices == 0
    assert not gate.is_released


@pytest.mark.parametrize(
    ("width", "first_layers"),
    [(1, list(range(8))), (2, [0, 2, 4, 6]), (3, [0, 3, 6]), (5, [0, 5]), (8, [0])],
)
def test_layers_wait_once_per_slice_at_its_first_layer(
    begin: Begin, device: RecordingDevice, width: int, first_layers: list[int]
) -> None:
    retrieve = begin(width=width, base=40)
    gates = StepGates(device, [Gate(retrieve, 0)], stream="compute")
    waited_at = []
    for layer in range(LAYERS):
        before = len(device.waits)
        gates.before_layer(layer)
        waited_at += [layer] * (len(device.waits) - before)
    assert waited_at == first_layers
    slices = range(len(first_layers))
    assert device.waits == [(retrieve.slot, 40 + i + 1, "compute") for i in slices]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, LAYERS), st.lists(st.integers(0, LAYERS - 1), max_size=2 * LAYERS))
def test_whatever_the_order_of_the_layers_none_runs_before_its_slice_is_waited_for(
    width: int, order: list[int]
) -> None:
    """Every wait is for more than the one before, so none is made in vain."""
    board = Board.create(1)
    retrieve = retrieve_on(board, 0, width)
    device = RecordingDevice()
    gates = StepGates(device, [Gate(retrieve, 0)])
    waited_for = 0
    for layer in order:
        device.waits.clear()
        gates.before_layer(layer)
        needed = next(p.number for p in retrieve.slices if p.first_layer <= layer < p.end_layer) + 1
        assert device.waits == ([(0, needed, None)] if needed > waited_for else [])
        waited_for = max(waited_for, needed)
    board.close()


def test_the_count_that_a_layer_waits_for_means_that_its_slice_has_landed(
    begin: Begin, device: RecordingDevice
) -> None:
    retrieve = begin(width=3, base=2**32 - 1)
    for landed in range(len(retrieve.slices)):
        land(retrieve, landed)
        for part in retrieve.slices:
            device.waits.clear()
            StepGates(device, [Gate(retrieve, 0)]).before_layer(part.end_layer - 1)
            ((slot, count, _),) = device.waits
            is_there = reached(retrieve.board.landed(slot), count)
            assert is_there == (part.number < landed)


def test_every_retrieve_of_a_step_is_waited_for_by_its_own_width(
    begin: Begin, device: RecordingDevice
) -> None:
    one, two = begin(width=2), begin(width=4, base=10)
    gates = StepGates(device, [Gate(one, 1), Gate(two, 0)])
    by_layer = []
    for layer in range(LAYERS):
        device.waits.clear()
        gates.before_layer(layer)
        by_layer.append([wait[:2] for wait in device.waits])
    assert by_layer == [
        [(one.slot, 1), (two.slot, 11)],
        [],
        [(one.slot, 2)],
        [],
        [(one.slot, 3), (two.slot, 12)],
        [],
        [(one.slot, 4)],
        [],
    ]


def test_before_all_waits_for_the_last_slice_of_each_which_means_all(
    begin: Begin, device: RecordingDevice
) -> None:
    one, two = begin(width=4), begin(width=8)
    gates = StepGates(device, [Gate(one, 1), Gate(two, 1)])
    gates.before_all()
    assert [wait[:2] for wait in device.waits] == [(one.slot, 2), (two.slot, 1)]
    for layer in range(LAYERS):
        gates.before_layer(layer)
    gates.before_all()
    assert len(device.waits) == 2, "it waits already"


def test_before_all_waits_for_what_the_layers_have_not_waited_for(
    begin: Begin, device: RecordingDevice
) -> None:
    one, two = begin(width=4), begin(width=8)
    gates = StepGates(device, [Gate(one, 1), Gate(two, 1)])
    gates.before_layer(0)
    device.waits.clear()
    gates.before_all()
    assert [wait[:2] for wait in device.waits] == [(one.slot, 2)]


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_does_not_exist_is_not_waited_for(
    begin: Begin, device: RecordingDevice, layer: int
) -> None:
    """No slice of it would ever land: the wait had no end, also when the retrieve is given up."""
    gates = StepGates(device, [Gate(begin(width=3), 0)])
    with pytest.raises(UsageError, match=f"there is no layer {layer} among {LAYERS}"):
        gates.before_layer(layer)
    assert not device.waits


def test_a_retrieve_of_which_a_layer_ran_without_a_wait_is_named(
    begin: Begin, device: RecordingDevice
) -> None:
    settled, one, two = begin(), begin(width=4), begin(width=8)
    land(settled)
    gates = StepGates(device, [Gate(retrieve, 0) for retrieve in (settled, one, two)])
    for layer in reversed(range(8)):
        assert gates.unwaited() == [one, two]
        gates.before_layer(layer)
    assert gates.unwaited() == []


@pytest.mark.parametrize("skipped", [0, 3, 7])
def test_a_layer_that_was_skipped_is_noticed_though_later_slices_were_waited_for(
    begin: Begin, device: RecordingDevice, skipped: int
) -> None:
    retrieve = begin(width=2)
    gates = StepGates(device, [Gate(retrieve, 0)])
    for layer in range(8):
        if layer != skipped:
            gates.before_layer(layer)
            gates.before_layer(layer)  # of another micro-batch
    assert gates.unwaited() == [retrieve]
    gates.before_all()
    assert gates.unwaited() == []


def test_what_has_settled_before_the_step_is_not_waited_for(
    begin: Begin, device: RecordingDevice
) -> None:
    landed, failed, draining = begin(), begin(), begin(width=8)
    land(landed)
    fail(failed)
    gates = StepGates(device, [Gate(landed, 1), Gate(failed, 1), Gate(draining, 0)])
    assert [gate.retrieve for gate in gates.gates] == [draining]
    gates.before_all()
    assert [wait[:2] for wait in device.waits] == [(draining.slot, 1)]


def test_a_step_without_gates_waits_for_nothing(device: RecordingDevice) -> None:
    gates = StepGates(device, [])
    gates.before_all()
    assert device.waits == []
    assert gates.settle() == []
    assert gates.waited_s == 0.0


def test_settle_returns_exactly_the_failed_whenever_they_failed(
    begin: Begin, device: RecordingDevice
) -> None:
    names = ("fine", "early_fine", "early_failed", "failed", "cancelled", "forced")
    retrieves = {name: begin() for name in names}
    land(retrieves["early_fine"])
    fail(retrieves["early_failed"])
    gates = StepGates(device, [Gate(retrieve, 0) for retrieve in retrieves.values()])
    gates.before_all()
    land(retrieves["fine"])
    fail(retrieves["failed"])
    fail(retrieves["cancelled"], TransferStatus.CANCELLED)
    retrieves["forced"].force(TransferStatus.TIMED_OUT)
    failed = gates.settle()
    assert len(failed) == 4
    assert {name for name in names if retrieves[name] in failed} == {
        "early_failed",
        "failed",
        "cancelled",
        "forced",
    }


def test_settle_waits_until_the_last_slice_has_landed(
    begin: Begin, device: RecordingDevice
) -> None:
    retrieves = [begin(), begin()]
    gates = StepGates(device, [Gate(retrieve, 0) for retrieve in retrieves])
    gates.before_all()
    failed: list[Retrieve] = []
    settling = threading.Thread(target=lambda: failed.extend(gates.settle()))
    settling.start()
    land(retrieves[0])
    land(retrieves[1], LAYERS - 1)
    assert settling.is_alive()
    land(retrieves[1])
    settling.join(PATIENCE_S)
    assert not settling.is_alive()
    assert failed == []


def test_what_no_layer_has_waited_for_is_not_returned_as_fine(
    begin: Begin, device: RecordingDevice
) -> None:
    landed, failed = begin(), begin()
    gates = StepGates(device, [Gate(landed, 0), Gate(failed, 0)])
    land(landed)
    fail(failed)
    assert gates.settle() == [failed, landed]


def test_settle_ends_with_what_is_given_up_meanwhile(begin: Begin, device: RecordingDevice) -> None:
    retrieve = begin()
    gates = StepGates(device, [Gate(retrieve, 0)])
    failed: list[Retrieve] = []
    settling = threading.Thread(target=lambda: failed.extend(gates.settle()))
    settling.start()
    retrieve.force(TransferStatus.SERVER_DIED)
    settling.join(PATIENCE_S)
    assert failed == [retrieve]


def test_the_stall_is_the_time_spent_in_waits(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    class SlowDevice(RecordingDevice):
        def wait_landed(self, board: Board, slot: int, count: int, stream: Any = None) -> None:
            nonlocal now_s
            now_s += 0.25

    gates = StepGates(SlowDevice(), [Gate(begin(width=4), 0), Gate(begin(width=8), 0)])
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now_s)
        for layer in range(LAYERS):
            now_s += 1.0
            gates.before_layer(layer)
    assert gates.waited_s == 0.75
