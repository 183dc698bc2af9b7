"""Bad input: one clear line that names the cause and the remedy, no hang, no bare stack trace.

What is wrong with the engine's own settings stops it at its start; what is wrong with the server
does not: the engine serves without a cache. The connector is made with vLLM's real configuration,
but no model is loaded.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig

from lamina import protocol
from lamina.engines.vllm import LaminaConnector
from lamina.errors import LaminaError
from lamina.linux import Peer, peer_of
from tests.support.server import ServerProcess, ServerThread
from tests.support.wait import eventually
from tests.vllm.engine import BLOCK_TOKENS, connector_config
from tests.vllm.scheduler_harness import HANDS_OVER_MANAGER

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
        kv_transfer_config={
            **connector_config(socket_path, **{"model_id": "any", **settings}),
            **transfer,
        },
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


def hooked(names: Iterable[str]) -> Callable[[VllmConfig], None]:
    """The engine has attention layers of these names."""

    def change(config: VllmConfig) -> None:
        layers = {name: Attention.__new__(Attention) for name in names}
        config.compilation_config.static_forward_context.update(layers)

    return change


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_role_other_than_both(start: Start, caplog: pytest.LogCaptureFixture, role: str) -> None:
    make = lambda: start(transfer={"kv_role": role})  # noqa: E731
    check_refused(caplog, make, role, '"kv_role":"kv_both"')


def test_pipeline_parallelism_that_nobody_asked_for(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    make = lambda: start(pipeline_parallel_size=2)  # noqa: E731
    check_refused(caplog, make, "pipeline_parallel_size is 2", "lamina.pipeline_parallel")
    if HANDS_OVER_MANAGER:
        start(pipeline_parallel_size=2, settings={"pipeline_parallel": True})


def having(**fields: Any) -> Callable[[VllmConfig], None]:
    """The engine's ranks are arranged so, whatever this platform says to it."""

    def change(config: VllmConfig) -> None:
        for name, value in fields.items():
            setattr(config.parallel_config, name, value)

    return change


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism(start: Start, caplog: pytest.LogCaptureFixture, name: str) -> None:
    make = lambda: start(change=having(**{name: 2}))  # noqa: E731
    check_refused(caplog, make, "context parallelism is on", "switch it off")


def test_micro_batches(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(change=having(enable_dbo=True))  # noqa: E731
    check_refused(caplog, make, "micro-batches", "start without --enable-dbo")


def test_ranks_that_would_wait_for_too_long(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM ends the engine when a step takes 300 s."""
    change = having(tensor_parallel_size=2)
    make = lambda: start(change=change, settings={"retrieve_timeout_ms": 90_000})  # noqa: E731
    if HANDS_OVER_MANAGER:
        check_refused(caplog, make, "retrieve_timeout_ms is 90000", "use 60000 at most")
        start(settings={"retrieve_timeout_ms": 90_000})


def test_ranks_of_a_vllm_that_gives_no_other_blocks(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.engines.vllm.connector._HANDS_OVER_MANAGER", False)
    make = lambda: start(change=having(tensor_parallel_size=2))  # noqa: E731
    check_refused(caplog, make, "this engine has several ranks", "use vLLM 0.32 or newer")


def test_prefix_caching_off(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(enable_prefix_caching=False)  # noqa: E731
    check_refused(caplog, make, "prefix caching is off", "--enable-prefix-caching")


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}


def speculative(**fields: object) -> Callable[[VllmConfig], None]:
    """The engine speculates, so much unlike `NGRAM` as no model here allows."""

    def change(config: VllmConfig) -> None:
        for name, value in fields.items():
            object.__setattr__(config.speculative_config, name, value)

    return change


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
def test_speculative_decoding_by_ngrams(start: Start) -> None:
    start(speculative_config=NGRAM)


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "extract_hidden_states"]
)
def test_a_drafter_that_has_kv(start: Start, caplog: pytest.LogCaptureFixture, method: str) -> None:
    make = lambda: start(speculative_config=NGRAM, change=speculative(method=method))  # noqa: E731
    check_refused(caplog, make, f"speculative decoding with {method!r} is on", "drafter's KV lies")


@pytest.mark.parametrize(
    "method", ["ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class", "new"]
)
def test_a_drafter_that_is_not_proven(
    start: Start, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    make = lambda: start(speculative_config=NGRAM, change=speculative(method=method))  # noqa: E731
    cause = f"speculative decoding with {method!r} is on"
    check_refused(caplog, make, cause, "use 'ngram', or start without it")


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
@pytest.mark.parametrize("sampling", ["synthetic", "block"])
def test_another_way_to_accept_drafts(
    start: Start, caplog: pytest.LogCaptureFixture, sampling: str
) -> None:
    change = speculative(rejection_sample_method=sampling)
    make = lambda: start(speculative_config=NGRAM, change=change)  # noqa: E731
    check_refused(caplog, make, f"rejection_sample_method is {sampling!r}", "use 'standard'")


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
def test_as_many_drafts_as_the_batch_leaves_room_for(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    change = speculative(num_speculative_tokens_per_batch_size=[(1, 8, 2)])
    make = lambda: start(speculative_config=NGRAM, change=change)  # noqa: E731
    check_refused(caplog, make, "per_batch_size is set", "use num_speculative_tokens alone")


@pytest.mark.skipif(not HANDS_OVER_MANAGER, reason="refused before vLLM 0.32")
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_speculation_of_several_ranks(
    start: Start, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    change = setting("parallel_config", f"{kind}_parallel_size", 2)
    make = lambda: start(speculative_config=NGRAM, change=change)  # noqa: E731
    check_refused(caplog, make, "'ngram' is on with several ranks", "use one rank")


def test_speculation_with_an_older_vllm(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.engines.vllm.connector._HANDS_OVER_MANAGER", False)
    make = lambda: start(speculative_config=NGRAM)  # noqa: E731
    check_refused(caplog, make, "speculative decoding with 'ngram' is on", "Use vLLM 0.32")


def test_recompute_policy(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: start(transfer={"kv_load_failure_policy": "recompute"})  # noqa: E731
    check_refused(caplog, make, "'recompute'", "use 'fail'")


@pytest.mark.parametrize(
    ("transfer", "cause"),
    [
        ({"kv_role": "kv_producer"}, "kv_role of MultiConnector is 'kv_producer'"),
        ({"kv_load_failure_policy": "recompute"}, "of MultiConnector is 'recompute'"),
    ],
)
def test_what_vllm_acts_on_where_we_are_one_of_several(
    model: Path, caplog: pytest.LogCaptureFixture, transfer: dict[str, Any], cause: str
) -> None:
    """A MultiConnector hands us a configuration of our own; vLLM acts on the whole one."""

    def make() -> None:
        config = engine_config(model, Path("/tmp/none"), {}, {})
        whole = copy.copy(config)
        whole.kv_transfer_config = KVTransferConfig(
            **{"kv_connector": "MultiConnector", "kv_role": "kv_both", **transfer}
        )
        with set_current_vllm_config(whole):
            LaminaConnector(config, KVConnectorRole.WORKER, KVCacheConfig(BLOCKS, [], []))

    check_refused(caplog, make, cause, "use 'fail'" if "recompute" in cause else "kv_both")


def setting(place: str, name: str, value: object) -> Callable[[VllmConfig], None]:
    return lambda config: object.__setattr__(getattr(config, place), name, value)


@pytest.mark.parametrize(
    ("place", "name", "value", "cause"),
    [
        ("cache_config", "calculate_kv_scales", True, "calculated from the first requests"),
        ("cache_config", "cache_dtype", "int8_per_token_head", "'int8_per_token_head'"),
        ("cache_config", "kv_sharing_fast_prefill", True, "fast prefill"),
        ("model_config", "enable_sleep_mode", True, "sleep mode is on"),
        ("model_config", "hf_overrides", {"quantization_config_file": "f"}, "config_file"),
        ("attention_config", "hisparse_config", object(), "hisparse_config"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
    ],
)
def test_settings_whose_kv_no_key_can_tell(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    place: str,
    name: str,
    value: object,
    cause: str,
) -> None:
    check_refused(caplog, lambda: start(change=setting(place, name, value)), cause, "")


@pytest.mark.parametrize("name", ["diffusion_config", "ec_transfer_config"])
def test_parts_of_vllm_whose_kv_no_key_can_tell(
    start: Start, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change = lambda config: object.__setattr__(config, name, object())  # noqa: E731
    check_refused(caplog, lambda: start(change=change), "", "without")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"mm_encoder_fp8_scale_path": "/scales"}, "mm_encoder_fp8_scale_path"),
        ({"mm_encoder_attn_dtype": "fp8"}, "mm_encoder_attn_dtype"),
    ],
)
def test_scales_of_encoders(
    start: Start, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], cause: str
) -> None:
    multimodal = SimpleNamespace(
        **{"mm_encoder_fp8_scale_path": None, "mm_encoder_attn_dtype": None, **changes}
    )
    change = setting("model_config", "multimodal_config", multimodal)
    check_refused(caplog, lambda: start(change=change), cause, "")


def test_a_variable_that_names_a_file(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quant.json").write_text("{}")
    monkeypatch.setenv("VLLM_HUMMING_INPUT_QUANT_CONFIG", str(tmp_path / "quant.json"))
    check_refused(caplog, start, "VLLM_HUMMING_INPUT_QUANT_CONFIG names a file", "model's own")


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
    caches = {f"layers.{i}": torch.zeros(BLOCKS, BLOCK_TOKENS, 8) for i in range(2)}
    settings = {"layerwise_overlap": 3}
    worker = start(KVConnectorRole.WORKER, settings=settings, change=hooked(caches))
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


def test_server_without_room(
    start: Start,
    socket_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too many connections, or no descriptors left: not this engine's fault."""
    monkeypatch.setattr("lamina.server.main.MAX_SESSIONS", 0)
    server = ServerThread(socket_path)
    try:
        connector = start(settings={"reconnect_every_ms": 1})
        check_serves_without_cache(caplog, connector, "are served already", "Close some")
    finally:
        server.stop()


def test_server_of_another_user(
    start: Start,
    socket_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ServerThread(socket_path)

    def peer_of_another(sock: socket.socket) -> Peer:
        return peer_of(sock)._replace(uid=os.geteuid() + 1)

    monkeypatch.setattr("lamina.client.connection.peer_of", peer_of_another)
    try:
        connector = start(settings={"reconnect_every_ms": 1})
        other = f"is of user {os.geteuid() + 1}"
        check_serves_without_cache(caplog, connector, other, "lamina.server_uid")
    finally:
        server.stop()


def test_server_that_never_answers(
    start: Start, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start is late by the connection time-out, and no more."""
    socket_path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(socket_path))
        listening.listen(16)
        connector = start(settings={"connect_timeout_ms": 100, "reconnect_every_ms": 1})
        (line,) = said(caplog)
        assert "did not answer in 0.1 s" in line
        assert not connector._scheduler.client.is_usable  # type: ignore[union-attr]
