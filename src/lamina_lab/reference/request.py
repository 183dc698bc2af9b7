"""A request and its states.

WAITING ──▶ RETRIEVING ──▶ RUNNING ──▶ FINISHED          any but the last ──▶ ABORTED
   │  ▲        │          │  ▲
   │  └────────┘ (failed) │  │
   └──────────────────────┼──┘ (no hit, or a synchronous retrieve)
      ▲                   ▼
      └────────────── PREEMPTED
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from lamina.client import Gate, Prefix
from lamina.client.release import ReleasePolicy


class State(Enum):
    WAITING = "waiting"
    RETRIEVING = "retrieving"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False)
class Request:
    """One prompt on its way. Times are `time.perf_counter()` readings in seconds."""

    name: str
    prompt: list[int]
    max_new_tokens: int
    policy: ReleasePolicy | None = None
    """How to retrieve a hit; None recomputes instead of looking it up."""
    store: bool = True
    """Whether to store what is computed."""
    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    """Tokens whose KV is in `blocks`, retrieved or computed."""
    prefix: Prefix | None = None
    """What the cache server has of it; None without one."""
    gate: Gate | None = None
    hit_tokens: int = 0
    """Tokens that the last retrieve retrieved."""
    failures: int = 0
    """Retrieves that failed; after one, the request recomputes."""
    first_logits: npt.NDArray[np.float32] | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Everything that has KV or needs it: the prompt and what was generated."""
        return self.prompt + self.output

    @property
    def is_over(self) -> bool:
        return self.state in (State.FINISHED, State.ABORTED)

    @property
    def ttft_s(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token_s - self.arrived_s
