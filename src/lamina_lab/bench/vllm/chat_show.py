"""How a chat's turns are printed: first-token times, and the phases that they are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

from lamina_lab.bench.vllm.arms import FLOOR
from lamina_lab.bench.vllm.compare import BatchId, Ratio, label, paired_ratio, percentile
from lamina_lab.bench.vllm.phases import PHASES
from lamina_lab.bench.vllm.results import ChatSample, Report

_SLOW = 0.9
"""Requests from this quantile on are the slow ones."""
_LATE_MS = 20.0
"""A driver that is so late does not keep to the times."""


class ChatFigure(NamedTuple):
    """One arm at one rate over all starts that measured it: first turns, and all others."""

    arm: str
    rate: float
    first: list[ChatSample]
    later: list[ChatSample]
    to_floor: Ratio | None
    """Of the later turns' means, over the conversations that both have measured."""

    @property
    def slow(self) -> list[ChatSample]:
        """The slowest tenth of the later turns."""
        least_ms = percentile([sample.ttft_ms for sample in self.later], _SLOW)
        return [sample for sample in self.later if sample.ttft_ms >= least_ms]


def chat_figures(report: Report) -> list[ChatFigure]:
    """Every arm at every rate, rate by rate, in the order in which they were measured."""
    measured: dict[tuple[float, str], list[ChatSample]] = defaultdict(list)
    for start in report.starts:
        for sample in start.chats:
            measured[sample.rate, label(start.connector, sample.arm)].append(sample)
    floors = {
        rate: _means(samples) for (rate, arm), samples in measured.items() if arm.endswith(FLOOR)
    }
    figures = []
    for (rate, arm), samples in sorted(measured.items(), key=lambda item: item[0][0]):
        has_floor = rate in floors and not arm.endswith(FLOOR)
        ratio = paired_ratio(_means(samples), floors[rate]) if has_floor else None
        first = [sample for sample in samples if sample.turn == 1]
        later = [sample for sample in samples if sample.turn > 1]
        figures.append(ChatFigure(arm, rate, first, later, ratio))
    return figures


def chat_tables(report: Report) -> list[Table | str]:
    """First-token times, their phases, and what a reader must know of the driver. Fits into 80
    columns."""
    figures = [figure for figure in chat_figures(report) if figure.later]
    if not figures:
        return []
    every = [(figure, figure.later) for figure in figures]
    slow = [(figure, figure.slow) for figure in figures]
    parts: list[Table | str] = [
        _times(figures),
        _phases("later turns by phase: mean, ms", every),
        _phases("their slowest tenth by phase: mean, ms", slow),
    ]
    samples = [sample for figure in figures for sample in (*figure.first, *figure.later)]
    if deferred := sum(sample.was_deferred for sample in samples):
        parts.append(f"{deferred} of {len(samples)} turns came later, after their former answer")
    if late := sum(sample.late_ms > _LATE_MS for sample in samples):
        parts.append(f"[yellow]{late} of {len(samples)} turns were sent {_LATE_MS:.0f} ms late[/]")
    return parts


def mean_phase_ms(samples: Sequence[ChatSample], phase: str) -> float | None:
    """Over the samples with phases; None where it is not known of each."""
    told = [getattr(sample.phases, phase) for sample in samples if sample.phases is not None]
    return None if None in told else _mean(told)


def _times(figures: list[ChatFigure]) -> Table:
    table = _table(
        "chat, requests a second: first-token time of later turns, ms",
        ("mean", "to floor\n\\[95 %]", "p50", "p90", "first\nturns", "found", "turns"),
    )
    for figure in figures:
        times = [sample.ttft_ms for sample in figure.later]
        ratio = figure.to_floor
        found = sum(sample.cached_tokens for sample in figure.later)
        asked = sum(sample.prompt_tokens for sample in figure.later)
        table.add_row(
            _named(figure),
            _shown(_mean(times)),
            f"{ratio.value:.2f} \\[{ratio.low:.2f} {ratio.high:.2f}]" if ratio else "",
            _shown(percentile(times, 0.5)),
            _shown(percentile(times, 0.9)),
            _shown(_mean([sample.ttft_ms for sample in figure.first])),
            f"{found / asked:.0%}",
            str(len(times)),
        )
    return table


def _phases(title: str, rows: list[tuple[ChatFigure, list[ChatSample]]]) -> Table:
    table = _table(title, PHASES)
    for figure, samples in rows:
        table.add_row(_named(figure), *(_shown(mean_phase_ms(samples, p)) for p in PHASES))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    table.add_column("arm", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _named(figure: ChatFigure) -> str:
    return f"{figure.rate:g}: {figure.arm}"


def _shown(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _means(samples: list[ChatSample]) -> dict[BatchId, list[float]]:
    """By run and conversation, over its later turns: the turns of one wait for each other."""
    times: dict[BatchId, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.turn > 1:
            times[0, sample.run, sample.conversation].append(sample.ttft_ms)
    return {key: [sum(values) / len(values)] for key, values in times.items()}
