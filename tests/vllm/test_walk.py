"""The walk of docs/architecture.md: the files that a hit goes through, of which 25 are read."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

import lamina
from lamina.engines.vllm.connector import LaminaConnector
from lamina.server.endpoint import Endpoint
from lamina.server.main import Server
from lamina.server.sessions import Sessions
from tests.support.server import ServerThread
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens

PACKAGE = Path(lamina.__file__).parent
PAGE = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
SECTION = PAGE.split("## Reading one hit")[1].split("\n## ")[0]
READ = re.findall(r"^\| `([\w/]+\.py)` \|", SECTION, re.MULTILINE)
PASSED = set(re.findall(r"`([\w/]+\.py)`", SECTION.split("A hit passes through")[1]))
ON_A_GPU = {"devices/cuda.py", "devices/cuda_stream.py"}
MOST_READ = 25
ON_TIME = {task.__code__ for task in (Endpoint.watch, Sessions.beat, Server._end_overdue)}
"""What the server's loop does every so often, hit or not."""


class Trace:
    """Which files of the package run, while it is on, but for `ON_TIME`: a hit may be so slow that
    its turn comes. Threads that begin after it are seen."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and not is_on_time(frame):
                self.seen.add(path.relative_to(PACKAGE).as_posix())

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's thread is there already: seen within each call of ours."""

        def call(*arguments: Any, **named: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self)
            try:
                return function(*arguments, **named)
            finally:
                sys.setprofile(before)

        return call


def is_on_time(frame: FrameType | None) -> bool:
    """Whether it runs for one of `ON_TIME`."""
    while frame is not None and frame.f_code not in ON_TIME:
        frame = frame.f_back
    return frame is not None


@pytest.fixture(scope="module", autouse=True)
def trace() -> Iterator[Trace]:
    """Before the module's server and engine start."""
    trace = Trace()
    threading.setprofile(trace)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(LaminaConnector).items()):
            if isinstance(function, FunctionType) and name != "__init__":
                patch.setattr(LaminaConnector, name, trace.traced(function))
        yield trace
    threading.setprofile(None)  # type: ignore[arg-type]


def test_a_hit_goes_through_the_files_of_the_walk(
    trace: Trace, engine: Engine, server: ServerThread
) -> None:
    prompt = random_tokens(2 * CHUNK_TOKENS + 5, 91)
    engine.ask(prompt, retrieve=False)
    engine.forget()
    engine.assert_idle(server)  # nothing is on its way that is not the hit's
    trace.is_on = True
    answer = engine.ask(prompt, store=False, layerwise_overlap=1, release_after_slices=1)
    trace.is_on = False
    assert answer.cached == 2 * CHUNK_TOKENS
    assert trace.seen - set(READ) - PASSED == set(), "files that the walk does not name"
    assert set(READ) - trace.seen == ON_A_GPU, "files of the walk that a hit does not go through"


def test_a_hit_is_read_in_so_many_files() -> None:
    assert len(READ) == len(set(READ)) <= MOST_READ
    assert not set(READ) & PASSED
    for name in [*READ, *PASSED]:
        assert (PACKAGE / name).is_file(), name
