"""The command line of `lamina bench vllm`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lamina.cli.options import check_installed, check_writable
from lamina.errors import SettingsError
from lamina_lab import INSTALL_LAB
from lamina_lab.bench.vllm.arms import OUR_ARMS
from lamina_lab.bench.vllm.chat import parse_rates
from lamina_lab.bench.vllm.chat_arms import chat_arms_of
from lamina_lab.bench.vllm.results import Report, load, save
from lamina_lab.bench.vllm.workload import parse_cells

_ARMS = {
    "lamina": "floor,recompute,whole,layered:1,layered:1:sync,layered:1:no-release,layered:8:sync",
    "none": "floor,recompute",
}
_PEER_ARMS = "floor,hit"
_RATES = "3,6"
_CELLS = "15104:1,14336:1,12288:1,14336:4,12288:4,12288:8"


def bench_vllm(
    files: Annotated[
        list[Path] | None, typer.Argument(help="With --merge: the reports to put together.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Measure nothing: report on FILES together.")
    ] = False,
    arms: Annotated[
        str | None, typer.Option(help=f"Comma-separated. Lamina's: {OUR_ARMS}. A peer's: hit.")
    ] = None,
    cells: Annotated[str, typer.Option(help="HIT:CONCURRENCY, comma-separated.")] = _CELLS,
    streams: Annotated[
        str, typer.Option(help="Cells to measure beside 8 decoding streams as well.")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Measure conversations in place of cells.")
    ] = False,
    rates: Annotated[
        str, typer.Option(help="With --chat: requests a second, comma-separated.")
    ] = _RATES,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Timed repeats of 8 requests a cell, or of a chat at each rate."),
    ] = 3,
    connector: Annotated[
        str, typer.Option(help="lamina, none, offloading, offloading-v2 or lmcache.")
    ] = "lamina",
    runner: Annotated[str | None, typer.Option(help="vLLM's model runner: V1 or V2.")] = None,
    gpu: Annotated[int | None, typer.Option(help="The only GPU to use.")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="max_num_batched_tokens; default: as `vllm serve`.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="llama-3.1-8b; llama-3.1-70b-rank, one of 8 ranks; small, tiny to try."),
    ] = "llama-3.1-8b",
    limit_s: Annotated[
        float | None, typer.Option(help="Stop after so many seconds with what there is.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One repeat, no sensitivity.")] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Prove tokens at any concurrency: vLLM computes independently of batches. Slow; "
            "its times do not count.",
        ),
    ] = False,
    save_to: Annotated[
        Path | None, typer.Option("--save", help="Where the JSON goes, as it grows.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to put a PNG.")] = None,
) -> None:
    """First-token times of cache hits on a real vLLM, against a hit in GPU memory.

    Documents seen before, each with a fresh tail; every arm on the same engine, in turn. Exits
    with 1 when a request's tokens were wrong or it did not find what it was to find.

    With --chat: 16 conversations about documents, whose turns come at random times; GPU memory
    for a third of it, or for all for the arm floor (--connector none). Exits with 1 when a turn
    got no whole answer.
    """
    from lamina_lab.bench.vllm.show import draw, is_correct, report_view

    if plot is not None:
        check_installed("matplotlib", remedy=INSTALL_LAB)
    check_writable("--save", save_to)
    check_writable("--plot", plot)
    console = Console()
    if chat and (streams or batch_invariant or plot is not None):
        raise SettingsError(
            "--chat goes without --streams, --batch-invariant and --plot", "Measure them apart"
        )
    if merge:
        report = load(files or [])
        if save_to is not None:
            save(report, save_to)
    else:
        check_installed("torch", "vllm", remedy="Run it where vLLM is installed, and Lamina beside")
        from lamina_lab.bench.vllm.measure import BenchSpec
        from lamina_lab.bench.vllm.run import run_bench

        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        default_arms = chat_arms_of(connector) if chat else _ARMS.get(connector, _PEER_ARMS)
        log, began_s = Console(stderr=True), time.monotonic()
        spec = BenchSpec(
            connector=connector,
            model=model,
            arms=arms or default_arms,
            cells=() if chat else parse_cells(cells),
            rates=parse_rates(rates) if chat else (),
            stream_cells=parse_cells(streams),
            repeats=1 if quick else repeats,
            batched_tokens=chunk_tokens,
            runner=runner,
            limit_s=limit_s,
            check_sensitivity=not quick,
            batch_invariant=batch_invariant,
        )
        start = run_bench(
            spec,
            save_to,
            lambda text: log.print(f"{time.monotonic() - began_s:6.1f} s  {text}", markup=False),
        )
        report = Report(starts=[start])
    console.print(report_view(report))
    if plot is not None:
        draw(report, plot)
    if not is_correct(report):
        raise typer.Exit(1)
