"""Which adapter a request has: the one that the engine has loaded, whatever lies there now."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from lamina.engines.vllm.adapters import Adapters
from tests.support.wait import eventually

LATER_NS = 10**10


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter")


def write(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def request(path: Path | str, number: int = 1, **options: bool) -> LoRARequest:
    return LoRARequest(f"name-{number}", number, str(path), **options)


def started(engine: str = "engine", later_ns: int = LATER_NS) -> Adapters:
    """An engine that is made when all files of the test are old, or else before."""
    return Adapters(engine, time.time_ns() + later_ns)


def identity(adapters: Adapters, lora: LoRARequest) -> str:
    eventually(lambda: adapters.identity(lora))
    return str(adapters.identity(lora))


def test_an_adapter_is_named_by_its_content(adapter: Path, tmp_path: Path) -> None:
    """By every byte of it, and by neither name nor path nor number nor engine."""
    before = identity(started(), request(adapter))
    (adapter / "notes.md").write_text("no part of it")
    copied = Path(shutil.copytree(adapter, tmp_path / "copied"))
    assert identity(started("other"), request(copied, 7)) == before
    (adapter / "adapter_model.safetensors").write_bytes(b"weightz")
    assert identity(started(), request(adapter)) != before
    (copied / "adapter_config.json").write_text("{ }")
    assert identity(started(), request(copied)) != before


def test_what_it_is_read_as_counts(adapter: Path) -> None:
    plain, fused = request(adapter), request(adapter, 2, is_3d_lora_weight=True)
    adapters = started()
    assert identity(adapters, plain) != identity(adapters, fused)


def test_one_that_is_overwritten_after_it_was_loaded_has_no_name(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves the old one from its memory; what lies on disk is not what it has."""
    adapters = started()
    before = identity(adapters, request(adapter))
    write(adapter, b"another")
    assert adapters.identity(request(adapter)) is None
    assert adapters.identity(request(adapter)) is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert "name-1" in line
    assert "changed since" in line
    other = write(adapter.with_name("other"))
    assert identity(adapters, request(other, 2)) == before  # others keep their cache


def test_one_that_is_loaded_anew_is_named_anew(adapter: Path) -> None:
    adapters = started()
    before = identity(adapters, request(adapter))
    write(adapter, b"another")
    after = identity(adapters, request(adapter, load_inplace=True))
    assert after != before
    assert identity(adapters, request(adapter)) == after


def test_another_path_under_the_same_number_is_not_loaded(adapter: Path, tmp_path: Path) -> None:
    """vLLM goes by the number."""
    adapters = started()
    identity(adapters, request(adapter))
    assert adapters.identity(request(write(tmp_path / "other", b"other"))) is None


def test_one_that_was_written_while_the_engine_ran_is_this_engines_own(adapter: Path) -> None:
    """When the engine read it is not known, so nobody else may share by what lies there now."""
    adapters = started(later_ns=-LATER_NS)
    own = identity(adapters, request(adapter))
    assert own.startswith("own")
    assert identity(adapters, request(adapter)) == own
    assert identity(adapters, request(adapter, 2)) != own
    assert identity(started("other", -LATER_NS), request(adapter)) != own
    os.utime(adapter / "adapter_model.safetensors", ns=(0, 0))  # as if it were old
    assert identity(started("other", -LATER_NS), request(adapter)).startswith("own")


@pytest.mark.parametrize("kind", ["missing", "empty", "unreadable", "dangling", "a-hub-name"])
def test_one_that_cannot_be_read_costs_only_its_own_requests_the_cache(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    paths: dict[str, Path | str] = {
        "missing": tmp_path / "x",
        "empty": tmp_path / "e",
        "a-hub-name": "org/adapter",
    }
    (tmp_path / "e").mkdir()
    broken = write(tmp_path / "u")
    weights = broken / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(weights if kind == "unreadable" else tmp_path / "nothing")
    lora = request(paths.get(kind, broken), 5)
    adapters = started()
    for _ in range(3):
        assert adapters.identity(lora) is None
    eventually(lambda: not adapters.is_being_read(lora, 10))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "go without the cache" in line
    assert identity(adapters, request(adapter)) is not None


def test_a_hub_adapter_is_named_by_its_files(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--adapter"
    for commit, weights in (("a" * 40, b"weights"), ("b" * 40, b"others")):
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        write(folder / "snapshots" / commit, weights)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    first = identity(started(), request("org/adapter"))
    assert first == identity(started(), request(adapter))
    (folder / "refs" / "main").write_text("b" * 40)
    assert identity(started(), request("org/adapter")) != first


def test_a_request_may_wait_while_one_is_read_and_no_longer(adapter: Path) -> None:
    adapters = started()
    lora = request(adapter)
    assert not adapters.is_being_read(lora, 10)
    adapters.identity(lora)
    assert not adapters.is_being_read(lora, 0)
    identity(adapters, lora)
    eventually(lambda: not adapters.is_being_read(lora, 10))
