"""A model of an engine with a cache behind a link; see `engine`."""

from lamina_lab.simulate.arms import (
    ARMS,
    Cell,
    SimulationResult,
    forecast_lines,
    run_cells,
    simulation_table,
)
from lamina_lab.simulate.engine import simulate
from lamina_lab.simulate.model import Machine, Outcome, Workload

__all__ = [
    "ARMS",
    "Cell",
    "Machine",
    "Outcome",
    "SimulationResult",
    "Workload",
    "forecast_lines",
    "run_cells",
    "simulate",
    "simulation_table",
]
