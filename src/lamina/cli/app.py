"""The commands of the server and those that ask one; others come by entry points of the group
`lamina.commands`: a `typer.Typer` with commands of its own, or a function, which is one."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lamina import __version__, protocol
from lamina.cli.options import ADDRESS, ARENA, POSITIVE, SOCKET, ArenaSize
from lamina.cli.status_view import status_data, status_view
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import LaminaError
from lamina.settings import (
    DEFAULT_CHUNK_TOKENS,
    ClientSettings,
    ServerSettings,
    default_socket,
)

app = typer.Typer(
    help="A KV-cache server that gives an engine its KV back layer by layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DEFAULT_SOCKET = default_socket()
_DEFAULT_ARENA = ArenaSize(4 * 2**30)

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


_OWN = frozenset(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
"""The commands above: nobody else's take their place."""


def add_commands() -> None:
    """Take in the commands of installed packages; one that cannot be loaded costs only itself."""
    for entry in sorted(entry_points(group="lamina.commands"), key=lambda entry: entry.name):
        try:
            if entry.name in _OWN:
                raise LaminaError("lamina has such a command already", "Name it otherwise")
            command = entry.load()
        except Exception as error:  # whatever another package does when it is imported
            typer.echo(f"lamina: {entry.name!r} is not available: {error}", err=True)
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
