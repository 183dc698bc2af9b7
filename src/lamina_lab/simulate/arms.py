"""Ways to retrieve a hit, side by side on a simulated machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from rich import box
from rich.table import Table

from lamina.client.release import AutoPolicy, FixedPolicy, Forecast, ReleasePolicy, WholePolicy
from lamina_lab.simulate.engine import simulate
from lamina_lab.simulate.model import Machine, Workload

FLOOR: Final = "floor"
"""Hits lie in GPU memory."""
RECOMPUTE: Final = "no cache"

ARMS: dict[str, ReleasePolicy] = {
    "whole": WholePolicy(),
    "k=1": FixedPolicy(1, 1),
    "k=16": FixedPolicy(1, 16),
    "k=24": FixedPolicy(1, 24),
    "k=29": FixedPolicy(1, 29),
    "sync": FixedPolicy(1, 0),
    "auto": AutoPolicy(),
}
"""Names of arms: `k=N` releases after N layers, `sync` at once."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Mean first-token times by arm, and the mean time of whole requests, in milliseconds; what
    `auto` expected of each request, in order of sending."""

    hit_tokens: int
    concurrency: int
    first_token_ms: dict[str, float]
    total_ms: dict[str, float]
    auto_reasons: dict[str, int]
    auto_forecasts: tuple[Forecast | None, ...]


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    prompt_tokens: int
    cells: tuple[Cell, ...]


def run_cells(
    machine: Machine, workloads: Iterable[Workload], prompt_tokens: int
) -> SimulationResult:
    """All arms on each workload."""
    cells = tuple(_cell(machine, workload) for workload in workloads)
    return SimulationResult(machine=machine, prompt_tokens=prompt_tokens, cells=cells)


def _cell(machine: Machine, workload: Workload) -> Cell:
    nothing = msgspec.structs.replace(workload, hit_tokens=0)
    outcomes = {
        RECOMPUTE: simulate(machine, nothing, None),
        FLOOR: simulate(machine, workload, None),
        **{arm: simulate(machine, workload, policy) for arm, policy in ARMS.items()},
    }
    return Cell(
        hit_tokens=workload.hit_tokens,
        concurrency=workload.concurrency,
        first_token_ms={arm: round(o.mean_s * 1e3, 2) for arm, o in outcomes.items()},
        total_ms={arm: round(o.mean_total_s * 1e3, 2) for arm, o in outcomes.items()},
        auto_reasons=outcomes["auto"].reasons,
        auto_forecasts=outcomes["auto"].forecasts,
    )


def simulation_table(result: SimulationResult) -> Table:
    """A row a cell; mean first-token times."""
    machine = result.machine
    table = Table(
        title=f"Mean first-token time in ms, prompts of {result.prompt_tokens} tokens, link "
        f"{2**30 / machine.link_s_per_gib / 1e9:.1f} GB/s, steps of {machine.step_tokens} tokens",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("hit", "at once", RECOMPUTE, FLOOR, *ARMS):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in result.cells:
        times = (f"{time_ms:.1f}" for time_ms in cell.first_token_ms.values())
        table.add_row(f"{cell.hit_tokens}", f"{cell.concurrency}", *times)
    return table


def forecast_lines(result: SimulationResult) -> Iterator[str]:
    """A line for each hit that `auto` weighed."""
    for cell in result.cells:
        for number, forecast in enumerate(cell.auto_forecasts):
            yield f"{cell.hit_tokens} : {cell.concurrency}, request {number}: {forecast}"
