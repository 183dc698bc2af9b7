"""A retrieve goes on while the worker looks at it: an end between any two looks loses nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.board import TransferStatus
from lamina.client import Gate
from lamina.engines.vllm.messages import RetrieveSpec, StepReport, TransferState
from lamina.engines.vllm.worker import WorkerSide, _Retrieving

NUMBER, BLOCKS = 7, [3, 4]
SPEC = RetrieveSpec(NUMBER, "r", 1, 0, BLOCKS, 1, 1, needs_ticket=False, deadline_s=0.0)


class Turning:
    """A retrieve that ends just before it is looked at for the `turn`-th time. It is over at once,
    as one is whose records the engine's own GPU has passed."""

    slices = (0, 1)
    ended = None

    def __init__(self, turn: int, end: TransferStatus) -> None:
        self._turn = turn
        self._end = end
        self._looks = 0

    @property
    def has_ended(self) -> bool:
        self._looks += 1
        return self._looks >= self._turn

    @property
    def is_over(self) -> bool:
        return self.has_ended

    @property
    def outcome(self) -> TransferStatus | None:
        return self._end if self.has_ended else None

    @property
    def landed_slices(self) -> int:
        return 2 if self.has_ended and not self._end else 0


def steps_of(turn: int, end: TransferStatus, state: TransferState) -> tuple[list[Any], set[int]]:
    """What the worker tells until the retrieve is over, and the blocks that it calls invalid."""
    client: Any = SimpleNamespace(poll=lambda: None, cancel=lambda retrieve: None)
    layout: Any = SimpleNamespace(layer_of={}, geometry=SimpleNamespace(layers=()))
    worker = WorkerSide(client, None, layout, None, recomputes_elsewhere=False)  # type: ignore[arg-type]
    gate = Gate(Turning(turn, end), SPEC.release_after_slices)  # type: ignore[arg-type]
    worker._retrieves[NUMBER] = _Retrieving(SPEC, gate, time.monotonic(), state)
    told: list[Any] = []
    invalid: set[int] = set()
    while worker._retrieves:
        report: StepReport
        released, report = worker.end_step()
        told += [*released, *(state for _, state in report.states)]
        invalid |= worker.invalid_blocks
        worker.invalid_blocks = set()
    return told, invalid


@pytest.mark.parametrize("turn", range(1, 12))
def test_failure_of_a_waiting_request_is_recomputed(turn: int) -> None:
    told, invalid = steps_of(turn, TransferStatus.COPY_FAILED, TransferState.WAITING)
    assert sorted(map(str, told)) == sorted(
        map(str, ["r", TransferState.RECOMPUTED, TransferState.OVER])
    )
    assert not invalid


@pytest.mark.parametrize("turn", range(1, 12))
def test_failure_of_a_released_request_is_never_taken_for_an_end(turn: int) -> None:
    told, invalid = steps_of(turn, TransferStatus.COPY_FAILED, TransferState.RELEASED)
    assert told == [TransferState.FAILED, TransferState.OVER]
    assert invalid == set(BLOCKS)


@pytest.mark.parametrize("turn", range(1, 12))
def test_what_has_landed_releases_its_request_once(turn: int) -> None:
    told, invalid = steps_of(turn, TransferStatus.OK, TransferState.WAITING)
    assert told == ["r", TransferState.OVER]
    assert not invalid
