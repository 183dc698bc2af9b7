"""Lamina's lines in vLLM's log: all that vLLM's own level lets through, once, where its own are."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from lamina.engines.vllm import LaminaConnector
from lamina.engines.vllm.logs import join_vllm, printable_name, tell_start
from lamina.errors import LaminaError, ServerUnavailableError
from lamina.protocol import MAX_LABEL_CHARS
from lamina.settings import AUTO, WHOLE, ClientSettings
from tests.support.server import ServerThread
from tests.support.wait import PATIENCE_S
from tests.vllm.test_refusals import engine_config

OURS = logging.getLogger("lamina")
THEIRS = logging.getLogger("vllm")


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """Our logger as nobody has configured it, as in an engine's process."""
    former = OURS.handlers, OURS.propagate, OURS.level
    OURS.handlers, OURS.propagate = [], True
    OURS.setLevel(logging.NOTSET)
    yield OURS
    OURS.handlers, OURS.propagate = former[:2]
    OURS.setLevel(former[2])


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What vLLM's handler writes with VLLM_LOGGING_LEVEL=INFO."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setLevel(logging.INFO)
    monkeypatch.setattr(THEIRS, "handlers", [handler])
    monkeypatch.setattr(THEIRS, "propagate", False)
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    level = THEIRS.level
    THEIRS.setLevel(logging.INFO)
    yield text
    THEIRS.setLevel(level)


@pytest.fixture
def root_log() -> Iterator[io.StringIO]:
    """What a handler of the root writes, as an application around vLLM may have."""
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    yield handler.stream
    logging.getLogger().removeHandler(handler)


def say() -> None:
    """A line of each level that matters."""
    log = logging.getLogger("lamina.engines.vllm.planning")
    log.info("a thing")
    log.debug("a decision")


def test_our_lines_are_where_vllms_are_and_nowhere_else(
    ours: logging.Logger, vllm_log: io.StringIO, root_log: io.StringIO
) -> None:
    say()
    assert vllm_log.getvalue() == ""
    join_vllm()
    join_vllm()  # the scheduler's side and the worker's may be in one process
    say()
    assert vllm_log.getvalue() == "a thing\n"
    assert root_log.getvalue() == ""


def test_with_vllms_level_at_debug_decisions_are_shown(
    ours: logging.Logger, vllm_log: io.StringIO
) -> None:
    THEIRS.setLevel(logging.DEBUG)
    THEIRS.handlers[0].setLevel(logging.DEBUG)
    join_vllm()
    say()
    assert vllm_log.getvalue() == "a thing\na decision\n"


def test_a_logger_that_somebody_has_configured_is_left_alone(
    ours: logging.Logger, vllm_log: io.StringIO
) -> None:
    own = logging.NullHandler()
    ours.addHandler(own)
    join_vllm()
    assert (ours.handlers, ours.propagate, ours.level) == ([own], True, logging.NOTSET)


@pytest.mark.parametrize("why", ["told not to", "without handlers"])
def test_where_vllm_configures_no_logging_nor_do_we(
    ours: logging.Logger, vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "told not to":
        monkeypatch.setattr(envs, "VLLM_CONFIGURE_LOGGING", False, raising=False)
    else:
        monkeypatch.setattr(THEIRS, "handlers", [])
    join_vllm()
    assert (ours.handlers, ours.propagate, ours.level) == ([], True, logging.NOTSET)


@pytest.fixture
def config(model: Path, server: ServerThread) -> VllmConfig:
    return engine_config(model, server.settings.socket, {}, {})


def test_an_engines_start_is_told(
    config: VllmConfig,  # first: it configures vLLM's logger
    model: Path,
    server: ServerThread,
    ours: logging.Logger,
    vllm_log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In vLLM's log; and the server knows which model it is."""
    monkeypatch.setattr("lamina.engines.vllm.logs._STATS_WAIT_S", PATIENCE_S)
    path = server.settings.socket
    connector = LaminaConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(6, [], []))
    try:
        models = server.on_loop(lambda: [session.model for session in server.server.sessions])
    finally:
        connector.shutdown()
    line = f"Lamina serves this engine: {path}, arena 0.25 GiB, 0 chunks, layering auto\n"
    assert line in vllm_log.getvalue()
    assert printable_name(str(model)) in models


@pytest.mark.parametrize(
    ("overlap", "layering"), [(AUTO, "auto"), (WHOLE, "off"), (4, "by 4 layers")]
)
def test_a_start_is_not_held_up_by_what_the_server_holds(
    caplog: pytest.LogCaptureFixture, overlap: Any, layering: str
) -> None:
    def ask(request: object, timeout_s: float) -> None:
        assert timeout_s <= 0.05
        raise ServerUnavailableError("the server gave no answer", "Look at its log")

    settings = ClientSettings(socket=Path("/s"), layerwise_overlap=overlap)
    caplog.set_level(logging.INFO, "lamina.engines.vllm.logs")
    tell_start(SimpleNamespace(ask=ask), settings)  # type: ignore[arg-type]
    assert caplog.messages == [f"Lamina serves this engine: /s, layering {layering}"]


def test_a_models_name_is_as_the_server_takes_it() -> None:
    name = printable_name(f"/{'deep/' * 100}a\nmodel")
    assert name.endswith("/deep/a?model")
    assert len(name) == MAX_LABEL_CHARS


def test_a_refusal_before_the_connector_is_made_is_in_vllms_log(
    ours: logging.Logger, vllm_log: io.StringIO
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_attention_free=True))
    with pytest.raises(LaminaError):
        LaminaConnector.get_required_kvcache_layout(config)
    assert "Lamina cannot serve this engine" in vllm_log.getvalue()
