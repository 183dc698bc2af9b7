"""Judgements on samples: ratios with their uncertainty, and tokens against the floor's. Pure."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lamina_lab.bench.vllm.arms import AUTO, FLOOR
from lamina_lab.bench.vllm.results import Report, Sample, Start
from lamina_lab.bench.vllm.workload import Cell

TIE_MARGIN = 0.5
"""Logarithms this near may change places with another order of bfloat16 additions."""
_RESAMPLES = 4000
_SEED = 20
BatchId = tuple[int, int, int]
"""Start, repeat, batch."""


class Ratio(NamedTuple):
    """A ratio of means, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    batches: int


class Figure(NamedTuple):
    """One arm in one cell over all starts that measured it."""

    arm: str
    cell: Cell
    ttft_ms: float
    spread_ms: float
    """Standard deviation over requests."""
    requests: int
    to_floor: Ratio | None


class Verdict(enum.Enum):
    SAME = "same"
    TIE = "tie"
    UNDECIDED = "undecided"
    """Different by another order of additions, as far as can be told."""
    WRONG = "wrong"


def judge(floor: Sample, other: Sample, is_exact: bool = False) -> Verdict:
    """Compare tokens.

    Alone a request has the floor's schedule, so its tokens must be the same; so must they in any
    schedule where vLLM computes independently of it (`is_exact`). Otherwise a batch adds in another
    order, and these weights amplify that: of a batch only the first token, which comes from the
    prefill, must be the same, where it won by more than a tie. What follows from a decode step
    in another batch is not decided here.
    """
    pairs = zip(floor.tokens, other.tokens, strict=False)
    at = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
    if at is None:
        same_length = len(floor.tokens) == len(other.tokens)
        return Verdict.SAME if same_length else Verdict.WRONG
    if is_exact:
        return Verdict.WRONG
    if other.cached_tokens < floor.cached_tokens:
        return Verdict.UNDECIDED  # a shorter hit was chosen, the rest computed: another order too
    if other.concurrency == 1:
        return Verdict.WRONG
    if at >= len(floor.margins):
        return Verdict.UNDECIDED
    if floor.margins[at] <= TIE_MARGIN:
        return Verdict.TIE
    return Verdict.UNDECIDED if at else Verdict.WRONG


def verdicts(start: Start, arms: Iterable[str]) -> dict[tuple[str, Cell], dict[Verdict, int]]:
    """How many requests of each arm and cell had the floor's tokens."""
    wanted = set(arms)
    floor = {
        (s.cell, s.repeat, s.document): s for s in start.samples if s.arm == FLOOR and s.comparable
    }
    counts: dict[tuple[str, Cell], dict[Verdict, int]] = {}
    for sample in start.samples:
        reference = floor.get((sample.cell, sample.repeat, sample.document))
        if sample.arm == FLOOR or sample.arm not in wanted or not sample.comparable:
            continue
        if reference is not None:
            tally = counts.setdefault((sample.arm, sample.cell), dict.fromkeys(Verdict, 0))
            tally[judge(reference, sample, start.is_exact)] += 1
    return counts


def missed(start: Start) -> list[Sample]:
    """Requests that did not find in a cache what they were to find, or found more."""
    chosen = {id(sample) for sample in shortened(start)}
    wrong = (s for s in start.samples if s.cached_tokens != s.expected_tokens)
    return [sample for sample in wrong if id(sample) not in chosen]


def shortened(start: Start) -> list[Sample]:
    """Requests of `auto` that chose to compute some of their hit."""
    return [
        s for s in start.samples if s.arm.startswith(AUTO) and s.cached_tokens < s.expected_tokens
    ]


def figures(report: Report) -> list[Figure]:
    """Every arm in every cell, in the order in which they were first measured."""
    keys = dict.fromkeys(
        (_labelled(start, s.arm), s.cell)
        for start in report.starts
        for s in start.samples
        if s.repeat and not start.is_exact
    )
    return [_figure(report, arm, cell) for arm, cell in keys]


def ratio_of(report: Report, arm: str, other: str, cell: Cell) -> Ratio | None:
    """`arm` to `other` in a cell, over starts that measured both; None without any."""
    return paired_ratio(_batches(report, arm, cell), _batches(report, other, cell))


def label(connector: str, arm: str) -> str:
    """How an arm is named in a report: peers' and bare engines' arms carry their connector."""
    return arm if connector == "lamina" else f"{connector}/{arm}"


def _labelled(start: Start, arm: str) -> str:
    return label(start.connector, arm)


def _figure(report: Report, arm: str, cell: Cell) -> Figure:
    mine = _batches(report, arm, cell)
    times = np.array([ms for batch in mine.values() for ms in batch])
    prefix = arm.rpartition("/")[0]
    floor = _batches(report, label(prefix or "lamina", FLOOR), cell)
    ratio = paired_ratio(mine, floor) if not arm.endswith(FLOOR) else None
    return Figure(arm, cell, float(times.mean()), float(times.std()), len(times), ratio)


def _batches(report: Report, arm: str, cell: Cell) -> dict[BatchId, list[float]]:
    batches: dict[BatchId, list[float]] = defaultdict(list)
    for number, start in enumerate(report.starts):
        for s in start.samples if not start.is_exact else ():
            if s.repeat and s.cell == cell and _labelled(start, s.arm) == arm:
                batches[number, s.repeat, s.batch].append(s.ttft_ms)
    return batches


def paired_ratio(
    mine: dict[BatchId, list[float]], others: dict[BatchId, list[float]]
) -> Ratio | None:
    """Paired by batch: the same documents in the same repeat of the same start. Batches, not
    requests, are drawn anew: requests of a batch wait for each other."""
    both = sorted(mine.keys() & others.keys())
    if not both:
        return None
    left = np.array([sum(mine[batch]) for batch in both])
    right = np.array([sum(others[batch]) for batch in both])
    low, high = bootstrap(left, right)
    return Ratio(float(left.sum() / right.sum()), low, high, len(both))


def bootstrap(
    left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """95 % interval of `sum(left) / sum(right)` over pairs drawn with replacement."""
    drawn = np.random.default_rng(_SEED).integers(0, len(left), (resamples, len(left)))
    ratios = left[drawn].sum(1) / right[drawn].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(values), share))
