"""Everything that is measured on one engine: sets of hits, arm by arm, and decoding streams beside.

Arms alternate within a repeat, so that a drift of the host hits all of them. What was measured is
on disk after every set of requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lamina.errors import LaminaError
from lamina_lab.bench.vllm.arms import Arm, Source
from lamina_lab.bench.vllm.connectors import Cache
from lamina_lab.bench.vllm.engine import Answer, Engine
from lamina_lab.bench.vllm.models import Model
from lamina_lab.bench.vllm.results import Report, Sample, Sensitivity, Start, StreamSample, save
from lamina_lab.bench.vllm.workload import Cell, Workload

_STREAMS = 8
_STREAM_TOKENS = 4000
_STREAM_LEAD_TOKENS = 8
_LINK_BYTES = 1 << 30
_SENSITIVITY_TRIES = 8
_STORE_PATIENCE_S = 60.0
_ONE_MORE = 5
_NO_CACHE = {"lamina.retrieve": False, "lamina.store": False}
_RETRIEVE_ALL = {
    "lamina.store": False,
    "lamina.layerwise_overlap": 1,
    "lamina.release_after_slices": 1,
}
_STORE = {"lamina.retrieve": False}

Progress = Callable[[str], None]


class BenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure on one start. `limit_s` ends it early, with what there is."""

    connector: str = "lamina"
    model: str = "llama-3.1-8b"
    arms: str = "floor,layered:1"
    cells: tuple[Cell, ...] = ()
    stream_cells: tuple[Cell, ...] = ()
    repeats: int = 3
    batched_tokens: int | None = None
    runner: str | None = None
    limit_s: float | None = None
    check_sensitivity: bool = True
    batch_invariant: bool = False
    """Tokens that do not depend on the batch: a proof, slow."""
    rates: tuple[float, ...] = ()
    """With any, a chat is measured at these and no cells."""


class Bench:
    """Measures on an engine that it starts, into `start`, which is saved to `path` as it grows."""

    def __init__(
        self,
        spec: BenchSpec,
        model: Model,
        arms: list[Arm],
        cache: Cache,
        start: Start,
        path: Path | None,
        progress: Progress,
    ) -> None:
        self._spec = spec
        self._model = model
        self._workload: Workload = model.workload
        self._arms = arms
        self._cache = cache
        self._start = start
        self._path = path
        self._progress = progress
        self._unseen = itertools.count()
        self._is_ours = spec.connector == "lamina"
        self._until_s = time.monotonic() + (spec.limit_s or float("inf"))
        self._engine: Engine

    async def run(self, model_directory: Path) -> None:
        began_s = time.monotonic()
        self._engine = Engine.start(
            self._model,
            model_directory,
            self._cache.config,
            self._spec.batched_tokens,
            **self._engine_options(),
        )
        try:
            self._cache.wait_until_ready()
            self._progress(f"started in {time.monotonic() - began_s:.0f} s")
            self._start.batched_tokens = self._engine.batched_tokens
            self._start.engine = self._engine.description
            await self._measure()
        finally:
            self._engine.close()

    def _engine_options(self) -> dict[str, Any]:
        """What vLLM is started with besides."""
        return {}

    async def _measure(self) -> None:
        await self._measure_link()
        if self._is_ours and self._spec.check_sensitivity:
            await self._check_sensitivity()
        await self._fill()
        self._flush()
        for repeat in range(self._spec.repeats + 1):
            for cell in self._spec.cells:
                for arm in _shuffled(self._arms, repeat, cell):
                    if self._is_late():
                        return
                    await self._measure_set(arm, cell, repeat)
            if repeat == 0:
                continue
            for cell in self._spec.stream_cells:
                for arm in _shuffled(self._arms, repeat, cell):
                    if arm.source is Source.NOWHERE:
                        continue
                    if self._is_late():
                        return
                    await self._measure_streams(arm, cell, repeat)
        self._start.is_whole = True
        await self._measure_link()
        self._start.server = self._cache.counts()
        self._flush()

    async def _measure_link(self) -> None:
        nbytes = min(_LINK_BYTES, self._model.arena_bytes // 4)
        link_gbps = float(await self._engine.call_worker("lamina_link_gbps", nbytes))
        self._start.link_gbps = max(self._start.link_gbps, link_gbps)
        self._progress(f"link {link_gbps:.1f} GB/s")

    async def _check_sensitivity(self) -> None:
        """Alter pages of a hit in GPU memory: does what is generated depend on them?"""
        engine, tokens = self._engine, self._workload.output_tokens
        prompt = self._workload.prompt(0, self._workload.document_tokens, 0)
        await engine.forget()
        await engine.call_worker("lamina_clear_kv")
        await engine.ask(prompt, self._ours(_NO_CACHE), tokens)
        used = await engine.call_worker("lamina_used_blocks")
        true = (await engine.ask(prompt, self._ours(_NO_CACHE), tokens)).tokens
        rng = random.Random(0)

        async def is_noticed(layers: list[int]) -> bool:
            await engine.call_worker("lamina_replace_pages", layers, *rng.sample(used, 2))
            answer = await engine.ask(prompt, self._ours(_NO_CACHE), tokens)
            await engine.call_worker("lamina_restore_pages")
            return answer.tokens != true

        every = list(range(self._model.layers))
        pages = [await is_noticed([rng.choice(every)]) for _ in range(_SENSITIVITY_TRIES)]
        blocks = [await is_noticed(every) for _ in range(_SENSITIVITY_TRIES)]
        if (await engine.ask(prompt, self._ours(_NO_CACHE), tokens)).tokens != true:
            self.note("restored pages do not give the same tokens again")
        self._start.sensitivity = Sensitivity(
            pages_tried=len(pages),
            pages_noticed=sum(pages),
            blocks_tried=len(blocks),
            blocks_noticed=sum(blocks),
        )
        self._progress(f"altered KV noticed: pages {sum(pages)}, blocks {sum(blocks)} of 8")

    async def _fill(self) -> None:
        """Compute every document once, so that the cache stores it, and see that it is there."""
        await self._engine.forget()
        for number in range(self._workload.documents):
            await self._engine.ask(self._workload.document(number), self._ours(_STORE))
        if self._cache.config is None:
            return
        until_s = time.monotonic() + _STORE_PATIENCE_S
        await self._wait_until_stored(until_s)
        enough = self._workload.document_tokens - self._model.chunk_tokens - 1
        while True:
            await self._engine.forget()
            found = [await self._warm(number) for number in range(self._workload.documents)]
            if min(found) >= enough:
                break
            if time.monotonic() > until_s:
                raise LaminaError(
                    f"the cache holds only {min(found)} tokens of a document", "See its log"
                )
            await asyncio.sleep(0.5)
        self._progress("documents are stored")

    async def _wait_until_stored(self, until_s: float) -> None:
        """Of our own server it is known when all is in: before that, a reset of vLLM's cache would
        give up what is queued."""
        per_document = self._workload.document_tokens // self._model.chunk_tokens
        wanted = per_document * self._workload.documents
        while counts := self._cache.counts():
            found = int(counts["stored_chunks"] + counts["present_chunks"])
            if found >= wanted:
                return
            if time.monotonic() > until_s:
                raise LaminaError(f"only {found} of {wanted} chunks were stored", "See its log")
            await asyncio.sleep(0.05)

    async def _warm(self, document: int) -> int:
        """Bring a document into GPU memory; returns how many tokens some cache had.

        It goes with one more token: at least one is computed, and it must not be one of the
        document's, whose KV would then differ from what is stored by the order of additions.
        """
        prompt = [*self._workload.document(document), _ONE_MORE]
        return (await self._engine.ask(prompt, self._ours(_RETRIEVE_ALL))).cached_tokens

    async def _prepare(self, arm: Arm) -> None:
        """Bring the engine's own cache into the state that the arm begins with.

        The first request after a reset waits until the weights were looked at. That is one that is
        not timed: production does not reset before every hit.
        """
        if self._cache.config is not None:
            await self._engine.forget()
            await self._engine.ask([_ONE_MORE], self._ours(_NO_CACHE))
        if arm.source is Source.GPU:
            for number in range(self._workload.documents):
                await self._warm(number)

    def _prompt(self, arm: Arm, cell: Cell, repeat: int, document: int) -> list[int]:
        if not arm.own_prompts:
            return self._workload.prompt(document, cell.hit_tokens, cell.concurrency, repeat)
        if arm.source is Source.NOWHERE:
            return self._workload.unseen(next(self._unseen), self._workload.prompt_tokens)
        return self._workload.prompt(document, cell.hit_tokens, next(self._unseen), -repeat)

    async def _measure_set(self, arm: Arm, cell: Cell, repeat: int) -> None:
        """A request for each document, `concurrency` at once."""
        await self._prepare(arm)
        numbers = list(range(self._workload.documents))
        prompts = [self._prompt(arm, cell, repeat, number) for number in numbers]
        answered: list[Answer] = []
        try:
            for first in range(0, len(numbers), cell.concurrency):
                answered += await self._engine.ask_together(
                    prompts[first : first + cell.concurrency],
                    self._ours(arm.parameters),
                    self._workload.output_tokens,
                    with_margins=repeat == 0 and not arm.own_prompts,
                )
        except LaminaError as error:
            self.fail(f"repeat {repeat}, {cell}, {arm.name}: {error}")
            return
        for number, answer in zip(numbers, answered, strict=True):
            self._start.samples.append(_sample(arm, cell, repeat, number, answer))
        self._flush()
        mean_ms = sum(answer.ttft_ms for answer in answered) / len(answered)
        self._progress(f"repeat {repeat}, {cell}, {arm.name}: {mean_ms:.1f} ms")

    async def _measure_streams(self, arm: Arm, cell: Cell, repeat: int) -> None:
        """Hits come while other requests decode; what do they do to these?"""
        await self._prepare(arm)
        arrivals_s: list[list[float]] = [[] for _ in range(_STREAMS)]
        tokens = min(_STREAM_TOKENS, self._model.max_tokens // 2)
        streams = [
            asyncio.create_task(
                self._engine.ask(
                    self._workload.unseen(next(self._unseen), self._workload.stream_prompt_tokens),
                    self._ours(_NO_CACHE),
                    tokens,
                    on_output=lambda _, times=times: times.append(time.perf_counter()),  # type: ignore[misc]
                )
            )
            for times in arrivals_s
        ]
        try:
            while min(len(times) for times in arrivals_s) < _STREAM_LEAD_TOKENS:
                if any(stream.done() for stream in streams):
                    raise LaminaError("a decoding stream ended early", "See vLLM's log")
                await asyncio.sleep(0.005)
            began_s = time.perf_counter()
            ttft_ms: list[float] = []
            for first in range(0, self._workload.documents, cell.concurrency):
                prompts = [
                    self._prompt(arm, cell, -repeat, number)
                    for number in range(first, first + cell.concurrency)
                ]
                answers = await self._engine.ask_together(
                    prompts, self._ours(arm.parameters), self._workload.output_tokens
                )
                ttft_ms += [answer.ttft_ms for answer in answers]
            ended_s = time.perf_counter()
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        gaps_ms = [
            (after - before) * 1e3
            for times in arrivals_s
            for before, after in itertools.pairwise(times)
            if began_s <= after <= ended_s
        ]
        self._start.streams.append(
            StreamSample(
                arm=arm.name,
                hit_tokens=cell.hit_tokens,
                concurrency=cell.concurrency,
                repeat=repeat,
                gaps_ms=gaps_ms,
                ttft_ms=ttft_ms,
            )
        )
        self._flush()
        self._progress(f"repeat {repeat}, streams beside {cell}, {arm.name}: {len(gaps_ms)} gaps")

    def _ours(self, parameters: dict[str, Any]) -> dict[str, Any] | None:
        """Parameters that only Lamina's connector knows."""
        return parameters if self._is_ours else None

    def _is_late(self) -> bool:
        if time.monotonic() < self._until_s:
            return False
        if not any("limit" in note for note in self._start.notes):
            self.note("the time limit came before the end")
        return True

    def note(self, text: str) -> None:
        self._start.notes.append(text)
        self._progress(text)
        self._flush()

    def fail(self, text: str) -> None:
        self._start.errors.append(text)
        self._progress(text)
        self._flush()

    def _flush(self) -> None:
        if self._path is not None:
            save(Report(starts=[self._start]), self._path)


def _sample(arm: Arm, cell: Cell, repeat: int, document: int, answer: Answer) -> Sample:
    return Sample(
        arm=arm.name,
        hit_tokens=cell.hit_tokens,
        concurrency=cell.concurrency,
        repeat=repeat,
        batch=document // cell.concurrency,
        document=document,
        ttft_ms=answer.ttft_ms,
        tpot_ms=answer.tpot_ms,
        cached_tokens=answer.cached_tokens,
        expected_tokens=0 if arm.source is Source.NOWHERE else cell.hit_tokens,
        tokens=answer.tokens,
        comparable=not arm.own_prompts,
        margins=answer.margins,
    )


def _shuffled(arms: list[Arm], repeat: int, cell: Cell) -> list[Arm]:
    """Another order each time: no arm always follows the same one. The same in every run."""
    return random.Random(f"{repeat} {cell}").sample(arms, len(arms))
