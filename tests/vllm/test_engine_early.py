"""A retrieve leaves as soon as vLLM has scheduled its request, not when the step is ready to
run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lamina.engines.vllm.messages import StepMetadata
from lamina.engines.vllm.worker import WorkerSide
from tests.vllm.engine import CHUNK_TOKENS, Engine, random_tokens
from tests.vllm.modes import in_every_mode


class Begun:
    """Which of a step's retrieves were on their way when the step began, and which were not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[int] = []
        self.late: list[int] = []
        begin_step = WorkerSide.begin_step

        def note(side: WorkerSide, step: StepMetadata, stream: Any) -> None:
            for retrieve in step.retrieves:
                (self.early if retrieve.number in side._retrieves else self.late).append(
                    retrieve.number
                )
            begin_step(side, step, stream)

        monkeypatch.setattr(WorkerSide, "begin_step", note)


def stored(engine: Engine, seed: int) -> list[int]:
    """A prompt whose first two chunks are in the cache."""
    prompt = random_tokens(2 * CHUNK_TOKENS + 5, 90, seed)
    engine.ask(prompt, retrieve=False)
    engine.forget()
    return prompt


@in_every_mode
def test_a_retrieve_is_on_its_way_before_its_step_begins(
    engine: Engine, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stored(engine, 0)
    begun = Begun(monkeypatch)
    answer = engine.ask(prompt, store=False, **mode)
    assert answer.cached == 2 * CHUNK_TOKENS
    assert len(begun.early) == 1
    assert not begun.late


def test_a_retrieve_that_needs_a_ticket_waits_for_what_writes_its_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stored(engine, 1)
    begun = Begun(monkeypatch)
    build_step = type(engine.connector._scheduler).build_step

    def zeroing(side: Any, output: Any) -> StepMetadata:
        output.new_block_ids_to_zero = list(range(engine.blocks))
        return build_step(side, output)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(engine.connector._scheduler), "build_step", zeroing)
    assert engine.ask(prompt, store=False, retrieve=True).cached == 2 * CHUNK_TOKENS
    assert not begun.early
    assert len(begun.late) == 1


def test_a_scheduler_on_another_thread_leaves_retrieves_to_the_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client and the device belong to the thread that launches the model."""
    prompt = stored(engine, 2)
    begun = Begun(monkeypatch)
    begin_early = WorkerSide.begin_early

    def elsewhere(side: WorkerSide, step: StepMetadata) -> None:
        thread = threading.Thread(target=begin_early, args=(side, step))
        thread.start()
        thread.join()

    monkeypatch.setattr(WorkerSide, "begin_early", elsewhere)
    assert engine.ask(prompt, store=False).cached == 2 * CHUNK_TOKENS
    assert not begun.early
    assert len(begun.late) == 1
