"""What is simulated, and what comes out."""

from __future__ import annotations

import msgspec

from lamina.client.release import Forecast

GIB = 2**30


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Engine and link. Defaults: Llama-3.1-8B on vLLM 0.26 and an H200 (2026-11); those of
    computing are fitted to first-token times of hits in GPU memory."""

    layers: int = 32
    token_bytes: int = 128 << 10
    chunk_tokens: int = 256
    step_tokens: int = 2048
    link_s_per_gib: float = 19.7e-3
    slice_s: float = 5e-6
    """What each slice adds on the link."""
    token_s: float = 20e-6
    """Computing a token with nothing before it, and more for each token before it."""
    token_context_s: float = 1.0e-9
    step_s: float = 3.7e-3
    """What each step adds."""
    prefill_step_s: float = 22e-3
    """The shortest step with a prompt in it (launching), and without."""
    decode_step_s: float = 6e-3
    arrival_s: float = 13e-3
    """From sending a request to the scheduler, of which the next one waits for `arrival_turn_s`."""
    arrival_turn_s: float = 3.5e-3
    schedule_s: float = 0.5e-3
    launch_s: float = 1e-3
    idle_poll_s: float = 1e-3
    steps_at_once: int = 2
    """2: a step is scheduled while one is under way."""
    step_noise: float = 0.0
    """Each step's computing takes `exp(n)` times as long, n normal with this deviation: 0.1 is
    about 10 %. So does each retrieve's copying with `link_noise`; both draw from `seed`."""
    link_noise: float = 0.0
    seed: int = 0

    def copy_s(self, tokens: int) -> float:
        return tokens * self.token_bytes * self.link_s_per_gib / GIB


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency` clients that each send the next request when the last has ended. Prompts begin
    with `hit_tokens` that the cache holds. Beside them `streams` requests only decode."""

    hit_tokens: int
    prompt_tokens: int = 15_154
    output_tokens: int = 16
    concurrency: int = 1
    requests: int = 8
    streams: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from sending to the first and to the last token, in order of sending; `stream_gaps_s`
    between the tokens of streams. `retrieved_tokens`, `reasons` and `forecasts`: what was decided,
    and what the policy expected of each hit, if it says so."""

    first_token_s: tuple[float, ...]
    last_token_s: tuple[float, ...]
    stream_gaps_s: tuple[float, ...]
    retrieved_tokens: int
    reasons: dict[str, int]
    forecasts: tuple[Forecast | None, ...]
    seconds: float

    @property
    def mean_s(self) -> float:
        return sum(self.first_token_s) / len(self.first_token_s)

    @property
    def mean_total_s(self) -> float:
        return sum(self.last_token_s) / len(self.last_token_s)
