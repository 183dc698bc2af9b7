"""The log of a running server: what it says, to whom, and that nobody waits for its reader."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.client.store import Ticket
from lamina.errors import ErrorCode
from lamina_lab.known.content import ids, random_keys
from tests.e2e.strangers import Stranger, assert_refused
from tests.support.full_pipe import FullPipe
from tests.support.server import ServerProcess, ServerThread, connected_client
from tests.support.wait import eventually
from tests.support.worker import PageWorker

Serve = Callable[..., ServerProcess]

OPERATIONS = 50


@pytest.fixture
def serve(socket_path: Path) -> Iterator[Serve]:
    """Starts a `lamina serve`; it must end well, unless the test has ended it."""
    started: list[ServerProcess] = []

    def start(*options: str, stderr: int | None = None) -> ServerProcess:
        options = ("--arena", "16MiB", "--chunk-tokens", "64", *options)
        started.append(ServerProcess(socket_path, *options, stderr=stderr))
        started[-1].wait_until_serving()
        return started[-1]

    yield start
    for server in started:
        is_ours = server.process.poll() is None
        assert server.stop() == 0 or not is_ours, server.said


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    full = FullPipe()
    yield full
    full.close()


def operate(path: Path) -> dict[str, float]:
    """Connect and ask again and again; return the server's counts."""
    for _ in range(OPERATIONS):
        client = connected_client(path)
        assert client.lookup("r", random_keys(1)).wait(20) is not None
        stats = client.ask(protocol.GetStats)
        client.close()
    assert isinstance(stats, protocol.Stats)
    return stats.values


def lamina(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lamina.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# Readers.


def test_a_log_that_nobody_reads_holds_up_neither_serving_nor_the_end(
    serve: Serve, pipe: FullPipe, socket_path: Path
) -> None:
    server = serve("--log-level", "debug", stderr=pipe.writer)
    assert operate(socket_path)["lookups"] == OPERATIONS
    assert server.stop() == 0


def test_a_log_that_is_read_again_goes_on(serve: Serve, pipe: FullPipe, socket_path: Path) -> None:
    serve(stderr=pipe.writer)
    operate(socket_path)
    assert "serves" in pipe.read_line()


def test_a_reader_that_is_gone_ends_nothing(serve: Serve, socket_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    server = serve("--log-level", "debug", stderr=writer)
    os.close(writer)
    assert operate(socket_path)["log_lines_dropped"] > 1
    assert server.stop() == 0


# Signals.


def test_a_log_file_is_reopened_on_a_hangup(
    serve: Serve, socket_path: Path, tmp_path: Path
) -> None:
    path, former = tmp_path / "lamina.log", tmp_path / "lamina.log.1"
    server = serve("--log-file", str(path))
    eventually(lambda: "serves" in path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(former)
    server.send(signal.SIGHUP)
    eventually(path.exists)
    PageWorker(socket_path).close()
    eventually(lambda: "left" in path.read_text())
    assert "joined" not in former.read_text()
    assert server.said == ""


def test_a_hangup_does_not_end_a_server_without_a_log_file(serve: Serve, socket_path: Path) -> None:
    server = serve()
    server.send(signal.SIGHUP)
    operate(socket_path)
    assert server.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_server_at_once(
    serve: Serve, socket_path: Path, number: signal.Signals
) -> None:
    server = serve()
    worker = PageWorker(socket_path)
    link = worker.client._link
    assert link is not None
    assert link.transfers is not None
    never = Ticket(link.transfers.next_ticket(), link.board)  # handed out, and not written
    worker.client.store(b"", random_keys(1), [ids(range(4))], never)
    worker.client.ask(protocol.GetStats)  # answered after the store has begun
    server.send(signal.SIGTERM)
    eventually(lambda: "stopping" in server.said)
    assert server.process.poll() is None, "it waits for the store"
    server.send(number)
    assert server.process.wait(20) == -number
    worker.close()


# What it says.


def test_workers_join_and_leave_and_nobody_else_is_told_of(serve: Serve, socket_path: Path) -> None:
    server = serve()
    operate(socket_path)
    assert lamina("status", "--socket", str(socket_path)).returncode == 0
    worker = PageWorker(socket_path, model="tiny llama")
    nbytes = sum(pages.nbytes for pages in worker.pages)
    worker.close()
    eventually(lambda: " left " in server.said)
    said = [line for line in server.said.splitlines() if "lamina.server.sessions" in line]
    of_it = f'label=worker model="tiny llama" device=host kv_bytes={nbytes}'
    who = f"INFO lamina.server.sessions worker (pid {os.getpid()})"
    assert [line.split(" ", 1)[1] for line in said] == [
        f"{who} joined {of_it}",
        f"{who} left {of_it}",
    ]


def test_json_lines(serve: Serve, socket_path: Path) -> None:
    server = serve("--log-json")
    PageWorker(socket_path, model="tiny").close()
    eventually(lambda: " left" in server.said)
    events = [json.loads(line) for line in server.said.splitlines()]
    (joined,) = [event for event in events if event["message"].endswith("joined")]
    assert (joined["level"], joined["model"], joined["device"]) == ("INFO", "tiny", "host")


def test_a_running_servers_level_is_changed(serve: Serve, socket_path: Path) -> None:
    server = serve()
    operate(socket_path)
    said = lamina("log-level", "debug", "--socket", str(socket_path))
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    operate(socket_path)
    eventually(lambda: "DEBUG lamina.server.sessions test (pid" in server.said)
    assert lamina("log-level", "error", "--socket", str(socket_path)).returncode == 0
    worker = PageWorker(socket_path)
    worker.close()
    assert "joined" not in server.said


def test_a_level_that_there_is_not_is_refused(serve: Serve, socket_path: Path) -> None:
    serve()
    said = lamina("log-level", "loud", "--socket", str(socket_path))
    assert said.returncode == 1
    assert said.stderr.startswith("lamina: there is no log level 'loud'. Use DEBUG, INFO")


def test_who_has_not_said_hello_changes_no_level(stranger: Stranger) -> None:
    stranger.greet()
    reply = stranger.ask(protocol.SetLogLevel(1, "debug"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "has not said hello")


@pytest.mark.parametrize("model", ["x" * 257, "x\nERROR all is lost"], ids=["long", "lines"])
def test_a_models_name_is_fit_for_the_log(stranger: Stranger, model: str) -> None:
    stranger.greet()
    assert_refused(stranger.ask(protocol.Hello(1, "e", "l", model)), ErrorCode.BAD_REQUEST, "model")


def test_nonsense_on_the_http_port_is_told_in_the_servers_log(
    socket_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ServerThread(socket_path, http="127.0.0.1:0")
    assert server.server.http_address is not None
    with socket.create_connection(server.server.http_address) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        connection.recv(100)
    server.stop()
    assert "Invalid HTTP request" in caplog.text
    assert capfd.readouterr().err == ""
