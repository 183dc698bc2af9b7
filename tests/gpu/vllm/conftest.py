"""One engine and one server for all tests of a run: `LAMINA_VLLM_RUNNER` (V1, V2) and
`LAMINA_VLLM_ASYNC` (0, 1) say which vLLM, `LAMINA_VLLM_MODEL` which model.
`scripts/gpu/test_vllm.sh` runs all of them.

Without a GPU the tests are skipped; `LAMINA_VLLM_ON_CPU=1` runs them on vLLM's CPU build instead.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.vllm.engine import ON_GPU, Configuration, GpuEngine, ValvedServer, modes
from tests.gpu.vllm.valved_server import split_records
from tests.vllm.engine import ENVIRONMENT

MODES = list(modes(1))


def why_not() -> str | None:
    """The reason why these tests cannot run here."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if not ON_GPU:
        return None
    import torch

    return None if torch.cuda.is_available() else "there is no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's and torch's are not ours
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def configuration() -> Configuration:
    return Configuration(
        os.environ.get("LAMINA_VLLM_RUNNER", "V2"),
        os.environ.get("LAMINA_VLLM_ASYNC", "1") == "1",
        ON_GPU,
        os.environ.get("LAMINA_VLLM_MODEL", "small"),
    )


@pytest.fixture(scope="session")
def the_server(configuration: Configuration) -> Iterator[ValvedServer]:
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        split_records()
        socket = Path(directory) / "run" / "lamina.sock"
        server = ValvedServer(socket, "cuda" if configuration.on_gpu else "host")
        yield server
        server.stop()


@pytest.fixture(scope="session")
def the_engine(
    configuration: Configuration,
    the_server: ValvedServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GpuEngine]:
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1" if configuration.runner == "V2" else "0"}
    os.environ.update({**ENVIRONMENT, **environment})
    model = configuration.model.write(tmp_path_factory.mktemp("model"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = GpuEngine(configuration, model, the_server.socket)
    yield engine
    engine.close()


@pytest.fixture
def server(the_server: ValvedServer) -> ValvedServer:
    return the_server


@pytest.fixture
def engine(the_engine: GpuEngine, server: ValvedServer) -> Iterator[GpuEngine]:
    """The engine: nothing can hit in it; in the end nothing may be held."""
    the_engine.forget()
    the_engine.hooks_fired.clear()
    yield the_engine
    server.retrieves()
    the_engine.end_requests()
    the_engine.assert_all_idle(server)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, configuration: Configuration) -> dict[str, Any]:
    """A way to retrieve: a request's `lamina.` parameters."""
    return modes(configuration.model.layers)[request.param]


@pytest.fixture(params=[name for name in MODES if name != "whole-async"])
def early_mode(request: pytest.FixtureRequest, configuration: Configuration) -> dict[str, Any]:
    """A way in which a request runs before all of its slices have landed."""
    return modes(configuration.model.layers)[request.param]
