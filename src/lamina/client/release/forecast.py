"""What the policy `auto` expected of each way to retrieve a hit, and why it chose one of them."""

from __future__ import annotations

from enum import Enum

import msgspec


class Why(Enum):
    """What decided between the candidates; the value is for log lines."""

    LEAST = "delays everybody least"
    NO_GAIN = "fewer tokens would gain too little"
    UNSURE = "fewer tokens would lose, were computing as slow as the slowest step of late"


class Candidate(msgspec.Struct, frozen=True):
    """One way to retrieve a hit, or so many of its tokens. Seconds; those that end in `_after_s`
    begin with the decision.

    It is synchronous where no layers are retrieved before release, and `stall_s` is then how long
    its step waits for slices. `link_s` is copying, without the queue ahead; `compute_s` the step
    that it is computed in, with the prompts of others that are in it, and what does not fit that
    step. `others_s` is by how much it delays others, all together.
    """

    retrieve_tokens: int
    layers_before: int
    link_s: float
    compute_s: float
    stall_s: float
    ready_after_s: float
    first_token_after_s: float
    others_s: float

    @property
    def cost_s(self) -> float:
        """What is weighed."""
        return self.first_token_after_s + self.others_s

    def __str__(self) -> str:
        if not self.retrieve_tokens:
            way = "compute all"
        elif not self.layers_before:
            way = f"retrieve {self.retrieve_tokens} in step: stall {_ms(self.stall_s)}"
        else:
            way = (
                f"retrieve {self.retrieve_tokens} outside: "
                f"ready {_ms(self.ready_after_s)} after {self.layers_before} layers"
            )
        return (
            f"{way}, link {_ms(self.link_s)}, computing {_ms(self.compute_s)}, "
            f"first token {_ms(self.first_token_after_s)}, others {_ms(self.others_s)}"
        )


class Forecast(msgspec.Struct, frozen=True):
    """What was expected when a hit was weighed. Seconds, from the decision on.

    The link has work for `lane_busy_s`, the engine for `engine_busy_s`; an idle engine schedules
    who was released after `release_s`. `candidates` are the ones
    that were compared in the end, `chosen` among them: with the whole hit, with the best number of
    fewer tokens, with none.
    """

    lane_busy_s: float
    engine_busy_s: float
    release_s: float
    chosen: Candidate
    why: Why
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        """One line, in milliseconds; the chosen one first."""
        others = (str(each) for each in self.candidates if each != self.chosen)
        return "; ".join(
            [
                f"ms: lane busy {_ms(self.lane_busy_s)}, engine {_ms(self.engine_busy_s)}, "
                f"release {_ms(self.release_s)}",
                f"{self.chosen} ({self.why.value})",
                *others,
            ]
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
