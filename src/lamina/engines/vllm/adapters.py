"""Which LoRA adapter a request has: the one that the engine has loaded, whatever lies there now.

vLLM reads an adapter when a request first names it, or when it is told to load it; from then on it
serves from its memory, and files may be written anew meanwhile. Content can be told where they were
last written before this engine existed. What is written later is named for this engine alone; what
changes after it was first seen has no name at all, until `load_inplace` has the engine read again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.content import CLOCK_SLACK_NS, default_memory, digests, signature
from lamina.engines.vllm.weights import UnknownWeightsError, hub_snapshot, loaded_files
from lamina.errors import LaminaError

log = logging.getLogger(__name__)

_Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(eq=False)
class _Adapter:
    """One that the engine has, as its files were when it was first seen."""

    files: _Signature
    seen_s: float
    identity: str | None = None
    is_read: bool = False

    def is_being_read(self, at_most_s: float) -> bool:
        return not self.is_read and time.monotonic() - self.seen_s < at_most_s


class Adapters:
    """Names adapters for keys. Called on the engine's thread; content is read on another."""

    def __init__(self, engine: str, made_ns: int) -> None:
        """`engine` is nobody else's name; `made_ns`, of the wall clock, is before it can have
        loaded an adapter."""
        self._engine = engine
        self._made_ns = made_ns
        self._known: dict[int, _Adapter] = {}
        self._said: set[int] = set()

    def identity(self, lora: Any) -> str | None:
        """What names the adapter of a `LoRARequest`; None where it cannot be told, or not yet.

        Never raises for an adapter that cannot be read: its requests go without the cache.
        """
        try:
            directory = _directory_of(lora)
            files = tuple((name, signature(path.stat())) for name, path in loaded_files(directory))
        except (LaminaError, OSError, ValueError) as error:
            self._say(lora, f"it cannot be read: {error}")
            return None
        known = self._known.get(lora.lora_int_id)
        if known is None or lora.load_inplace:
            known = self._first_seen(lora, directory, files)
        elif known.files != files:
            self._say(lora, "its files have changed since this engine read them")
            return None
        return known.identity

    def is_being_read(self, lora: Any, at_most_s: float) -> bool:
        """Whether `identity` will soon know an adapter that was first seen at most so long ago."""
        known = self._known.get(lora.lora_int_id)
        return known is not None and known.is_being_read(at_most_s)

    def _first_seen(self, lora: Any, directory: Path, files: _Signature) -> _Adapter:
        before = self._known.get(lora.lora_int_id)
        if before is not None and before.files == files:
            return before
        adapter = self._known[lora.lora_int_id] = _Adapter(files, time.monotonic())
        form = getattr(lora, "is_3d_lora_weight", False)
        if not files:
            adapter.is_read = True
            self._say(lora, f"there are no files of it in {directory}")
        elif max(times[-1] for _, times in files) + CLOCK_SLACK_NS > self._made_ns:
            text = f"{self._engine} {lora.lora_int_id} {files}"
            adapter.is_read = True
            adapter.identity = f"own {hashlib.sha256(text.encode()).hexdigest()} {form}"
        else:
            arguments = (lora, adapter, [directory / name for name, _ in files], form)
            threading.Thread(target=self._read, args=arguments, daemon=True).start()
        return adapter

    def _read(self, lora: Any, adapter: _Adapter, paths: list[Path], form: bool) -> None:
        try:
            found = digests(paths, self._made_ns, default_memory())
            whole = hashlib.sha256()
            for path, digest in zip(paths, found, strict=True):
                whole.update(f"{path.name}\0{digest}\n".encode())
            adapter.identity = f"{whole.hexdigest()} {form}"
        except (LaminaError, OSError) as error:
            self._say(lora, str(error))
        finally:
            adapter.is_read = True

    def _say(self, lora: Any, cause: str) -> None:
        """Once for an adapter."""
        if lora.lora_int_id not in self._said:
            self._said.add(lora.lora_int_id)
            log.warning("requests for adapter %r go without the cache: %s", lora.lora_name, cause)


def _directory_of(lora: Any) -> Path:
    """Where vLLM reads the adapter from. Raises `UnknownWeightsError`."""
    if getattr(lora, "tensorizer_config_dict", None):
        raise UnknownWeightsError("tensorizer loads it", "Load it from a directory")
    path = Path(lora.lora_path).expanduser()
    if path.is_absolute() or path.exists():
        return path
    return hub_snapshot(lora.lora_path, None, None)
