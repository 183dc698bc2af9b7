"""Which weights an engine has: the content of the files that vLLM loaded, whatever their name.

Reading them takes a second for every gigabyte or so, on threads that give way to all others, while
the engine warms up and then serves; until it is done there are no hits. `lamina.model_id` takes its
place where the files cannot be read or are not to be.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lamina.content import default_memory, digests, is_hub_snapshot
from lamina.errors import LaminaError

log = logging.getLogger(__name__)

_LOADED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".json", ".py"}
"""Endings of what vLLM reads of a model: weights, settings of the model and of its processors,
code. Not the tokenizer's vocabulary: keys hold token ids."""
_WEIGHTS = _LOADED - {".json", ".py"}
_LOCAL_FORMATS = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes",
    "fastsafetensors", "instanttensor", "sharded_state",
}  # fmt: skip
"""Load formats whose weights are all in files of the model's directory."""
_REMEDY = "Name the weights by lamina.model_id, another name for other weights"


class UnknownWeightsError(LaminaError):
    """What the engine has loaded cannot be told."""


class _Source(NamedTuple):
    """Where weights come from: names that count, with files to read; or a text that says all."""

    files: list[tuple[str, Path]]
    text: str = ""


class Weights:
    """The identity of an engine's weights, found in the background; once `begin` was called.

    `identity` is None until it is known, and stays None where it cannot be: that is logged once.
    """

    def __init__(self, vllm_config: Any, model_id: str | None, began_ns: int | None) -> None:
        """`began_ns`: a time of the wall clock before vLLM opened the first file."""
        self._config = vllm_config
        self._model_id = model_id
        self._began_ns = began_ns
        self._known = threading.Event()
        self.identity: str | None = None

    def begin(self) -> None:
        """Find it out: at once where nothing must be read."""
        if self._model_id is not None:
            self._tell(f"declared {self._model_id}")
        else:
            threading.Thread(target=self._find, name="lamina-weights", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is known or known to be unknowable, for so long at most."""
        self._known.wait(timeout_s)

    def _find(self) -> None:
        started_s = time.monotonic()
        try:
            source = _source_of(self._config)
            self._tell(source.text or self._read(source))
            log.info("the model's weights are known after %.1f s", time.monotonic() - started_s)
        except (LaminaError, OSError) as error:
            remedy = "" if isinstance(error, LaminaError) else f". {_REMEDY}"
            log.warning("this engine goes on without the cache: %s%s", error, remedy)
        except Exception:  # vLLM's configuration is not as expected: no cache, but an engine
            log.exception("this engine goes on without the cache: its weights cannot be told")
        finally:
            self._known.set()

    def _read(self, source: _Source) -> str:
        paths = [path for _, path in source.files]
        found = digests(paths, self._began_ns, default_memory())
        whole = hashlib.sha256()
        for (name, _), digest in zip(source.files, found, strict=True):
            whole.update(f"{name}\0{digest}\n".encode())
        return whole.hexdigest()

    def _tell(self, identity: str) -> None:
        self.identity = identity
        self._known.set()


def _source_of(vllm_config: Any) -> _Source:
    """Where vLLM loads the weights from. Raises `UnknownWeightsError`."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(load.load_format)
    if load_format == "dummy":
        return _Source([], f"dummy {model.seed}")
    if load_format not in _LOCAL_FORMATS:
        raise UnknownWeightsError(f"weights of load format {load_format!r} are not read", _REMEDY)
    if getattr(model, "model_weights", ""):
        raise UnknownWeightsError(f"the weights lie at {model.model_weights}", _REMEDY)
    if code := _code_elsewhere(model):
        raise UnknownWeightsError(f"the model's code lies elsewhere ({code})", _REMEDY)
    path = Path(str(model.model))
    if path.is_file():
        return _Source([("", part) for part in _parts_of(path)])
    directory = (
        path
        if path.is_dir()
        else hub_snapshot(str(model.model), model.revision, load.download_dir, _commit_of(model))
    )
    files = list(loaded_files(directory))
    if not any(path.suffix in _WEIGHTS for _, path in files):
        raise UnknownWeightsError(f"no weights lie in {directory}", _REMEDY)
    return _Source(files)


def hub_snapshot(
    name: str, revision: str | None, cache: str | None, commit: str | None = None
) -> Path:
    """The directory of a hub repository's commit in the local cache.

    `commit` is the one that vLLM found, where it says so. A branch counts only if it names that
    commit still. Raises `UnknownWeightsError` when the repository is not there.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeightsError(f"{name!r} comes from ModelScope", _REMEDY)
    root = Path(cache or constants.HF_HUB_CACHE)
    folder = root / str(repo_folder_name(repo_id=name, repo_type="model"))
    branch = folder / "refs" / (revision or "main")
    named = branch.read_text().strip() if branch.is_file() else revision
    directory = folder / "snapshots" / (named or "")
    if not is_hub_snapshot(directory):
        raise UnknownWeightsError(f"{name!r} is neither a directory nor in {root}", _REMEDY)
    if commit is not None and commit != named:
        raise UnknownWeightsError(f"{name!r} has moved from commit {commit} to {named}", _REMEDY)
    return directory


def _commit_of(model: Any) -> str | None:
    """The commit of which vLLM has read the configuration."""
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit) if commit else None


def loaded_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """What vLLM may read of a model: files at the top, and code anywhere below; sorted.

    Raises `OSError` for a link that leads nowhere: what is behind it later would go unnoticed.
    """
    for path in sorted([*directory.iterdir(), *directory.rglob("*/*.py")]):
        name = path.relative_to(directory).as_posix()
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if not is_hidden and path.suffix in _LOADED and stat.S_ISREG(path.stat().st_mode):
            yield name, path


def _parts_of(path: Path) -> list[Path]:
    """A file given as the model, with the other parts of one that is split (`-00001-of-00003`)."""
    stem, _, count = path.stem.rpartition("-of-")
    if count.isdecimal() and stem[-6:-5] == "-" and stem[-5:].isdecimal():
        return sorted(path.parent.glob(f"{stem[:-5]}*-of-{count}{path.suffix}"))
    return [path]


def _code_elsewhere(model: Any) -> str | None:
    """A repository whose code the configuration names (`auto_map`: "other/repo--file.Class")."""
    named = json.dumps(getattr(model.hf_config, "auto_map", None) or {})
    return named if model.trust_remote_code and "--" in named else None
