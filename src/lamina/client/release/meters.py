"""What the policy `auto` knows: how fast the link and the engine are, and how busy.

Times are seconds of any one monotonic clock, passed in.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lamina.client.release.base import Batch, ReleaseQuery, Speed
from lamina.client.release.jobs import JobQueue, Recent
from lamina.client.release.released import ReleaseMeter

LEAST_COPY_BYTES = 4 << 20
"""A smaller retrieve says more about latency than about the link."""
LEAST_STEP_TOKENS = 256
"""A smaller step says more about launching than about computing."""
MOST_SKIPPED = 16
"""After so many hits that were computed instead of retrieved one is retrieved, to see what it
takes."""
PRIOR_LINK_GBPS = 50.0
"""Until measured: what 16 lanes of PCIe 5 give (H200: 54)."""


class CopyMeter:
    """How long the link takes for the KV of a token, and when it is free.

    Who computes all hits because the link seems slow learns nothing more about it: so after
    `MOST_SKIPPED` of them what was measured is forgotten, and the next hit is retrieved.
    """

    def __init__(self, token_bytes: int) -> None:
        self.token_bytes = token_bytes
        self._s_per_byte = Recent(enough=1)
        self._skipped = 0
        self.queue = JobQueue()

    @property
    def s_per_token(self) -> float:
        measured = self._s_per_byte.value
        return self.token_bytes * (measured or 1e-9 / PRIOR_LINK_GBPS)

    def begin(self, retrieve: int, tokens: int, now_s: float) -> None:
        """The retrieve with this number is asked for."""
        self.queue.begin(retrieve, now_s, tokens * self.s_per_token)

    def end(
        self, retrieve: int, end_s: float, nbytes: int = 0, begun_s: float | None = None
    ) -> float | None:
        """A retrieve has landed (`nbytes`) or is over without (0): how long it was copied. None for
        one that is unknown."""
        worked_s = self.queue.end(retrieve, end_s, begun_s)
        if worked_s is not None and worked_s > 0 and nbytes >= LEAST_COPY_BYTES:
            self._s_per_byte.add(worked_s / nbytes)
            self._skipped = 0
        return worked_s

    def skipped(self) -> None:
        """A hit was computed instead of retrieved."""
        self._skipped += 1
        if self._skipped > MOST_SKIPPED:
            self._s_per_byte = Recent(enough=1)
            self._skipped = 0


class _Step(NamedTuple):
    number: int
    prefill_tokens: int
    context_tokens: int
    waits: bool


class StepMeter:
    """How long steps take, by what they compute.

    Time per token grows with the tokens before it, so it is kept by their number, in octaves. A
    step that waits for slices says nothing about computing.
    """

    def __init__(self) -> None:
        self.queue = JobQueue()
        self._prefill: dict[int, Recent] = {}
        self._any_prefill = Recent()
        self._small = Recent()
        self._decode = Recent()
        self._under_way: deque[_Step] = deque()

    @property
    def decode_s(self) -> float:
        """A step without prompts; 0 before any was measured."""
        return self._decode.value or 0.0

    @property
    def least_prefill_s(self) -> float:
        """A step with little of a prompt: launching it takes longer than computing."""
        return max(self._small.value or 0.0, self.decode_s)

    def s_per_token(self, context_tokens: int) -> float | None:
        """Computing a token after about `context_tokens`; None before any was measured.

        Where that length was not measured enough the nearest one that was stands for it, or all.
        """
        return self._kept(context_tokens).value

    def slowest_s_per_token(self, context_tokens: int) -> float:
        """The longest of the latest samples behind `s_per_token`; 0 before any."""
        return self._kept(context_tokens).largest

    def _kept(self, context_tokens: int) -> Recent:
        wanted = context_tokens.bit_length()
        measured = [(abs(o - wanted), o) for o, kept in self._prefill.items() if kept.value]
        return self._prefill[min(measured)[1]] if measured else self._any_prefill

    def step_s(self, tokens: int, context_tokens: int) -> float:
        """A step that computes `tokens` of prompts; 0 before anything was measured."""
        if not tokens:
            return self.decode_s
        return max(self.least_prefill_s, tokens * (self.s_per_token(context_tokens) or 0.0))

    def begin(
        self, number: int, now_s: float, prefill_tokens: int, context_tokens: int, waits: bool
    ) -> None:
        """A step was scheduled, with a number above those before. It computes `prefill_tokens` of
        prompts, after `context_tokens` on average, and perhaps `waits` for slices."""
        if waits:  # the engine's thread will wait: it sees late that earlier steps are over
            self._under_way = deque(step._replace(waits=True) for step in self._under_way)
        self.queue.begin(number, now_s, self.step_s(prefill_tokens, context_tokens))
        self._under_way.append(_Step(number, prefill_tokens, context_tokens, waits))

    def end(self, number: int, now_s: float) -> None:
        """The step with this number is over, and all before it."""
        while self._under_way and self._under_way[0].number <= number:
            step = self._under_way.popleft()
            worked_s = self.queue.end(step.number, now_s)
            if worked_s and not step.waits and step.number == number:
                self._add(step, worked_s)

    def _add(self, step: _Step, worked_s: float) -> None:
        tokens = step.prefill_tokens
        if tokens >= LEAST_STEP_TOKENS:
            octave = step.context_tokens.bit_length()
            self._prefill.setdefault(octave, Recent()).add(worked_s / tokens)
            self._any_prefill.add(worked_s / tokens)
        elif tokens:
            self._small.add(worked_s)
        else:
            self._decode.add(worked_s)


class Meters:
    """All of one engine, and the questions they answer."""

    def __init__(self, layers: int, token_bytes: int, chunk_tokens: int, step_tokens: int) -> None:
        """`token_bytes` are the KV of a token in all layers; `step_tokens` the bound of a step."""
        self.layers = layers
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self.copies = CopyMeter(token_bytes)
        self.steps = StepMeter()
        self.releases = ReleaseMeter()

    def query(
        self,
        now_s: float,
        start_tokens: int,
        retrieve_tokens: int,
        compute_tokens: int,
        batch: Batch,
    ) -> ReleaseQuery:
        """What a policy is asked about a hit of `retrieve_tokens` beyond the first
        `start_tokens`."""
        return ReleaseQuery(
            self.layers,
            retrieve_tokens,
            compute_tokens,
            self._chunk_tokens,
            self._step_tokens,
            batch,
            Speed(
                self.copies.s_per_token,
                self.steps.s_per_token(start_tokens + retrieve_tokens),
                self.steps.least_prefill_s,
                self.steps.decode_s,
                self.steps.slowest_s_per_token(start_tokens + retrieve_tokens),
                self.releases.release_s,
            ),
            self.copies.queue.busy_s(now_s),
            self.steps.queue.busy_s(now_s),
        )
