"""Drives an engine through a chat: turns come at their times, and each is asked as a task.

What was measured is on disk after every run; a run that the time limit ends does not count, for who
answers quickly would be over-represented in it.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from lamina.errors import LaminaError
from lamina_lab.bench.vllm.arms import Arm
from lamina_lab.bench.vllm.chat import Chat, Turn
from lamina_lab.bench.vllm.engine import Answer, Engine
from lamina_lab.bench.vllm.measure import Bench
from lamina_lab.bench.vllm.phases import passage_named, phases_of, read_passages
from lamina_lab.bench.vllm.results import ChatSample
from lamina_lab.bench.vllm.trace import TRACE_PATH, TRACED

_WARM_PROMPTS = 3


class ChatBench(Bench):
    """Measures a chat at each of the spec's rates, each arm of it with the same turns."""

    @property
    def _chat(self) -> Chat:
        return self._model.chat

    async def run(self, model_directory: Path) -> None:
        self._start.chat = self._chat
        self._start.gpu_blocks = self._model.gpu_blocks
        with tempfile.TemporaryDirectory(prefix="lamina-trace-") as directory:
            self._trace = Path(directory) / "passages.jsonl"
            os.environ[TRACE_PATH] = str(self._trace)
            await super().run(model_directory)

    def _engine_options(self) -> dict[str, Any]:
        return {"scheduler_cls": TRACED}

    async def _measure(self) -> None:
        limit_s = self._until_s - time.monotonic()
        try:
            await asyncio.wait_for(self._measure_all(), None if limit_s == math.inf else limit_s)
        except asyncio.TimeoutError:
            self._is_late()

    async def _measure_all(self) -> None:
        await self._measure_link()
        await self._warm_up()
        for repeat in range(self._spec.repeats):
            for number, rate in enumerate(self._spec.rates):
                run = repeat * len(self._spec.rates) + number
                for arm in self._arms:
                    await self._measure_run(arm, rate, run)
        self._start.is_whole = True
        self._start.server = self._cache.counts()
        self._flush()

    async def _warm_up(self) -> None:
        """Long prompts computed, and found again: kernels are chosen, meters have measured."""
        for arm in self._arms:
            await self._forget()
            tokens = self._chat.longest_tokens - self._chat.output_tokens
            prompts = [
                self._workload.unseen(next(self._unseen), tokens) for _ in range(_WARM_PROMPTS)
            ]
            for _ in range(2):
                for prompt in prompts:
                    await self._engine.ask(
                        prompt, self._ours(arm.parameters), self._chat.output_tokens
                    )
                await self._engine.forget()

    async def _forget(self) -> None:
        """Nothing of another arm's run may be found: its turns were the same."""
        await self._engine.forget()
        self._cache.clear()

    async def _measure_run(self, arm: Arm, rate: float, run: int) -> None:
        """All conversations once."""
        await self._forget()
        parameters = self._ours(arm.parameters)
        conversations = _Conversations(self._engine, self._chat, parameters, arm, rate, run)
        try:
            await conversations.run()
        except LaminaError as error:
            self.fail(f"{rate:g} a second, run {run}, {arm.name}: {error}")
            return
        samples = self._with_phases(conversations.samples)
        self._start.chats += samples
        self._flush()
        later_ms = [sample.ttft_ms for sample in samples if sample.turn > 1]
        mean_ms = sum(later_ms) / len(later_ms)
        self._progress(f"{rate:g} a second, run {run}, {arm.name}: {mean_ms:.1f} ms")

    def _with_phases(self, asked: list[tuple[Answer, ChatSample]]) -> list[ChatSample]:
        passages = read_passages(self._trace)
        samples = []
        for answer, sample in asked:
            if (passage := passage_named(passages, answer.name)) is not None:
                received_s = answer.sent_s + answer.times_s[0]
                phases = phases_of(passage, answer.sent_s, received_s)
                sample = msgspec.structs.replace(sample, phases=phases)
            samples.append(sample)
        return samples


class _Conversations:
    """Those of one run."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        parameters: dict[str, Any] | None,
        arm: Arm,
        rate: float,
        run: int,
    ) -> None:
        self._engine, self._chat, self._parameters = engine, chat, parameters
        self._arm, self._rate, self._number = arm, rate, run
        numbers = range(chat.conversations)
        self._said = [chat.opening(run, number) for number in numbers]
        self._ended_s = [-math.inf for _ in numbers]
        """When each last had an answer, by `time.monotonic`."""
        self.samples: list[tuple[Answer, ChatSample]] = []

    async def run(self) -> None:
        """Both parts. Raises `LaminaError` when a turn gets no answer; then no task is left."""
        for part in (self._chat.first_turns, self._chat.later_turns):
            began_s = time.monotonic()
            turns = part(self._number, self._rate)
            tasks = [
                asyncio.create_task(
                    self._speak([turn for turn in turns if turn.conversation == number], began_s)
                )
                for number in range(self._chat.conversations)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _speak(self, turns: list[Turn], began_s: float) -> None:
        """One conversation's turns, in order."""
        for turn in turns:
            said = self._said[turn.conversation]
            said += self._chat.words(self._number, turn.conversation, turn.turn)
            due_s = turn.due_s(self._ended_s[turn.conversation] - began_s)
            await asyncio.sleep(began_s + due_s - time.monotonic())
            answer = await self._engine.ask(said, self._parameters, self._chat.output_tokens)
            self._ended_s[turn.conversation] = time.monotonic()
            if len(answer.tokens) != self._chat.output_tokens:
                raise LaminaError(f"an answer ended early: {answer.reason}", "See vLLM's log")
            sent_s = answer.sent_s - began_s
            sample = ChatSample(
                arm=self._arm.name,
                rate=self._rate,
                run=self._number,
                conversation=turn.conversation,
                turn=turn.turn,
                sent_s=sent_s,
                late_ms=(sent_s - due_s) * 1e3,
                was_deferred=due_s != turn.at_s,
                prompt_tokens=len(said),
                cached_tokens=answer.cached_tokens,
                ttft_ms=answer.ttft_ms,
                tpot_ms=answer.tpot_ms,
            )
            self.samples.append((answer, sample))
            said += answer.tokens
