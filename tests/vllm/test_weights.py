"""Which weights an engine has: every byte of what vLLM loads, whatever it is called."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.content import digests
from lamina.engines.vllm import began
from lamina.engines.vllm.began import Beginnings, process_start_ns
from lamina.engines.vllm.weights import Weights
from tests.support.wait import PATIENCE_S, eventually

SIZE = 100_000
LATER_NS = 10**10


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for number in range(3):
        (made / f"model-{number}.safetensors").write_bytes(os.urandom(SIZE))
    (made / "config.json").write_text("{}")
    return made


def config(model: Path | str, **changes: Any) -> Any:
    """What is looked at of vLLM's configuration."""
    fields: dict[str, Any] = {
        "model": str(model),
        "revision": None,
        "seed": 0,
        "trust_remote_code": False,
        "hf_config": SimpleNamespace(),
        "load_format": "auto",
        "download_dir": None,
        "ignore_patterns": ["original/**/*"],
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields), load_config=SimpleNamespace(**fields)
    )


def identity(
    model: Path | str, model_id: str | None = None, began_ns: int | None = None, **changes: Any
) -> str | None:
    weights = Weights(config(model, **changes), model_id, began_ns)
    weights.begin()
    weights.wait(30)
    return weights.identity


def change(path: Path, where: int) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", [0, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("number", [0, 2])
def test_one_byte_of_any_file(directory: Path, number: int, where: int) -> None:
    before = identity(directory)
    assert before is not None
    change(directory / f"model-{number}.safetensors", where)
    assert identity(directory) not in (before, None)


def test_the_same_weights_under_another_path(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copied" / "elsewhere")
    assert identity(directory) == identity(tmp_path / "copied" / "elsewhere")


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.pth", "w.gguf", "w.safetensors", "w.npy"])
def test_every_kind_of_file_that_vllm_loads(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m" / name
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE))
    before = identity(path.parent)
    change(path, SIZE - 1)
    assert identity(path.parent) not in (before, None)


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "modeling_own.py", "own/layers.py"]
)
def test_settings_and_code_count(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("{}")
    before = identity(directory)
    (directory / name).write_text("{ }")
    assert identity(directory) != before


@pytest.mark.parametrize(
    "name", ["README.md", ".git/x.safetensors", ".hidden.bin", "original/consolidated.00.pth"]
)
def test_what_vllm_does_not_load_does_not_count(directory: Path, name: str) -> None:
    before = identity(directory)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("something")
    assert identity(directory) == before


def test_a_link_to_nothing_is_not_passed_over(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies behind it when vLLM loads it would not be in the name."""
    (directory / "model-9.safetensors").symlink_to(tmp_path / "comes later")
    assert identity(directory) is None
    assert "comes later" in caplog.text or "model-9" in caplog.text


def test_a_file_given_as_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(os.urandom(SIZE))
    before = identity(path)
    renamed = path.rename(tmp_path / "b.gguf")
    assert identity(renamed) == before
    change(renamed, 5)
    assert identity(renamed) not in (before, None)


def test_all_parts_of_a_file_given_as_the_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(os.urandom(SIZE))
    before = identity(parts[0])
    (tmp_path / "m-other-of-00003.gguf").write_bytes(b"another model's")
    change(parts[2], SIZE - 1)
    assert identity(parts[0]) not in (before, None)


def test_random_weights_are_told_by_their_seed() -> None:
    assert identity("m", load_format="dummy") == identity("other", load_format="dummy")
    assert identity("m", load_format="dummy") != identity("m", load_format="dummy", seed=1)


def test_a_declared_identity_takes_the_place_of_content(directory: Path) -> None:
    before = identity(directory, "one")
    change(directory / "model-0.safetensors", 1)
    assert identity(directory, "one") == before == identity("s3://bucket/model", "one")
    assert identity(directory, "two") != before


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"load_format": "tensorizer"}, "load format 'tensorizer'"),
        ({"model_weights": "s3://bucket/model"}, "lie at s3://bucket/model"),
        ({"model": "org/model"}, "neither a directory nor in"),
        (
            {"trust_remote_code": True, "hf_config": SimpleNamespace(auto_map={"A": "o/r--m.C"})},
            "code lies elsewhere",
        ),
    ],
    ids=["format", "remote", "hub", "code"],
)
def test_weights_that_cannot_be_told(
    directory: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], cause: str
) -> None:
    """One line says why and what to do; there is no identity to be wrong."""
    assert identity(**{"model": directory, **changes}) is None
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert cause in line
    assert "lamina.model_id" in line


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert identity(tmp_path) is None


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
def test_files_written_after_the_engine_began(
    directory: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    began_ns = time.time_ns() + LATER_NS
    assert identity(directory, began_ns=began_ns) is not None
    began_ns = (directory / name).stat().st_ctime_ns
    os.utime(directory / name, ns=(0, 0))  # as if it were old
    assert identity(directory, began_ns=began_ns) is None
    assert "Restart the engine" in caplog.text


class Hub:
    """A model in a Hugging Face cache, of two commits."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "models--org--model"
        self.main = self.folder / "refs" / "main"
        self.main.parent.mkdir(parents=True)
        for commit in ("a" * 40, "b" * 40):
            snapshot = self.folder / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / "model.safetensors").write_bytes(commit.encode())
        self.main.write_text("a" * 40)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Hub(tmp_path / "hub")


def test_a_hub_name_is_told_by_the_commit_in_the_cache(hub: Hub) -> None:
    """Downloaded after the engine began: a commit's files are never written again."""
    first = identity("org/model", began_ns=0)
    assert first is not None
    assert identity("org/model", revision="a" * 40, began_ns=0) == first
    assert identity(hub.folder / "snapshots" / ("a" * 40), began_ns=0) == first
    hub.main.write_text("b" * 40)
    assert identity("org/model", began_ns=0) not in (first, None)
    assert identity("org/model", revision="main", began_ns=0) == identity("org/model")


def test_a_hub_name_in_a_directory_of_its_own(hub: Hub, tmp_path: Path) -> None:
    moved = tmp_path / "downloads"
    shutil.move(hub.folder.parent, moved)
    assert identity("org/model") is None
    assert identity("org/model", download_dir=str(moved)) is not None


def test_a_branch_that_moved_while_the_engine_loaded(hub: Hub) -> None:
    """vLLM read the configuration of one commit; the branch names another by now."""
    assert identity("org/model", hf_config=SimpleNamespace(_commit_hash="a" * 40)) is not None
    assert identity("org/model", hf_config=SimpleNamespace(_commit_hash="b" * 40)) is None


def test_an_engine_of_this_process_began_when_its_configuration_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(10**18, 10**18 + 10**12, 10**9))
    monkeypatch.setattr(began, "wall_clock_ns", lambda: next(clock))
    beginnings = Beginnings()
    first_ns = 10**18
    beginnings.looked_up()
    beginnings.looked_up()
    beginnings.worker_made()
    assert beginnings.take() == first_ns
    beginnings.looked_up()
    beginnings.worker_made()
    assert beginnings.take() > first_ns + 10**9


def test_a_look_up_right_before_a_connector_is_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made two configurations first, and then two engines, looked up before the first."""
    now = 10**18
    monkeypatch.setattr(began, "wall_clock_ns", lambda: now)
    beginnings = Beginnings()
    beginnings.looked_up()
    now += 10**9
    beginnings.worker_made()
    beginnings.take()
    made_ns = now
    now += 10**9
    beginnings.looked_up()
    now += 10**6
    beginnings.worker_made()
    assert beginnings.take() == made_ns


def test_a_process_began_before_now_and_after_the_machine() -> None:
    before_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before_ns < process_start_ns() < time.time_ns()


def test_the_start_of_an_engine_does_not_wait(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def read_when_it_may(*arguments: Any) -> Any:
        may_read.wait(PATIENCE_S)
        return digests(*arguments)

    monkeypatch.setattr("lamina.engines.vllm.weights.digests", read_when_it_may)
    weights = Weights(config(directory), None, None)
    weights.begin()
    weights.wait(0)
    assert weights.identity is None
    may_read.set()
    eventually(lambda: weights.identity)
