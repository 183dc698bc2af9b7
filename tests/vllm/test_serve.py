"""The OpenAI path as a user takes it: `lamina serve`, vLLM's server, two identical requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ServerProcess
from tests.support.wait import eventually
from tests.vllm.engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    ENVIRONMENT,
    connector_config,
    random_tokens,
)
from tests.vllm.tiny_llama import write_model

START_S = 240.0
PROMPT = " ".join(f"t{token}" for token in random_tokens(200, 60))
HIT = 200 // CHUNK_TOKENS * CHUNK_TOKENS


class OpenAiServer:
    """vLLM's OpenAI server, what `vllm serve` runs, with its engine in processes of its own."""

    def __init__(self, model: Path, lamina_socket: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        options = {
            "--model": str(model),
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--block-size": str(BLOCK_TOKENS),
            "--max-model-len": "1024",
            "--max-num-seqs": "8",
            "--num-gpu-blocks-override": "128",
            "--kv-transfer-config": json.dumps(connector_config(lamina_socket)),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", *(w for o in options.items() for w in o)]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        self._log = (model.parent / "vllm.log").open("w+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                self.call("/health")
            except (urllib.error.URLError, ConnectionError):
                return False
            return True

        eventually(is_healthy, START_S)

    def call(self, path: str, body: dict[str, Any] | None = None) -> str:
        """GET, or POST with a body; returns the answer's text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    def complete(self, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
        answer: dict[str, Any] = json.loads(self.call("/v1/completions", body))
        return answer

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith(name)]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self._log.close()


@pytest.fixture
def lamina(socket_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(socket_path, "--arena", "64MiB", "--chunk-tokens", str(CHUNK_TOKENS))
    server.wait_until_filled()
    yield server
    server.stop()


@pytest.fixture
def vllm_server(tmp_path: Path, lamina: ServerProcess) -> Iterator[OpenAiServer]:
    model = write_model(tmp_path / "model", with_tokenizer=True)
    server = OpenAiServer(model, lamina.socket)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def test_second_identical_request_is_a_hit(vllm_server: OpenAiServer) -> None:
    """Visible where a user looks: in the answer's usage and in vLLM's metrics."""

    def cached_tokens(answer: dict[str, Any]) -> int:
        return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    first = vllm_server.complete()
    assert cached_tokens(first) == 0
    stored = "vllm:lamina_stored_chunks_total"
    eventually(lambda: vllm_server.metric(stored) == HIT // CHUNK_TOKENS)
    eventually(lambda: "true" in vllm_server.call("/reset_prefix_cache", {}).lower())

    second = vllm_server.complete()
    assert cached_tokens(second) == HIT
    assert second["choices"][0]["text"] == first["choices"][0]["text"] != ""
    eventually(lambda: vllm_server.metric("vllm:lamina_retrieved_tokens_total") == HIT)
    assert vllm_server.metric("vllm:lamina_retrieves_total") == 1
    assert vllm_server.metric("vllm:lamina_failed_total") == 0
    eventually(lambda: vllm_server.metric("vllm:lamina_retrieved_bytes_total") > 0)
    eventually(lambda: vllm_server.metric("vllm:lamina_copies_total") > 0)
    assert vllm_server.metric("vllm:external_prefix_cache_hits_total") == HIT

    forced = {"lamina.layerwise_overlap": 3, "lamina.release_after_slices": 0}
    vllm_server.call("/reset_prefix_cache", {})
    third = vllm_server.complete(kv_transfer_params=forced)
    assert cached_tokens(third) == HIT
    assert third["choices"][0]["text"] == first["choices"][0]["text"]
    log = vllm_server.log()
    assert "Traceback" not in log, log
