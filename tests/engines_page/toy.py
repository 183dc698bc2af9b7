"""The page, the engine on it, and one that notes what it does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lamina.client import ClientSettings, Retrieve, TransferStatus
from tests.support.wait import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 50_000, 300)]
CHUNKS, NEW_TOKENS = 4, 6
RUBBISH = 0xA5A5A5A5A5A5A5A5


def module_at(path: Path) -> ModuleType:
    """The engine on the page, as a module in this file."""
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Toy:
    """A toy engine. Notes what it retrieves, and at which layer it waits for what."""

    def __init__(self, toy: ModuleType, socket: Path, **settings: Any) -> None:
        settings = {
            "suspect_after_ms": 5_000,
            "lookup_timeout_ms": 5_000,
            "reconnect_every_ms": 10,
            "layerwise_overlap": 1,
            **settings,
        }
        self.engine = toy.ToyEngine(ClientSettings(socket=socket, **settings))
        self.retrieves: list[Retrieve | None] = []
        self.stands_at: list[int] = []
        client, device = self.engine.client, self.engine.client.device
        begin, wait = client.retrieve, device.wait_landed

        def retrieve(*arguments: Any) -> Retrieve | None:
            self.retrieves.append(begin(*arguments))
            return self.retrieves[-1]

        def wait_landed(board: Any, slot: int, count: int, stream: Any = None) -> None:
            self.stands_at.append(count - self.retrieves[-1].base if self.retrieves[-1] else 0)
            wait(board, slot, count, stream)

        client.retrieve, device.wait_landed = retrieve, wait_landed

    def tokens(self, prompt: Sequence[int] = PROMPT, name: str = "request") -> list[int]:
        tokens: list[int] = self.engine.generate(name, list(prompt), NEW_TOKENS)
        return tokens

    def settle(self) -> None:
        """Return once no transfer holds a block."""
        eventually(lambda: self.engine.turn() or not self.engine.held)

    def forget(self) -> None:
        """Leave nothing of what was computed."""
        self.settle()
        self.engine.kv[:] = RUBBISH

    def count(self, method: str) -> list[None]:
        """A list that grows by one at each call of this method of the engine."""
        calls: list[None] = []
        called = getattr(self.engine, method)

        def counted(*arguments: Any) -> Any:
            calls.append(None)
            return called(*arguments)

        setattr(self.engine, method, counted)
        return calls

    @property
    def outcomes(self) -> list[TransferStatus | None]:
        return [retrieve.outcome for retrieve in self.retrieves if retrieve is not None]
