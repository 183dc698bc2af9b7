"""The `lamina` command."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from lamina import __version__, protocol
from lamina.bench.cli import bench_app
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import LaminaError, SettingsError
from lamina.options import (
    ADDRESS,
    ARENA,
    INSTALL_DEMO,
    POSITIVE,
    SOCKET,
    ArenaSize,
    check_installed,
    check_writable,
)
from lamina.settings import (
    DEFAULT_CHUNK_TOKENS,
    ClientSettings,
    ServerSettings,
    default_socket,
)
from lamina.status_view import status_data, status_view

app = typer.Typer(
    help="A KV-cache server that gives an engine its KV back layer by layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer names no other of click's
_DEFAULT_SOCKET = default_socket()
_DEFAULT_ARENA = ArenaSize(4 * 2**30)

app.add_typer(bench_app, name="bench")
SocketOption = Annotated[
    Path,
    typer.Option(
        parser=SOCKET,
        metavar="PATH",
        envvar="LAMINA_SOCKET",
        help="The server's Unix socket, in a directory of its own.",
    ),
]


ServerUidOption = Annotated[
    int | None,
    typer.Option(
        metavar="UID",
        envvar="LAMINA_SERVER_UID",
        help="A user besides you whose server is trusted.",
    ),
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
    arena: Annotated[
        ArenaSize,
        typer.Option(
            parser=ARENA,
            metavar="SIZE|PERCENT",
            envvar="LAMINA_ARENA",
            show_default="4GiB",
            help="Host memory for chunks: 64GiB (or 64G, 64Gi), 64GB (64 * 10^9), or a part of "
            "what this process may still take: 80%.",
        ),
    ] = _DEFAULT_ARENA,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="LAMINA_CHUNK_TOKENS",
            help="Tokens of a chunk; the engines' must agree.",
        ),
    ] = DEFAULT_CHUNK_TOKENS,
    lease_ttl_s: Annotated[
        float,
        typer.Option(
            parser=POSITIVE,
            metavar="SECONDS",
            envvar="LAMINA_LEASE_TTL_S",
            help="Seconds after which an unused lease ends.",
        ),
    ] = 60.0,
    host_link_gbps: Annotated[
        float | None,
        typer.Option(
            parser=POSITIVE,
            metavar="GB/S",
            envvar="LAMINA_HOST_LINK_GBPS",
            help="Throttle host copies to this many GB/s (demo, tests).",
        ),
    ] = None,
    allow_uid: Annotated[
        list[int] | None,
        typer.Option(
            envvar="LAMINA_ALLOW_UID", help="Another user whose engines may connect; repeatable."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            parser=ADDRESS,
            metavar="HOST:PORT",
            envvar="LAMINA_HTTP",
            help="For /metrics, /status and /healthz; [::1]:9876 with IPv6; default: off.",
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar="LAMINA_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log a JSON object a line.")] = False,
    log_file: Annotated[
        Path | None, typer.Option(help="Log to this file, reopened on SIGHUP; default: stderr.")
    ] = None,
) -> None:
    """Serve the engines of this host until SIGTERM or Ctrl-C; a second one ends it at once."""
    from lamina.server.counters import Counters
    from lamina.server.logs import server_log
    from lamina.server.main import Server

    settings = ServerSettings(
        socket=socket,
        allow_uids=tuple(allow_uid or ()),
        arena_bytes=arena.value,
        chunk_tokens=chunk_tokens,
        lease_ttl_s=lease_ttl_s,
        host_link_gbps=host_link_gbps,
        http=http,
    )
    sys.setswitchinterval(_THREAD_SWITCH_S)
    counters = Counters()
    with server_log(log_level, log_file, log_json, counters) as log:
        server = Server(settings, counters=counters, reopen_log=log.reopen)
        gc.freeze()  # what is there stays: later collections, pauses of 20 ms, pass it over
        asyncio.run(server.run())


@app.command()
def status(
    socket: SocketOption = _DEFAULT_SOCKET,
    server_uid: ServerUidOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a running server holds and has done."""
    stats = _ask(socket, server_uid, protocol.GetStats)
    assert isinstance(stats, protocol.Stats)
    if as_json:
        typer.echo(json.dumps(status_data(stats), indent=2))
    else:
        Console().print(status_view(socket, stats))


@app.command()
def clear(socket: SocketOption = _DEFAULT_SOCKET, server_uid: ServerUidOption = None) -> None:
    """Forget every chunk that is not in use."""
    cleared = _ask(socket, server_uid, protocol.Clear)
    assert isinstance(cleared, protocol.Cleared)
    typer.echo(f"forgot {cleared.chunks} chunks")


@app.command()
def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    socket: SocketOption = _DEFAULT_SOCKET,
    server_uid: ServerUidOption = None,
) -> None:
    """Change what a running server logs, until it ends."""
    _ask(socket, server_uid, lambda number: protocol.SetLogLevel(number, level))


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

    check_installed(
        "threadpoolctl", *(["matplotlib"] if timeline is not None else []), remedy=INSTALL_DEMO
    )
    check_writable("--timeline", timeline)
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
        draw_timeline(result.timelines, timeline)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(table_of(result))
        if timeline is not None:
            Console().print(f"Each layer's arrival against its computation: {timeline}")
    if not all(arm.bit_identical for arm in result.arms):
        raise typer.Exit(1)


def _ask(
    socket: Path, server_uid: int | None, request: Callable[[int], protocol.Message]
) -> protocol.Reply:
    """Send one request, made with its id, and return its reply."""
    settings = ClientSettings(socket=socket, server_uid=server_uid)
    client = Client(settings, HostWorkerDevice(), "lamina command line")
    try:
        client.connect()
        return client.ask(request)
    finally:
        client.close()


def main() -> None:
    """Run the command; an error that is made on purpose is one line, not a trace.

    Exits with 2 when what was asked for cannot be, and asking again is of no use, with 1 when it
    failed.
    """
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        said: str = error.format_message()  # type: ignore[attr-defined]
        if not said:  # no command: its help has been printed
            sys.exit(2)
        _fail(f"{said.rstrip('.')}. See lamina --help", 2)
    except LaminaError as error:
        _fail(str(error), 2 if isinstance(error, SettingsError) else 1)
    except typer.Abort:
        _fail("interrupted", 130)
    sys.exit(code or 0)


def _fail(why: str, code: int) -> NoReturn:
    typer.secho("lamina: ", fg="red", err=True, nl=False)
    typer.echo(why, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
