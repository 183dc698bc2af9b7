"""Server and engine of several users, sockets that get lost, descriptors that run out: whole
servers and clients."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamina import protocol
from lamina.cli.app import app
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ErrorCode, RequestRefusedError
from lamina.server import endpoint
from lamina.settings import ClientSettings
from tests.support.server import ServerProcess, ServerThread, connected_client
from tests.support.users import OTHER_STRANGER, STRANGER, StrangersServer, as_user, needs_root
from tests.support.wait import PATIENT, eventually

ME = os.geteuid()


def client_at(path: Path) -> Client:
    settings = {**PATIENT, "reconnect_every_ms": 1}
    return Client(ClientSettings(socket=path, **settings), HostWorkerDevice(), "an engine")


def is_usable(client: Client) -> bool:
    client.poll()
    return client.is_usable


def stats(client: Client) -> dict[str, float]:
    reply = client.ask(protocol.GetStats)
    assert isinstance(reply, protocol.Stats)
    return reply.values


# Users.


@needs_root
def test_an_engine_goes_on_without_a_strangers_server_until_it_finds_its_own(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stranger was first to make the directory, as in /tmp anybody may be."""
    caplog.set_level(logging.INFO, "lamina.client.client")
    stranger = StrangersServer(socket_path)
    client = client_at(socket_path)
    client.try_connect()
    for _ in range(3):  # each attempt is turned down by the client
        assert stranger.next_told() == ""
        client._next_attempt_s = 0.0
        client.poll()
    assert not client.is_usable
    stranger.stop()
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"goes on without a cache: the server at {socket_path} is of user {STRANGER}" in said
    shutil.rmtree(socket_path.parent)
    server = ServerThread(socket_path, arena_bytes=1 << 20)
    eventually(lambda: is_usable(client))
    client.close()
    server.stop()


@pytest.fixture
def shared_path(socket_path: Path) -> Path:
    """A socket's path that other users may come to."""
    socket_path.parent.parent.chmod(0o711)
    return socket_path


def ask(path: Path, server_uid: int | None) -> str:
    client = connected_client(path, server_uid=server_uid)
    try:
        return type(client.ask(protocol.Ping)).__name__
    finally:
        client.close()


def status(path: Path, *options: str) -> str:
    """What `lamina status` prints, or its error."""
    given = ["status", "--json", "--socket", str(path), *options]
    said = CliRunner().invoke(app, given)
    return str(said.exception or said.output)


@needs_root
def test_a_server_takes_the_users_that_it_allows_and_no_others(shared_path: Path) -> None:
    server = ServerProcess(
        shared_path, "--arena", "1MiB", "--allow-uid", str(STRANGER), "--allow-uid", "1"
    )
    server.wait_until_serving()
    try:
        assert as_user(STRANGER, lambda: ask(shared_path, ME)) == "Pong"
        assert as_user(1, lambda: ask(shared_path, ME)) == "Pong"
        assert ask(shared_path, None) == "Pong"
        said = as_user(OTHER_STRANGER, lambda: ask(shared_path, ME))
        assert said.startswith("RequestRefusedError"), said
        assert f"user {OTHER_STRANGER} may not use a server of user {ME}" in said
        assert f"--allow-uid {OTHER_STRANGER}" in said
        said = as_user(STRANGER, lambda: ask(shared_path, None))
        assert said.startswith("UntrustedServerError"), said
        assert f"is of user {ME}, not of user {STRANGER}" in said
        assert '"chunks": 0' in status(shared_path)  # imports what a stranger may not read
        said = as_user(STRANGER, lambda: status(shared_path, "--server-uid", str(ME)))
        assert '"chunks": 0' in said, said
        said = as_user(STRANGER, lambda: status(shared_path))
        assert "--server-uid" in said, said
    finally:
        server.stop()


@needs_root
def test_a_server_that_allows_nobody_cannot_be_reached_by_others(shared_path: Path) -> None:
    server = ServerThread(shared_path, arena_bytes=1 << 20)
    try:
        for mode in (0o700, 0o711):  # the socket alone keeps others out as well
            shared_path.parent.chmod(mode)
            said = as_user(STRANGER, lambda: ask(shared_path, ME))
            assert said.startswith("ServerUnavailableError"), said
            assert f"user {STRANGER} may not connect to {shared_path}" in said
            assert f"--allow-uid {STRANGER} and set lamina.server_uid" in said
    finally:
        server.stop()


# A socket that gets lost.


def test_a_server_whose_socket_is_gone_says_so_serves_on_and_spares_its_successor(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when logind, or somebody who tidies up, removes a runtime directory."""
    monkeypatch.setattr(endpoint, "CHECK_EVERY_S", 0.001)
    first = ServerThread(socket_path, arena_bytes=1 << 20)
    client = connected_client(socket_path)
    assert first.gauges()["socket_lost"] == 0
    shutil.rmtree(socket_path.parent)
    eventually(lambda: first.gauges()["socket_lost"] == 1)
    second = ServerThread(socket_path, arena_bytes=1 << 20)
    assert stats(client)["socket_lost"] == 1
    client.close()
    first.stop()
    connected_client(socket_path).close()
    assert second.gauges()["socket_lost"] == 0
    second.stop()
    assert not socket_path.exists()
    (error,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert f"{socket_path} is gone" in error.getMessage()


# Descriptors that run out.


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(socket_path, "--arena", "1MiB")
    server.wait_until_serving()
    connected_client(socket_path).close()
    yield server
    server.stop()


def leave_descriptors(pid: int, count: int) -> None:
    """Let process `pid` open so many files and no more."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = [fd for fd in range(max(taken) + count + 2) if fd not in taken]
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest[count], hard))


@pytest.mark.parametrize("left", [1, 2, 3], ids=["peer", "board", "mapping"])
def test_a_server_without_descriptors_is_busy_until_it_has_some(
    server: ServerProcess, socket_path: Path, left: int
) -> None:
    """A session takes four: the connection, its peer's pidfd, the board and its mapping."""
    pid = server.process.pid
    before = connected_client(socket_path)
    eventually(lambda: stats(before)["sessions"] == 0)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    leave_descriptors(pid, left)
    client = client_at(socket_path)
    for _ in range(3):
        with pytest.raises(
            RequestRefusedError, match=r"no file descriptors left.*`ulimit -n`"
        ) as no:
            client.connect()
        assert no.value.code is ErrorCode.BUSY
    assert isinstance(before.ask(protocol.Ping), protocol.Pong)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: is_usable(client))
    assert stats(client)["sessions"] == 1
    client.close()
    before.close()


def test_a_place_that_becomes_free_is_taken(server: ServerProcess, socket_path: Path) -> None:
    first = connected_client(socket_path)
    eventually(lambda: stats(first)["sessions"] == 0)
    leave_descriptors(server.process.pid, 5)
    second = connected_client(socket_path)
    third = client_at(socket_path)
    with pytest.raises(RequestRefusedError, match="no file descriptors left"):
        third.connect()
    second.close()
    eventually(lambda: is_usable(third))
    third.close()
    first.close()
