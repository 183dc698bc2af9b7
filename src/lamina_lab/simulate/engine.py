"""A model of an engine with a cache behind a link: what would N requests of this size do?

Discrete events, virtual time, and no randomness but the machine's noise. The engine schedules as
vLLM does: steps of bounded tokens, running requests before waiting ones, several prompts in one
step, the next step scheduled while one is under way. The link is one lane, retrieve after retrieve.
Each retrieve is decided by a real release policy, and `auto` sees only what the real meters
measured."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from lamina.client.release import Batch, Forecast, Meters, ReleasePolicy
from lamina_lab.simulate.model import Machine, Outcome, Workload


@dataclass(eq=False)
class _Retrieve:
    number: int
    begins_s: float
    landed_s: list[float]
    """When each layer has landed."""
    release_s: float
    """When the slices before release have."""


@dataclass(eq=False)
class _Request:
    number: int
    prompt: int
    outputs: int
    sent_s: float = 0.0
    arrives_s: float = 0.0
    scheduled: int = 0
    """Tokens that are computed or under way, retrieved ones included."""
    done: int = 0
    retrieve: _Retrieve | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def is_prefilling(self) -> bool:
        return self.scheduled < self.prompt

    @property
    def tokens_left(self) -> int:
        return self.prompt + self.outputs - 1 - self.scheduled


@dataclass(eq=False)
class _Step:
    work: list[tuple[_Request, int]]
    number: int = 0
    end_s: float = 0.0
    released: list[_Request] = field(default_factory=list)


def simulate(machine: Machine, workload: Workload, policy: ReleasePolicy | None) -> Outcome:
    """Run a workload; without a policy hits lie in GPU memory already: the floor."""
    return _Simulation(machine, workload, policy).run()


class _Simulation:
    def __init__(self, machine: Machine, workload: Workload, policy: ReleasePolicy | None) -> None:
        self._machine = machine
        self._workload = workload
        self._policy = policy
        self._now_s = 0.0
        self._gpu_free_s = 0.0
        self._lane_free_s = 0.0
        self._front_free_s = 0.0
        self._coming: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._retrieving: list[_Request] = []
        self._ready: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._under_way: deque[_Step] = deque()
        self._untold: list[tuple[_Retrieve, int]] = []
        self._ended: list[_Request] = []
        self._sent = self._steps = 0
        self._gaps: list[float] = []
        self._retrieved = 0
        self._reasons: dict[str, int] = {}
        self._forecasts: dict[int, Forecast | None] = {}
        self._step_dice = random.Random(machine.seed)
        self._link_dice = random.Random(-1 - machine.seed)
        self._meters = Meters(
            machine.layers, machine.token_bytes, machine.chunk_tokens, machine.step_tokens
        )
        self._warm_up()

    def run(self) -> Outcome:
        workload = self._workload
        for number in range(workload.streams):
            stream = _Request(-1 - number, 1, 1 << 30, scheduled=1, done=1)
            self._running.append(stream)
        for _ in range(min(workload.concurrency, workload.requests)):
            self._send()
        while len(self._ended) < workload.requests:
            self._turn()
        ended = sorted(self._ended, key=lambda request: request.number)
        return Outcome(
            first_token_s=tuple(request.first_token_s - request.sent_s for request in ended),
            last_token_s=tuple(request.last_token_s - request.sent_s for request in ended),
            stream_gaps_s=tuple(self._gaps),
            retrieved_tokens=self._retrieved,
            reasons=self._reasons,
            forecasts=tuple(self._forecasts[number] for number in sorted(self._forecasts)),
            seconds=self._now_s,
        )

    # Time

    def _turn(self) -> None:
        """One turn of the engine's loop."""
        self._receive()
        if len(self._under_way) < self._machine.steps_at_once:
            step = self._schedule()
            if step.work:
                self._launch(step)
                self._under_way.append(step)
                return
            self._see_releases(step)
            if self._under_way:
                self._complete(self._under_way.popleft())
            else:
                self._idle()
            self._promote(step)
        else:
            self._complete(self._under_way.popleft())

    def _idle(self) -> None:
        if self._retrieving or self._waiting:
            self._now_s += self._machine.idle_poll_s
        elif self._coming:
            self._now_s = max(self._now_s, min(request.arrives_s for request in self._coming))

    def _send(self) -> None:
        workload, machine = self._workload, self._machine
        if self._sent == workload.requests:
            return
        request = _Request(self._sent, workload.prompt_tokens, workload.output_tokens, self._now_s)
        self._sent += 1
        begins_s = max(self._front_free_s, self._now_s)
        self._front_free_s = begins_s + machine.arrival_turn_s
        request.arrives_s = begins_s + machine.arrival_s
        self._coming.append(request)

    def _receive(self) -> None:
        for request in [r for r in self._coming if r.arrives_s <= self._now_s]:
            self._coming.remove(request)
            self._waiting.append(request)

    # Steps

    def _schedule(self) -> _Step:
        """As vLLM: who runs first, then who was released, then who waits, in order."""
        self._now_s += self._machine.schedule_s
        budget = self._machine.step_tokens
        step = _Step([])
        for request in [r for r in self._running if r.tokens_left > 0]:
            budget -= self._give(step, request, budget)
        while self._ready and budget:
            request = self._ready.popleft()
            self._running.append(request)
            budget -= self._give(step, request, budget)
        while self._waiting and budget:
            request = self._waiting.popleft()
            if self._admit(request, step):
                self._running.append(request)
                budget -= self._give(step, request, budget)
            else:
                self._retrieving.append(request)
        return step

    def _give(self, step: _Step, request: _Request, budget: int) -> int:
        wanted = request.prompt - request.scheduled if request.is_prefilling else 1
        tokens = min(wanted, budget)
        if tokens:
            step.work.append((request, tokens))
        return tokens

    def _admit(self, request: _Request, step: _Step) -> bool:
        """Decide about a request's hit and begin to retrieve it; whether it runs in this step."""
        hit = self._workload.hit_tokens
        if self._policy is None:
            request.scheduled = request.done = hit
            return True
        query = self._meters.query(self._now_s, 0, hit, request.prompt - hit, self._batch())
        release = self._policy.decide(query)
        tokens = release.tokens_of(query)
        self._reasons[release.reason.value] = self._reasons.get(release.reason.value, 0) + 1
        self._forecasts[request.number] = release.forecast
        self._retrieved += tokens
        request.scheduled = request.done = tokens
        if not tokens:
            return True
        request.retrieve = self._copy(request, tokens, *release[:2])
        return not release.release_after_slices

    def _batch(self) -> Batch:
        """What the scheduler's side of a connector sees of the others."""
        prefilling = [r for r in self._running if r.is_prefilling]
        retrieving = [*self._retrieving, *self._ready]
        return Batch(
            decoding=sum(not r.is_prefilling and r.tokens_left > 0 for r in self._running),
            prefilling=len(prefilling),
            prefill_tokens=min(
                self._machine.step_tokens, sum(r.prompt - r.scheduled for r in prefilling)
            ),
            retrieving=len(retrieving),
            retrieving_tokens=sum(r.prompt - r.scheduled for r in retrieving),
            waiting=len(self._waiting),
        )

    def _open_retrieves(self, requests: list[_Request]) -> list[_Retrieve]:
        return [
            r.retrieve for r in requests if r.retrieve and r.retrieve.landed_s[-1] > self._now_s
        ]

    def _copy(self, request: _Request, tokens: int, width: int, after: int) -> _Retrieve:
        machine = self._machine
        layers = machine.layers
        asked_s = self._now_s + machine.launch_s
        begins_s = max(self._lane_free_s, asked_s)
        layer_s = machine.copy_s(tokens) * _noise(self._link_dice, machine.link_noise) / layers
        landed_s = [
            begins_s
            + min(layers, (layer // width + 1) * width) * layer_s
            + (layer // width + 1) * machine.slice_s
            for layer in range(layers)
        ]
        self._lane_free_s = landed_s[-1]
        release_s = landed_s[min(layers, after * width) - 1] if after else begins_s
        retrieve = _Retrieve(request.number, begins_s, landed_s, release_s)
        self._meters.copies.begin(retrieve.number, tokens, self._now_s)
        if after:
            self._meters.releases.begin(retrieve.number, min(layers, after * width) / layers)
        self._untold.append((retrieve, tokens))
        return retrieve

    def _launch(self, step: _Step) -> None:
        """Put a step on the GPU; its layers wait for their slices. The launching thread waits for
        the last of them, as the connector does when it settles."""
        machine = self._machine
        prefill = [(r, n) for r, n in step.work if r.is_prefilling]
        compute_s = machine.step_s + sum(
            n * (machine.token_s + machine.token_context_s * (r.scheduled + n / 2))
            for r, n in step.work
        )
        least_s = machine.prefill_step_s if prefill else machine.decode_step_s
        step_s = max(compute_s, least_s) * _noise(self._step_dice, machine.step_noise)
        layer_s = step_s / machine.layers
        retrieves = self._open_retrieves([r for r, _ in step.work])
        prefill_tokens = sum(n for _, n in prefill)
        context = sum(n * r.scheduled for r, n in prefill) // max(1, prefill_tokens)
        idle_since_s = self._meters.steps.queue.idle_since_s
        for request, _ in prefill:
            self._meters.releases.scheduled(request.number, self._now_s, idle_since_s)
        self._steps += 1
        step.number = self._steps
        self._meters.steps.begin(step.number, self._now_s, prefill_tokens, context, bool(retrieves))
        time_s = max(self._gpu_free_s, self._now_s + machine.launch_s)
        for layer in range(machine.layers):
            time_s = max([time_s, *(retrieve.landed_s[layer] for retrieve in retrieves)]) + layer_s
        step.end_s = self._gpu_free_s = time_s
        self._now_s = max(
            [self._now_s + machine.launch_s, *(retrieve.landed_s[-1] for retrieve in retrieves)]
        )
        self._see_releases(step)
        for request, tokens in step.work:
            request.scheduled += tokens

    def _see_releases(self, step: _Step) -> None:
        step.released = [
            r
            for r in self._retrieving
            if r.retrieve is not None and r.retrieve.release_s <= self._now_s
        ]
        for request in step.released:
            self._retrieving.remove(request)
        machine = self._machine
        for retrieve, tokens in [
            item for item in self._untold if item[0].landed_s[-1] <= self._now_s
        ]:
            self._untold.remove((retrieve, tokens))
            landed_s = retrieve.landed_s[-1]
            nbytes = tokens * machine.token_bytes
            copied_s = self._meters.copies.end(retrieve.number, landed_s, nbytes)
            if copied_s is not None:
                self._meters.releases.landed(retrieve.number, landed_s, copied_s)

    def _promote(self, step: _Step) -> None:
        self._ready.extend(step.released)

    def _complete(self, step: _Step) -> None:
        self._now_s = max(self._now_s, step.end_s)
        self._meters.steps.end(step.number, self._now_s)
        self._promote(step)
        for request, tokens in step.work:
            request.done += tokens
            if request.number < 0:
                self._gaps.append(self._now_s - request.sent_s)
                request.sent_s = self._now_s
            elif request.done >= request.prompt and not request.first_token_s:
                request.first_token_s = self._now_s
            if request.done == request.prompt + request.outputs - 1:
                request.last_token_s = self._now_s
                self._running.remove(request)
                self._ended.append(request)
                self._send()

    def _warm_up(self) -> None:
        """What the meters learn while documents are computed for the first time."""
        machine = self._machine
        self._now_s = -1e6
        for _ in range(5):
            for context in range(0, 16_384, machine.step_tokens):
                tokens = machine.step_tokens
                token_s = machine.token_s + machine.token_context_s * (context + tokens / 2)
                self._learn(tokens, context, machine.step_s + tokens * token_s)
            self._learn(0, 0, machine.decode_step_s)
        self._now_s = 0.0

    def _learn(self, tokens: int, context: int, took_s: float) -> None:
        self._steps += 1
        self._meters.steps.begin(self._steps, self._now_s, tokens, context, False)
        self._now_s += took_s * _noise(self._step_dice, self._machine.step_noise)
        self._meters.steps.end(self._steps, self._now_s)


def _noise(dice: random.Random, deviation: float) -> float:
    return math.exp(dice.gauss(0.0, deviation)) if deviation else 1.0
