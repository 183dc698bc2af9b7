"""What a user sets and types: settings and commands; errors are one line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lamina
from lamina import protocol
from lamina.cli import app as commands
from lamina.cli import main
from lamina.cli.options import check_writable
from lamina.cli.status_view import status_view
from lamina.errors import SettingsError
from lamina.server.counters import Counters
from lamina.server.main import Server
from lamina.settings import ClientSettings, ServerSettings
from tests.e2e.strangers import (
    BLOCKS,
    GEOMETRY,
    Bystander,
)
from tests.support.server import ServerThread
from tests.support.shown import shown
from tests.support.worker import PageWorker

# Settings.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lamina.layerwise_overlaps": 1}, ["lamina.layerwise_overlap?"]),
        ({"lamina.nonsense": 1}, ["no setting 'lamina.nonsense'"]),
        ({"lamina.layerwise_overlap": "many"}, ["'many'", "number of layers"]),
        ({"lamina.layerwise_overlap": -1}, ["-1", "number of layers"]),
        ({"lamina.layerwise_overlap": 1.5}, ["1.5", "number of layers"]),
        ({"lamina.layerwise_overlap": None}, ["None", "number of layers"]),
        ({"lamina.retrieve_timeout_ms": "soon"}, ["retrieve_timeout_ms"]),
        ({"lamina.retrieve_timeout_ms": 0}, ["retrieve_timeout_ms is 0", "at least 1"]),
        ({"lamina.suspect_after_ms": -5}, ["suspect_after_ms is -5", "at least 1"]),
        ({"lamina.chunk_tokens": 0}, ["chunk_tokens is 0", "at least 1"]),
        ({"lamina.socket": "/" + "s" * 200}, ["longer than 107 bytes", "shorter path"]),
        ({"lamina.socket": 7}, ["socket"]),
    ],
    ids=str,
)
def test_an_engines_settings_are_refused_with_the_reason(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as refusal:
        ClientSettings.parse({"other.setting": 1, **values})
    for word in words:
        assert word in str(refusal.value)
    assert refusal.value.remedy


# The command line.


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def assert_one_line_error(self, *words: str, code: int = 2) -> None:
        """2: what was asked for cannot be; 1: it failed."""
        assert self.code == code, self
        assert self.out == ""
        assert self.err.startswith("lamina: ")
        assert self.err.count("\n") == 1, "an error is one line"
        for word in words:
            assert word in self.err, self


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a `lamina` command in this process; a server that starts all the same stops at once."""

    def run_and_stop(server: Server, ready: Callable[[], None] | None = None) -> Awaitable[None]:
        return serve(server, lambda: server.stop())

    serve = Server.run
    monkeypatch.setattr(Server, "run", run_and_stop)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["lamina", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert code is None or isinstance(code, int)
        return Said(code or 0, *capsys.readouterr())

    return run


class Entry(NamedTuple):
    """An entry point of some package."""

    name: str
    loaded: Any

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_other_packages_bring_commands_and_a_broken_one_costs_only_itself(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greet() -> None:
        print("hello")

    entries = [Entry("greet", greet), Entry("broken", ImportError("no module named x"))]
    monkeypatch.setattr(commands, "entry_points", lambda group: entries)
    said = cli("greet")
    assert (said.code, said.out) == (0, "hello\n")
    assert said.err == "lamina: 'broken' is not available: no module named x\n"


def test_no_package_replaces_a_command(
    cli: Cli, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Entry("status", lambda: print("not ours"))]
    monkeypatch.setattr(commands, "entry_points", lambda group: entries)
    said = cli("status", "--socket", str(socket_path))
    assert (said.code, said.out) == (1, "")
    assert "'status' is not available: lamina has such a command already" in said.err
    assert "no Lamina server answers" in said.err


def test_the_laboratory_is_found_and_not_imported_by_the_product() -> None:
    """A process that imports all of the command line but for others' commands."""
    code = "import lamina.cli.app, lamina.server.main, sys; print('lamina_lab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    names = {entry.name for entry in importlib.metadata.entry_points(group="lamina.commands")}
    assert names >= {"bench", "demo"}


@pytest.mark.parametrize("package", ["typer", "rich", "starlette", "uvicorn", "prometheus_client"])
def test_without_what_the_server_needs_it_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from lamina.cli import main; main()"
    command = [sys.executable, "-c", code, "serve"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"lamina: {package} is not installed here" in done.stderr
    assert "pip install '.[server]'" in done.stderr


def test_version(cli: Cli) -> None:
    assert cli("--version") == Said(0, f"{lamina.__version__}\n", "")


def test_status_and_clear(server: ServerThread, socket_path: Path, cli: Cli) -> None:
    worker = PageWorker(socket_path, GEOMETRY, BLOCKS, model="a model")
    worker.store_new(3)
    said = cli("status", "--socket", str(socket_path))
    assert said.code == 0
    assert "chunks" in said.out
    text = cli("status", "--socket", str(socket_path), "--json").out
    values = json.loads(text)
    assert (values["chunks"], values["stores"], values["sessions"]) == (3, 1, 1)
    assert '"chunks": 3,' in text, "a count is an integer"
    assert values["version"] == lamina.__version__
    assert values["uptime_s"] > 0
    kv_bytes = sum(pages.nbytes for pages in worker.pages)
    assert values["engines"] == [
        {
            "label": "worker",
            "model": "a model",
            "pid": os.getpid(),
            "device": "host",
            "registered_bytes": kv_bytes,
        }
    ]
    assert cli("clear", "--socket", str(socket_path)) == Said(0, "forgot 3 chunks\n", "")
    assert cli("clear", "--socket", str(socket_path)) == Said(0, "forgot 0 chunks\n", "")
    worker.close()


def stats(values: dict[str, int | float], engines: int) -> protocol.Stats:
    """A server's, of which every number is as long as it gets."""
    server = Counters()
    counts: dict[str, int | float] = dict.fromkeys(server.totals(), 10**15 + 7)
    engine = protocol.EngineStats(
        "a label of an engine " * 8, "organization/model-70B" * 4, 4_194_304, "cuda:0", 139 << 30
    )
    return protocol.Stats(
        0, "0.1.0", {**counts, **values}, {"bad_request": 10**6}, (engine,) * engines
    )


def test_status_says_used_memory_and_the_hit_rate_by_tokens_in_80_columns() -> None:
    values: dict[str, int | float] = {
        "uptime_s": 93_784.5,
        "chunk_tokens": 64,
        "lookup_chunks": 1_000_000,
        "hit_chunks": 250_000,
        "arena_capacity_bytes": 4 << 30,
        "arena_ready_bytes": 4 << 30,
        "arena_free_bytes": 3 << 30,
    }
    text = shown(status_view(Path("/run/lamina/lamina.sock"), stats(values, engines=2)))
    for words in (
        "Lamina 0.1.0 at /run/lamina/lamina.sock",
        "1 d 2 h",
        "1 GiB of 4 GiB used (25%)",
        "25.0% (16,000,000 of 64,000,000 tokens)",
        "1,000,000 bad_request",
        "1,000,000,000,000,007",
        "4194304",
        "139 GiB",
    ):
        assert words in text
    assert "e+" not in text
    assert "filling" not in text
    text = shown(
        status_view(
            Path("/" + "s" * 106),
            stats({**values, "arena_ready_bytes": 3 << 30, "lookup_chunks": 0}, engines=0),
        )
    )
    for words in ("0 bytes of 4 GiB used", "3 GiB resident", "nothing looked up", "No engine"):
        assert words in text


@pytest.mark.parametrize("command", ["status", "clear"])
@pytest.mark.parametrize("name", ["s", "[red]s", "[/red]"], ids=["plain", "markup", "end-markup"])
def test_commands_without_a_server_say_how_to_start_one(
    socket_path: Path, cli: Cli, command: str, name: str
) -> None:
    path = str(socket_path.parent / name)
    said = cli(command, "--socket", path)
    said.assert_one_line_error("no Lamina server answers", path, "`lamina serve`", code=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arena", "lots"], ["'--arena'", "'lots' is not a size", "512MiB"]),
        (["--arena", "1KiB"], ["'--arena'", "an arena of 1024 bytes", "at least 4096"]),
        (["--arena", "0%"], ["'--arena'", "'0%'", "80%"]),
        (["--arena", "101%"], ["'--arena'", "'101%'", "80%"]),
        (["--arena", "10TiB"], ["an arena of 10 TiB was asked for", "available", "Use --arena"]),
        (["--chunk-tokens", "0"], ["'--chunk-tokens'", "1"]),
        (["--chunk-tokens", "many"], ["'--chunk-tokens'", "integer"]),
        (["--lease-ttl-s", "-1"], ["'--lease-ttl-s'", "'-1'", "positive"]),
        (["--lease-ttl-s", "nan"], ["'--lease-ttl-s'", "'nan'", "positive"]),
        (["--host-link-gbps", "0"], ["'--host-link-gbps'", "'0'", "positive"]),
        (["--http", "everywhere"], ["'--http'", "'everywhere' is not host:port"]),
        (["--http", "::1:80"], ["'--http'", "'::1:80' is not host:port", "[::1]:9090"]),
        (["--http", "127.0.0.1:99999"], ["'--http'", "is not host:port"]),
        (["--http", "no.such.host.invalid:80"], ["no.such.host.invalid", "--http"]),
        (["--arenas", "1MiB"], ["No such option: --arenas", "--arena"]),
        (["--log-level", "loud"], ["'loud'", "INFO"]),
        (["--log-file", "/no/such/place"], ["/no/such/place cannot be opened", "--log-file"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_a_malformed_server_setting_is_one_line(
    socket_path: Path, cli: Cli, options: list[str], words: list[str]
) -> None:
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB", *options)
    said.assert_one_line_error(*words)
    assert not socket_path.exists()


def test_a_socket_path_that_is_too_long(tmp_path: Path, cli: Cli) -> None:
    said = cli("serve", "--socket", str(tmp_path / ("s" * 108)))
    said.assert_one_line_error("'--socket'", "longer than 107 bytes", "shorter path")


def test_settings_come_from_the_environment_as_well(
    socket_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[ServerSettings] = []
    serve = Server.__init__

    def init(server: Server, settings: ServerSettings, **more: Any) -> None:
        taken.append(settings)
        serve(server, settings, **more)

    monkeypatch.setattr(Server, "__init__", init)
    for name, value in {
        "SOCKET": str(socket_path),
        "ARENA": "1M",
        "CHUNK_TOKENS": "64",
        "LEASE_TTL_S": "7",
        "HOST_LINK_GBPS": "2.5",
        "HTTP": "127.0.0.1:0",
        "LOG_LEVEL": "warning",
    }.items():
        monkeypatch.setenv(f"LAMINA_{name}", value)
    assert cli("serve", "--chunk-tokens", "32") == Said(0, "", "")
    assert taken == [
        ServerSettings(
            socket=socket_path,
            arena_bytes=1 << 20,
            chunk_tokens=32,
            lease_ttl_s=7.0,
            host_link_gbps=2.5,
            http="127.0.0.1:0",
        )
    ]
    monkeypatch.setenv("LAMINA_ARENA", "lots")
    cli("serve").assert_one_line_error("LAMINA_ARENA", "'lots' is not a size")
    said = cli("status")
    said.assert_one_line_error("no Lamina server answers", str(socket_path), code=1)


@pytest.mark.parametrize(
    "command",
    ["", "serve", "status", "clear", "demo", "bench", "bench transfer", "bench simulate",
     "bench soak", "bench vllm"],
)  # fmt: skip
def test_h_is_help_everywhere(cli: Cli, command: str) -> None:
    said = cli(*command.split(), "-h")
    assert said.code == 0
    assert "Usage:" in said.out


def test_no_command_is_answered_with_the_commands_there_are(cli: Cli) -> None:
    for command, word in (((), "serve"), (("bench",), "transfer")):
        said = cli(*command)
        assert said.code == 2
        assert word in said.out
        assert said.err == ""


@pytest.mark.parametrize(
    "command",
    [
        ("demo", "--timeline"),
        ("bench", "transfer", "--save"),
        ("bench", "soak", "--save"),
        ("bench", "vllm", "--save"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, cli: Cli, command: tuple[str, ...]
) -> None:
    said = cli(*command, str(tmp_path / "no" / "file"))
    said.assert_one_line_error(f"{command[-1]}: {tmp_path}", "cannot be written: No such file")


def test_trying_whether_a_file_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("precious")
    check_writable("--save", there)
    check_writable("--save", new)
    assert there.read_text() == "precious"
    assert not new.exists()


@pytest.mark.parametrize("other", ["--streams=384:4", "--batch-invariant", "--plot=chat.png"])
def test_a_chat_is_measured_apart(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    said = cli("bench", "vllm", "--chat", other)
    said.assert_one_line_error("--chat goes without", "Measure them apart")


@pytest.mark.parametrize(
    ("command", "missing", "remedy"),
    [
        (("demo",), "threadpoolctl", "pip install '.[lab]'"),
        (("demo",), "matplotlib", "pip install '.[lab]'"),
        (("bench", "vllm"), "vllm", "where vLLM is installed"),
        (("bench", "vllm", "--plot", "x.png"), "matplotlib", "pip install '.[lab]'"),
    ],
    ids=str,
)
def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    missing: str,
    remedy: str,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    cli(*command).assert_one_line_error(missing, "not installed", remedy, code=1)


def test_a_second_server_on_the_same_socket_names_the_first(
    bystander: Bystander, socket_path: Path, cli: Cli
) -> None:
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error(f"(pid {os.getpid()})", str(socket_path), "another --socket")
    assert socket_path.exists(), "it took the socket away"


def test_a_runtime_directory_that_others_can_read(socket_path: Path, cli: Cli) -> None:
    socket_path.parent.mkdir(mode=0o755)
    socket_path.parent.chmod(0o755)
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error("not private", f"chmod 700 {socket_path.parent}")
    assert not socket_path.exists()


def test_a_runtime_directory_that_is_a_file(socket_path: Path, cli: Cli) -> None:
    socket_path.parent.write_text("not a directory")
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error("cannot be used", "another --socket")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_socket_is_not_taken_away(socket_path: Path, cli: Cli, kind: str) -> None:
    socket_path.parent.mkdir(mode=0o700)
    if kind == "file":
        socket_path.write_text("precious")
    else:
        socket_path.mkdir()
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error(str(socket_path), "another --socket")
    assert socket_path.is_dir() or socket_path.read_text() == "precious"


def test_an_http_port_that_is_taken(socket_path: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB", "--http", address)
    said.assert_one_line_error(f"{address} cannot be served", "another --http")
    assert not socket_path.exists()


def test_errors_of_the_real_command_are_one_line_too(
    server: ServerThread, socket_path: Path
) -> None:
    command = [sys.executable, "-m", "lamina.cli", "serve", "--socket", str(socket_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = Said(ended.returncode, ended.stdout, ended.stderr)
    said.assert_one_line_error(f"(pid {os.getpid()})", "another --socket")
