"""The HTTP port: what it tells, when it is there, and nonsense that is sent to it."""

from __future__ import annotations

import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import protocol
from lamina.server.listener import Listener
from lamina.server.main import Server
from tests.e2e.strangers import BLOCKS, GEOMETRY, Stranger
from tests.support.server import ServerThread, connected_client
from tests.support.wait import PATIENCE_S
from tests.support.worker import PageWorker


@pytest.fixture
def url(socket_path: Path) -> Iterator[str]:
    server = ServerThread(socket_path, arena_bytes=1 << 20, http="127.0.0.1:0")
    assert server.server.http_address is not None
    host, port = server.server.http_address
    yield f"http://{host}:{port}"
    server.stop()


def get(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_status_and_health(url: str, socket_path: Path) -> None:
    worker = PageWorker(socket_path, GEOMETRY, BLOCKS)
    worker.store_new(3)
    stranger = Stranger(socket_path)
    stranger.greet()
    stranger.ask(protocol.Clear(1))
    assert get(f"{url}/healthz") == (200, "ok\n")
    code, text = get(f"{url}/metrics")
    assert code == 200
    lines = text.splitlines()
    for line in (
        "lamina_chunks 3.0",
        "lamina_stores_total 1.0",
        'lamina_refused_total{code="bad_request"} 1.0',
    ):
        assert line in lines
    code, text = get(f"{url}/status")
    values = json.loads(text)
    assert (code, values["version"], values["chunks"]) == (200, lamina.__version__, 3)
    assert values["refused"] == {"bad_request": 1}
    stranger.close()
    worker.close()


def test_nonsense_on_the_http_port(url: str, socket_path: Path) -> None:
    assert get(f"{url}/nonsense")[0] == 404
    assert get(f"{url}/metrics", "POST")[0] == 405
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(random.Random(4).randbytes(1000) + b"\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    with socket.create_connection((host, int(port))):
        assert get(f"{url}/healthz") == (200, "ok\n")
        connected_client(socket_path).close()


def test_a_port_is_bound_before_the_socket_can_be_connected_to(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    bind, listen = Server._serve_http, Listener.open

    async def note_port(server: Server, *arguments: Any) -> None:
        await bind(server, *arguments)
        order.append("port")

    def note_socket(listener: Listener) -> None:
        order.append("socket")
        listen(listener)

    monkeypatch.setattr(Server, "_serve_http", note_port)
    monkeypatch.setattr(Listener, "open", note_socket)
    ServerThread(socket_path, arena_bytes=1 << 20, http="127.0.0.1:0").stop()
    assert order == ["port", "socket"]


def test_the_port_can_be_one_of_ipv6(socket_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = ServerThread(socket_path, arena_bytes=1 << 20, http="[::1]:0")
    assert server.server.http_address is not None
    host, port = server.server.http_address
    assert get(f"http://[{host}]:{port}/healthz") == (200, "ok\n")
    server.stop()
