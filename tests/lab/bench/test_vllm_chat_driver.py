"""What drives an engine through a chat, with an engine that only takes notes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina_lab.bench.vllm.chat import Chat
from lamina_lab.bench.vllm.chat_arms import parse_chat_arms
from lamina_lab.bench.vllm.chat_measure import ChatBench
from lamina_lab.bench.vllm.connectors import Cache
from lamina_lab.bench.vllm.engine import Answer, Engine
from lamina_lab.bench.vllm.measure import BenchSpec
from lamina_lab.bench.vllm.models import MODELS
from lamina_lab.bench.vllm.results import Start
from lamina_lab.bench.vllm.trace import TRACE_PATH

CHAT = Chat(
    conversations=4,
    system_tokens=16,
    least_document=20,
    most_document=40,
    turns=3,
    turn_tokens=8,
    output_tokens=4,
    vocabulary=512,
)
WARMING = 2 * 3
RATE = 2000.0


class NotedEngine:
    """Answers at once, with tokens that no other answer has."""

    batched_tokens = 2048

    def __init__(self) -> None:
        self.description: dict[str, str] = {}
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.answered_tokens = CHAT.output_tokens
        self.wait_for_all_openings = False
        self.never_answers = False
        self._all_have_asked = asyncio.Event()
        self.options: dict[str, Any] = {}

    async def ask(self, prompt: Sequence[int], parameters: Any = None, tokens: int = 1) -> Answer:
        sent_s = time.monotonic()
        self.prompts.append(list(prompt))
        if len(self.prompts) == WARMING + CHAT.conversations:
            self._all_have_asked.set()
        if self.never_answers:
            await asyncio.Event().wait()
        if self.wait_for_all_openings and len(self.prompts) > WARMING:
            await self._all_have_asked.wait()
        given = [1000 + len(self.prompts)] * self.answered_tokens
        self.answers.append(given)
        return Answer("bench-0", sent_s, tokens=given, times_s=[0.001, 0.002], cached_tokens=9)

    async def forget(self) -> None:
        pass

    async def call_worker(self, method: str, *arguments: Any) -> float:
        return 1.0

    def close(self) -> None:
        pass


class ClearedCache(Cache):
    cleared = 0

    def clear(self) -> None:
        self.cleared += 1


def measure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: NotedEngine,
    arms: str = "auto",
    limit_s: float | None = 30.0,
) -> tuple[Start, ClearedCache]:
    def begin(*arguments: Any, **options: Any) -> NotedEngine:
        engine.options = options
        return engine

    monkeypatch.setattr(Engine, "start", begin)
    monkeypatch.setenv(TRACE_PATH, "")  # so that it is as before afterwards
    model = msgspec.structs.replace(MODELS["tiny"], chat=CHAT)
    spec = BenchSpec(rates=(RATE,), repeats=1, limit_s=limit_s)
    start = Start(
        connector="lamina", model="tiny", command="", date="", host={}, workload=model.workload
    )
    cache = ClearedCache(None)
    parsed = parse_chat_arms(arms, model.layers, "lamina")
    bench = ChatBench(spec, model, parsed, cache, start, None, lambda text: None)
    asyncio.run(bench.run(tmp_path))
    return start, cache


def test_a_prompt_is_all_that_was_said_before_and_new_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = NotedEngine()
    start, _ = measure(monkeypatch, tmp_path, engine)
    assert start.is_whole
    answer_of = {
        tuple(prompt): given for prompt, given in zip(engine.prompts, engine.answers, strict=True)
    }
    asked = {tuple(prompt) for prompt in engine.prompts[WARMING:]}
    for conversation in range(CHAT.conversations):
        said = CHAT.opening(0, conversation)
        for turn in (1, 2, 3):
            said += CHAT.words(0, conversation, turn)
            asked.remove(tuple(said))
            said += answer_of[tuple(said)]
    assert not asked
    told = [(s.conversation, s.turn, s.prompt_tokens) for s in start.chats if s.conversation == 2]
    opening = len(CHAT.opening(0, 2))
    assert told == [(2, 1, opening + 8), (2, 2, opening + 20), (2, 3, opening + 32)]


def test_all_first_turns_come_though_none_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An open loop: the engine answers nobody before everybody has asked."""
    engine = NotedEngine()
    engine.wait_for_all_openings = True
    start, _ = measure(monkeypatch, tmp_path, engine)
    assert start.is_whole
    assert len(start.chats) == 12
    turns = [sample.turn for sample in start.chats]
    assert turns[:4] == [1, 1, 1, 1]
    assert 1 not in turns[4:]


def test_a_run_begins_with_nothing_and_is_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = NotedEngine()
    start, cache = measure(monkeypatch, tmp_path, engine, "recompute")
    assert cache.cleared == 2  # before warming up, and before the run
    assert engine.options["scheduler_cls"] == "lamina_lab.bench.vllm.trace.traced_scheduler"
    for sample in start.chats:
        assert sample.late_ms >= 0
        assert sample.cached_tokens == 9
        assert sample.phases is None  # nobody has watched a scheduler
        assert sample.ttft_ms == 1.0


def test_the_time_limit_ends_a_chat_that_gets_no_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = NotedEngine()
    engine.never_answers = True
    start, _ = measure(monkeypatch, tmp_path, engine, limit_s=0.05)
    assert not start.is_whole
    assert start.notes == ["the time limit came before the end"]
    assert start.chats == []


def test_an_answer_that_ends_early_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = NotedEngine()
    engine.answered_tokens = 2
    start, _ = measure(monkeypatch, tmp_path, engine)
    assert start.chats == []
    (error,) = start.errors
    assert "ended early" in error
