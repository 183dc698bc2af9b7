"""The `lamina` command."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress
from rich.table import Table

from lamina import __version__, protocol
from lamina.bench.vllm.cli import bench_vllm
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import LaminaError, SettingsError
from lamina.settings import (
    DEFAULT_CHUNK_TOKENS,
    ClientSettings,
    ServerSettings,
    default_socket,
    parse_bytes,
    parse_counts,
)

app = typer.Typer(
    help="A KV-cache server that gives an engine its KV back layer by layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_DEFAULT_SOCKET = default_socket()
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

bench_app = typer.Typer(help="Measure, with every byte checked.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
bench_app.command("vllm")(bench_vllm)
SocketOption = Annotated[
    Path, typer.Option(help="The server's Unix socket, in a directory of its own.")
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


_THREAD_SWITCH_S = 1e-4
"""A lane's thread that wants to go on waits this long for Python at work on another thread: a
sixth of what a batch takes on the link, where Python's own 5 ms would leave the link idle."""


@app.command()
def serve(
    socket: SocketOption = _DEFAULT_SOCKET,
    arena: Annotated[str, typer.Option(help="Host memory for chunks, e.g. 64GiB.")] = "4GiB",
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of a chunk; the engines' must agree.")
    ] = DEFAULT_CHUNK_TOKENS,
    lease_ttl_s: Annotated[
        float, typer.Option(help="Seconds after which an unused lease ends.")
    ] = 60.0,
    host_link_gbps: Annotated[
        float | None, typer.Option(help="Throttle host copies to this many GB/s (demo, tests).")
    ] = None,
    allow_uid: Annotated[
        list[int] | None, typer.Option(help="Another user whose engines may connect; repeatable.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="host:port for /metrics, /status and /healthz; default: off.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve the engines of this host until SIGTERM or Ctrl-C."""
    from lamina.server.main import Server

    _log_to_stderr(log_level)
    settings = ServerSettings(
        socket=socket,
        allow_uids=tuple(allow_uid or ()),
        arena_bytes=parse_bytes(arena),
        chunk_tokens=chunk_tokens,
        lease_ttl_s=lease_ttl_s,
        host_link_gbps=host_link_gbps,
        http=http,
    )
    sys.setswitchinterval(_THREAD_SWITCH_S)
    asyncio.run(Server(settings).run())


@app.command()
def status(
    socket: SocketOption = _DEFAULT_SOCKET,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a running server holds and has done."""
    stats = _ask(socket, protocol.GetStats)
    assert isinstance(stats, protocol.Stats)
    values = stats.values
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    table = Table(title=f"Lamina at {socket}", show_header=False)
    for name, value in values.items():
        shown = f"{value / 2**20:,.1f} MiB" if name.endswith("_bytes") else f"{value:,g}"
        table.add_row(name.replace("_bytes", "").replace("_", " "), shown)
    Console().print(table)


@app.command()
def clear(socket: SocketOption = _DEFAULT_SOCKET) -> None:
    """Forget every chunk that is not in use."""
    cleared = _ask(socket, protocol.Clear)
    assert isinstance(cleared, protocol.Cleared)
    typer.echo(f"forgot {cleared.chunks} chunks")


@app.command()
def demo(
    documents: Annotated[int, typer.Option(min=1, help="Documents in the cache.")] = 3,
    hit_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a document.")] = 1024,
    tail_tokens: Annotated[int, typer.Option(min=1, help="Fresh tokens after it.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 16,
    layers_per_slice: Annotated[int, typer.Option(min=1, help="Width of a slice.")] = 1,
    timeline: Annotated[Path | None, typer.Option(help="Where to put the picture.")] = Path(
        "demo-timeline.png"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve a small model with a cache on a throttled link, and compare four ways to load a hit.

    Exits with 1 when any arm's logits differ from recomputing.
    """
    from lamina.demo.messages import DemoSpec
    from lamina.demo.run import run_demo
    from lamina.demo.show import draw_timeline, table_of

    spec = DemoSpec(
        documents=documents,
        hit_tokens=hit_tokens,
        tail_tokens=tail_tokens,
        layers=layers,
        layers_per_slice=layers_per_slice,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        result = run_demo(
            spec,
            lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
        )
    if timeline is not None:
        draw_timeline(result.timeline, timeline)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(table_of(result))
        if timeline is not None:
            Console().print(f"Each layer's arrival against its computation: {timeline}")
    if not all(arm.bit_identical for arm in result.arms):
        raise typer.Exit(1)


@bench_app.command("transfer")
def bench_transfer(
    device: Annotated[str, typer.Option(help="host or cuda.")] = "host",
    layers: Annotated[int, typer.Option(min=1)] = 32,
    page_bytes: Annotated[str, typer.Option(help="Sizes to sweep, comma-separated.")] = "64KiB",
    widths: Annotated[str, typer.Option(help="Layers a slice to sweep.")] = "1,8,32",
    concurrency: Annotated[str, typer.Option(help="Retrieves at once to sweep.")] = "1,4",
    document_bytes: Annotated[str, typer.Option(help="Size of one retrieve.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds a cell.")] = 5,
    host_link_gbps: Annotated[float | None, typer.Option(help="Throttle the host device.")] = None,
    overlap: Annotated[
        bool, typer.Option(help="Also computation beside transfers (a GPU and torch).")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the server's transfers without an engine, and check every byte.

    Exits with 1 when a byte was wrong.
    """
    from lamina.bench.results import TransferSpec
    from lamina.bench.show import transfer_table
    from lamina.bench.transfer import run_transfer

    spec = TransferSpec(
        device=device,
        layers=layers,
        page_bytes=tuple(parse_bytes(size) for size in page_bytes.split(",")),
        widths=parse_counts(widths),
        concurrency=parse_counts(concurrency),
        document_bytes=parse_bytes(document_bytes),
        rounds=rounds,
        link_gbps=host_link_gbps,
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
    hit_tokens: Annotated[str, typer.Option(help="Of them cached, to sweep.")] = "14336,12288",
    concurrency: Annotated[str, typer.Option(help="Requests at once, to sweep.")] = "1,4,8",
    requests: Annotated[int, typer.Option(min=1, help="Requests a cell.")] = 8,
    link_gbps: Annotated[float, typer.Option(min=0.01, help="The link's GB/s.")] = 54.5,
    kv_bytes_per_token: Annotated[str, typer.Option(help="In all layers.")] = "128KiB",
    layers: Annotated[int, typer.Option(min=1)] = 32,
    step_tokens: Annotated[int, typer.Option(min=1, help="max_num_batched_tokens.")] = 2048,
    prefill_tokens_per_ms: Annotated[float, typer.Option(min=0.01, help="Computing.")] = 50.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict first-token times on a model of engine and link, for each way to load a hit.

    All else is as measured for an 8B model on an H200; see docs/performance.md.
    """
    from lamina.bench.simulate import Machine, Workload, run_cells, simulation_table

    hits, counts = parse_counts(hit_tokens), parse_counts(concurrency)
    if max(hits) >= prompt_tokens:
        raise SettingsError(
            f"a hit of {max(hits)} tokens in a prompt of {prompt_tokens}",
            "Use shorter hits: at least one token is computed",
        )
    machine = Machine(
        layers=layers,
        token_bytes=parse_bytes(kv_bytes_per_token),
        step_tokens=step_tokens,
        link_s_per_gib=2**30 / (link_gbps * 1e9),
        token_s=1e-3 / prefill_tokens_per_ms,
    )
    workloads = [
        Workload(hit_tokens=hit, prompt_tokens=prompt_tokens, concurrency=count, requests=requests)
        for hit in hits
        for count in counts
    ]
    result = run_cells(machine, workloads, prompt_tokens)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(simulation_table(result))


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
    from lamina.bench.show import soak_table
    from lamina.bench.soak import run_soak
    from lamina.bench.soak_results import SoakSpec

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


def _ask(socket: Path, request: type[protocol.Message]) -> protocol.Reply:
    """Send one request without fields and return its reply."""
    client = Client(ClientSettings(socket=socket), HostWorkerDevice(), "lamina command line")
    try:
        client.connect()
        return client.ask(request)
    finally:
        client.close()


def _log_to_stderr(level: str) -> None:
    if level.upper() not in _LOG_LEVELS:
        raise SettingsError(f"there is no log level {level!r}", f"Use {', '.join(_LOG_LEVELS)}")
    logging.basicConfig(
        level=level.upper(),
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )


def main() -> None:
    """Run the command; an error that Lamina raises on purpose is one line, not a trace."""
    try:
        app()
    except LaminaError as error:
        typer.secho("lamina: ", fg="red", err=True, nl=False)
        typer.echo(error, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
