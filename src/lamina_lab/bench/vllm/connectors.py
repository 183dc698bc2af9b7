"""The caches that are compared: Lamina, vLLM's own offloading, LMCache, none."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina import protocol
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import LaminaError, SettingsError
from lamina.settings import ClientSettings
from lamina_lab.bench.processes import private_socket, started_server, wait_until_filled
from lamina_lab.bench.vllm.models import SEEDED, Model

CONNECTORS = ("lamina", "none", "offloading", "offloading-v2", "lmcache")
_LMCACHE_PORT = 5555
_LMCACHE_PATIENCE_S = 180.0


class Cache:
    """A cache beside the engine: `config` is vLLM's `kv_transfer_config`."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        self.config = config

    def wait_until_ready(self) -> None:
        """Return once all of its memory is there."""

    def counts(self) -> dict[str, float]:
        """The server's own counts, where it has a server of ours."""
        return {}

    def clear(self) -> None:
        """Forget all chunks, where there is a server of ours. No request may run."""


class LaminaCache(Cache):
    """`lamina serve` on a socket of its own."""

    def __init__(self, server: Path, process: subprocess.Popen[str], model: Model) -> None:
        settings: dict[str, Any] = {
            "lamina.socket": str(server),
            "lamina.chunk_tokens": model.chunk_tokens,
            "lamina.model_id": SEEDED,
        }
        if model.patient:
            settings |= {"lamina.suspect_after_ms": 5000, "lamina.lookup_timeout_ms": 5000}
        super().__init__(
            {
                "kv_connector": "LaminaConnector",
                "kv_connector_module_path": "lamina.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings,
            }
        )
        self._server = server
        self._process = process

    def wait_until_ready(self) -> None:
        wait_until_filled(self._server, self._process)

    def counts(self) -> dict[str, float]:
        stats = self._ask(protocol.GetStats)
        assert isinstance(stats, protocol.Stats)
        return dict(stats.values)

    def clear(self) -> None:
        self._ask(protocol.Clear)

    def _ask(self, message: Any) -> Any:
        client = Client(ClientSettings(socket=self._server), HostWorkerDevice(), "benchmark")
        try:
            client.connect()
            return client.ask(message)
        finally:
            client.close()


@contextmanager
def cache_of(connector: str, model: Model) -> Iterator[Cache]:
    """Start what `connector` needs. Raises `SettingsError` for one that is not here."""
    if connector == "none":
        yield Cache(None)
    elif connector == "lamina":
        options = ("--arena", str(model.arena_bytes), "--chunk-tokens", str(model.chunk_tokens))
        with private_socket() as path, started_server(path, *options) as process:
            yield LaminaCache(path, process, model)
    elif connector in ("offloading", "offloading-v2"):
        extra = {"cpu_bytes_to_use": model.arena_bytes, "block_size": model.chunk_tokens}
        yield Cache(_config("OffloadingConnector", extra))
    elif connector == "lmcache":
        with _lmcache_server(model):
            lmcache: dict[str, Any] = {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": _LMCACHE_PORT,
            }
            yield Cache(_config("LMCacheMPConnector", lmcache))
    else:
        raise SettingsError(f"there is no connector {connector!r}", f"Use {', '.join(CONNECTORS)}")


def runner_of(connector: str) -> str | None:
    """The model runner that a connector is to be measured with; None: vLLM's default."""
    return {"offloading": "V1", "offloading-v2": "V2"}.get(connector)


def _config(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}


@contextmanager
def _lmcache_server(model: Model) -> Iterator[None]:
    """LMCache's multiprocess server, where its package is installed."""
    if importlib.util.find_spec("lmcache") is None:
        raise SettingsError("LMCache is not installed", "pip install lmcache")
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"]
    command += ["--l1-size-gb", str(model.arena_bytes >> 30), "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(model.chunk_tokens), "--no-l1-use-lazy"]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        until_s = time.monotonic() + _LMCACHE_PATIENCE_S
        while not _takes_connections(_LMCACHE_PORT):
            if process.poll() is not None or time.monotonic() > until_s:
                raise LaminaError("LMCache's server did not start", "Its error is above")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
