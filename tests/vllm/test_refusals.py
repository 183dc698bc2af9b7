"""Bad input: one clear line that names the cause and the remedy, no hang, no bare stack trace.

What is wrong with the engine's own settings stops it at its start; what is wrong with the server
does not: the engine serves without a cache. The connector is made with vLLM's real configuration,
but no model is loaded.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from lamina import protocol
from lamina.engines.vllm import LaminaConnector
from lamina.errors import LaminaError
from tests.support.server import ServerProcess, ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import BLOCK_TOKENS, connector_config

BLOCKS = 6
Start = Callable[..., LaminaConnector]


def engine_config(
    model: Path, socket_path: Path, transfer: dict[str, Any], settings: dict[str, Any], **args: Any
) -> VllmConfig:
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        enforce_eager=True,
        kv_transfer_config={**connector_config(socket_path, **settings), **transfer},
        **args,
    ).create_engine_config()


@pytest.fixture
def start(model: Path, socket_path: Path) -> Iterator[Start]:
    """Make one side of a connector, as vLLM does at its start."""
    made: list[LaminaConnector] = []

    def make(
        role: KVConnectorRole = KVConnectorRole.SCHEDULER,
        transfer: dict[str, Any] | None = None,
        change: Callable[[VllmConfig], None] = lambda _: None,
        settings: dict[str, Any] | None = None,
        **args: Any,
    ) -> LaminaConnector:
        config = engine_config(model, socket_path, transfer or {}, settings or {}, **args)
        change(config)
        made.append(LaminaConnector(config, role, KVCacheConfig(BLOCKS, [], [])))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lamina's lines since the last call, from the engine's side."""
    names = ("lamina.client", "lamina.engines")
    lines = [r.getMessage() for r in caplog.records if r.name.startswith(names)]
    caplog.clear()
    return lines


def check_refused(
    caplog: pytest.LogCaptureFixture, start: Callable[[], Any], cause: str, remedy: str
) -> None:
    """`start` fails with one line that names both."""
    with pytest.raises(LaminaError) as error:
        start()
    (line,) = said(caplog)
    assert line == f"Lamina cannot serve this engine: {error.value}"
    assert "\n" not in line
    assert cause in line
    assert remedy in line


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_role_other_than_both(start: Start, caplog: pytest.LogCaptureFixture, role: str) -> None:
    make = lambda: start(transfer={"kv_role": role})  # noqa: E731
    check_refused(caplog, make, role, '"kv_role":"kv_both"')


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    ],
)
def test_parallelism(
    start: Start, caplog: pytest.LogCaptureFixture, args: dict[str, Any], cause: str
) -> None:
    check_refused(caplog, lambda: start(**args), cause, "one GPU per engine")


def test_prefix_caching_off(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(enable_prefix_caching=False)  # noqa: E731
    check_refused(caplog, make, "prefix caching is off", "--enable-prefix-caching")


def test_speculative_decoding(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    make = lambda: start(speculative_config=ngram)  # noqa: E731
    check_refused(caplog, make, "speculative decoding is on", "start without it")


def test_recompute_policy(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(transfer={"kv_load_failure_policy": "recompute"})  # noqa: E731
    check_refused(caplog, make, "'recompute'", "use 'fail'")


def test_unknown_setting(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(settings={"layerwise_overlp": 1})  # noqa: E731
    check_refused(
        caplog, make, "'lamina.layerwise_overlp'", "Did you mean lamina.layerwise_overlap?"
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("layerwise_overlap", "yes", "a number of layers"),
        ("layerwise_overlap", -1, "whole transfers"),
        ("held_blocks_share", 2, "from 0 to 1"),
        ("lookup_timeout_ms", "soon", "Correct its type"),
        ("socket", "/tmp/" + "x" * 200, "shorter path"),
    ],
)
def test_malformed_setting(
    start: Start, caplog: pytest.LogCaptureFixture, name: str, value: object, remedy: str
) -> None:
    cause = "socket path" if name == "socket" else name
    check_refused(caplog, lambda: start(settings={name: value}), cause, remedy)


def test_layers_of_a_slice_beyond_the_model(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    worker = start(KVConnectorRole.WORKER, settings={"layerwise_overlap": 3})
    caches = {f"layers.{i}": torch.zeros(BLOCKS, BLOCK_TOKENS, 8) for i in range(2)}
    make = lambda: worker.register_kv_caches(caches)  # noqa: E731
    check_refused(caplog, make, "layerwise_overlap is 3", "Use 1 to 2")


@pytest.mark.parametrize(
    ("cache", "cause", "remedy"),
    [
        (torch.zeros(BLOCKS, BLOCK_TOKENS, 2, 16)[..., :8], "not contiguous", "KV layout"),
        (torch.zeros(BLOCKS + 1, BLOCK_TOKENS, 8), "no dimension", "another"),
        ([torch.zeros(BLOCKS, 8)], "several tensors", "without Lamina"),
    ],
    ids=["block-in-parts", "other-block-count", "state-space"],
)
def test_kv_that_cannot_be_represented(
    start: Start, caplog: pytest.LogCaptureFixture, cache: Any, cause: str, remedy: str
) -> None:
    worker = start(KVConnectorRole.WORKER)
    make = lambda: worker.register_kv_caches({"layers.0": cache})  # noqa: E731
    check_refused(caplog, make, cause, remedy)


def test_chunk_size_that_blocks_do_not_divide(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(KVConnectorRole.WORKER, settings={"chunk_tokens": 80})
    caches = {"layers.0": torch.zeros(BLOCKS, BLOCK_TOKENS, 8)}
    make = lambda: worker.register_kv_caches(caches)  # noqa: E731
    check_refused(caplog, make, "chunk of 80", "multiple of every block size")


def test_server_of_another_chunk_size(
    start: Start, server_of_128: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    check_refused(caplog, start, "128", "Set both to the same number")


@pytest.fixture
def server_of_128(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path, chunk_tokens=128)
    yield thread
    thread.stop()


def check_serves_without_cache(
    caplog: pytest.LogCaptureFixture, connector: LaminaConnector, cause: str, remedy: str
) -> None:
    """One line was said, and no other while the client tries again and again."""
    client: Any = connector._scheduler.client  # type: ignore[union-attr]
    assert not client.is_usable
    tried = 0
    begin = client._reconnect

    def try_again() -> None:
        nonlocal tried
        tried += 1
        begin()

    client._reconnect = try_again

    def is_tried_thrice() -> bool:
        client.poll()
        return tried >= 3

    eventually(is_tried_thrice)
    (line,) = said(caplog)
    assert "without a cache" in line
    assert cause in line
    assert remedy in line


def test_server_absent(start: Start, socket_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    connector = start(settings={"reconnect_every_ms": 1})
    check_serves_without_cache(caplog, connector, str(socket_path), "`lamina serve`")


def test_server_of_another_protocol(
    start: Start,
    socket_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ServerProcess(socket_path, "--arena", "16MiB", "--chunk-tokens", "64")
    try:
        server.wait_until_serving()
        monkeypatch.setattr(protocol, "VERSION", protocol.VERSION + 1)
        connector = start(settings={"reconnect_every_ms": 1})
        speaks = f"protocol {protocol.VERSION}"
        check_serves_without_cache(caplog, connector, speaks, "same Lamina version")
    finally:
        server.stop()


def test_server_that_never_answers(
    start: Start, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start is late by the connection time-out, and no more."""
    socket_path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(socket_path))
        listening.listen(16)
        connector = start(settings={"connect_timeout_ms": 100, "reconnect_every_ms": 1})
        (line,) = said(caplog)
        assert "did not answer in 0.1 s" in line
        assert not connector._scheduler.client.is_usable  # type: ignore[union-attr]
