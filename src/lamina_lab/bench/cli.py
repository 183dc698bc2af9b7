"""The `lamina bench` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from lamina.cli.options import BYTES, COUNTS, POSITIVE, SIZES, Counts, Sizes, check_writable
from lamina.errors import SettingsError
from lamina.settings import parse_data_path
from lamina_lab.bench.vllm.cli import bench_vllm

bench_app = typer.Typer(help="Measure, with every byte checked.", no_args_is_help=True)
bench_app.command("vllm")(bench_vllm)

_PAGE_BYTES = Sizes((64 << 10,))
_WIDTHS = Counts((1, 8, 32))
_RETRIEVES = Counts((1, 4))
_HITS = Counts((14_336, 12_288))
_REQUESTS = Counts((1, 4, 8))


@bench_app.command("transfer")
def bench_transfer(
    device: Annotated[str, typer.Option(help="host or cuda.")] = "host",
    layers: Annotated[int, typer.Option(min=1)] = 32,
    page_bytes: Annotated[
        Sizes,
        typer.Option(
            parser=SIZES,
            metavar="SIZE,SIZE",
            show_default="64KiB",
            help="Sizes to sweep, comma-separated.",
        ),
    ] = _PAGE_BYTES,
    widths: Annotated[
        Counts, typer.Option(parser=COUNTS, metavar="N,N", help="Layers a slice to sweep.")
    ] = _WIDTHS,
    concurrency: Annotated[
        Counts, typer.Option(parser=COUNTS, metavar="N,N", help="Retrieves at once to sweep.")
    ] = _RETRIEVES,
    document_bytes: Annotated[
        int,
        typer.Option(
            parser=BYTES, metavar="SIZE", show_default="1GiB", help="Size of one retrieve."
        ),
    ] = 1 << 30,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds a cell.")] = 5,
    host_link_gbps: Annotated[
        float | None,
        typer.Option(parser=POSITIVE, metavar="GB/S", help="Throttle the host device."),
    ] = None,
    data_path: Annotated[
        str, typer.Option(help="direct, ring, or auto as an engine decides.")
    ] = "auto",
    overlap: Annotated[
        bool, typer.Option(help="Also computation beside transfers (a GPU and torch).")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the server's transfers without an engine, and check every byte.

    Exits with 1 when a byte was wrong.
    """
    from lamina_lab.bench.results import TransferSpec
    from lamina_lab.bench.show import transfer_table
    from lamina_lab.bench.transfer import run_transfer

    check_writable("--save", save)
    spec = TransferSpec(
        device=device,
        layers=layers,
        page_bytes=page_bytes,
        widths=widths,
        concurrency=concurrency,
        document_bytes=document_bytes,
        rounds=rounds,
        link_gbps=host_link_gbps,
        data_path=parse_data_path(data_path),
        overlap=overlap,
    )
    result = run_transfer(spec)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        Console().print(transfer_table(result))
    if not result.is_correct:
        raise typer.Exit(1)


@bench_app.command("simulate")
def bench_simulate(
    prompt_tokens: Annotated[int, typer.Option(min=2)] = 15_154,
    hit_tokens: Annotated[
        Counts, typer.Option(parser=COUNTS, metavar="N,N", help="Of them cached, to sweep.")
    ] = _HITS,
    concurrency: Annotated[
        Counts, typer.Option(parser=COUNTS, metavar="N,N", help="Requests at once, to sweep.")
    ] = _REQUESTS,
    requests: Annotated[int, typer.Option(min=1, help="Requests a cell.")] = 8,
    link_gbps: Annotated[float, typer.Option(min=0.01, help="The link's GB/s.")] = 54.5,
    kv_bytes_per_token: Annotated[
        int,
        typer.Option(parser=BYTES, metavar="SIZE", show_default="128KiB", help="In all layers."),
    ] = 128 << 10,
    layers: Annotated[int, typer.Option(min=1)] = 32,
    step_tokens: Annotated[int, typer.Option(min=1, help="max_num_batched_tokens.")] = 2048,
    prefill_tokens_per_ms: Annotated[float, typer.Option(min=0.01, help="Computing.")] = 50.0,
    noise: Annotated[
        float, typer.Option(min=0.0, help="Deviation of steps' and copies' times: 0.1 is 10 %.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    forecasts: Annotated[
        bool, typer.Option("--forecasts", help="Print what 'auto' expected of each hit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict first-token times on a model of engine and link, for each way to retrieve a hit.

    All else is as measured for an 8B model on an H200; see docs/performance.md.
    """
    from lamina_lab.simulate import (
        Machine,
        Workload,
        forecast_lines,
        run_cells,
        simulation_table,
    )

    if max(hit_tokens) >= prompt_tokens:
        raise SettingsError(
            f"--hit-tokens: a hit of {max(hit_tokens)} tokens in a prompt of {prompt_tokens}",
            "Use shorter hits: at least one token is computed",
        )
    machine = Machine(
        layers=layers,
        token_bytes=kv_bytes_per_token,
        step_tokens=step_tokens,
        link_s_per_gib=2**30 / (link_gbps * 1e9),
        token_s=1e-3 / prefill_tokens_per_ms,
        step_noise=noise,
        link_noise=noise,
        seed=seed,
    )
    workloads = [
        Workload(hit_tokens=hit, prompt_tokens=prompt_tokens, concurrency=count, requests=requests)
        for hit in hit_tokens
        for count in concurrency
    ]
    result = run_cells(machine, workloads, prompt_tokens)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(simulation_table(result))
        for line in forecast_lines(result) if forecasts else ():
            typer.echo(line)


@bench_app.command("soak")
def bench_soak(
    minutes: Annotated[float, typer.Option(help="How long.")] = 20.0,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes.")] = 8,
    faults_per_minute: Annotated[float, typer.Option(help="Kills, stops, failed copies.")] = 15.0,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Break things at random around engines that check every byte.

    Exits with 1 on a wrong byte, a hang, a leak, or when a server's memory grew.
    """
    from lamina_lab.bench.show import soak_table
    from lamina_lab.soak.results import SoakSpec
    from lamina_lab.soak.run import run_soak

    check_writable("--save", save)
    spec = SoakSpec(
        minutes=minutes, engines=engines, faults_per_minute=faults_per_minute, seed=seed
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        report = run_soak(spec, lambda line: bar.update(task, description=line))
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        Console().print(soak_table(report))
    if not report.is_good:
        raise typer.Exit(1)
