"""Fixtures of the tests against the real vLLM; without vLLM installed they are not collected.

An engine starts once a module. Each test gets it with nothing to hit in it, and leaves it and the
server with nothing held.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ServerThread
from tests.vllm.engine import ENVIRONMENT, Engine
from tests.vllm.tiny_llama import write_model

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(ENVIRONMENT)
    # With a handler of its own the logger is left as it is, and pytest sees its lines.
    logging.getLogger("lamina").addHandler(logging.NullHandler())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM and torch warn about is not ours
        importlib.import_module("lamina.engines.vllm.connector")
        importlib.import_module("vllm.model_executor.layers.attention")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nor is it later on."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What files hold is remembered here, not in the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def module_socket() -> Iterator[Path]:
    """A path for the socket of the module's server; short."""
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        yield Path(directory) / "run" / "lamina.sock"


@pytest.fixture(scope="module")
def module_server(module_socket: Path) -> Iterator[ServerThread]:
    thread = ServerThread(module_socket, arena_bytes=256 << 20)
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def module_engine(model: Path, module_server: ServerThread) -> Iterator[Engine]:
    engine = Engine(model, module_server.settings.socket)
    yield engine
    engine.close()


@pytest.fixture
def server(module_server: ServerThread) -> Iterator[ServerThread]:
    """The module's server with open valves, now and afterwards."""
    yield module_server
    for valve in (module_server.device.retrieves, module_server.device.stores):
        valve.heal()
        valve.open()


@pytest.fixture
def engine(module_engine: Engine, server: ServerThread) -> Iterator[Engine]:
    """The module's engine: nothing can hit in it; in the end nothing may be held."""
    module_engine.forget()
    yield module_engine
    for valve in (server.device.retrieves, server.device.stores):
        valve.heal()
        valve.open()
    module_engine.end_requests()
    module_engine.assert_idle(server)
