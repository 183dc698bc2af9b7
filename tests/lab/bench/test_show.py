"""The tables of benchmarks fit into a terminal, with nothing of them cut."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lamina_lab.bench.results import Cell, TransferResult, TransferSpec
from lamina_lab.bench.show import transfer_table
from lamina_lab.simulate import Machine, Workload, run_cells, simulation_table
from tests.support.shown import shown


def test_bench_transfer_with_numbers_as_long_as_they_get() -> None:
    cell = Cell(
        page_bytes=32 << 20,
        layers_per_slice=128,
        concurrency=64,
        consecutive_blocks=False,
        gbps=555.55,
        share_of_link=1.005,
        share_of_bare_loop=1.017,
        first_slice_ms=1_234.56,
        first_slice_worst_ms=12_345.67,
        last_slice_ms=12_345.68,
        engine_ms_per_gib=0.5,
        server_cores=12.34,
        server_cpu_s_per_gib=1.5,
        store_gbps=444.44,
        store_share_of_link=0.987,
        wrong_bytes=34_359_738_368,
    )
    result = TransferResult(
        spec=TransferSpec(device="cuda"),
        link_retrieve_gbps=555.5,
        link_store_gbps=444.4,
        cells=[cell],
    )
    text = shown(transfer_table(result))
    for words in ("32768", "scattered", "555.55", "1.017", "34359738368", "12345.67", "12.34"):
        assert words in text


def test_bench_simulate() -> None:
    machine = Machine(
        layers=32, token_bytes=128 << 10, step_tokens=2048, link_s_per_gib=0.5, token_s=2e-5
    )
    work = Workload(hit_tokens=14_336, prompt_tokens=15_154, concurrency=8, requests=8)
    assert "14336" in shown(simulation_table(run_cells(machine, [work], 15_154)))


def test_published_transfers_are_of_todays_form() -> None:
    """So that they can be shown and compared."""
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "h200-transfer.json"
    result = msgspec.json.decode(path.read_bytes(), type=TransferResult)
    assert result.is_correct
