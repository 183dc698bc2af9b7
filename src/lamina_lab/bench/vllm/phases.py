"""What a request's first-token time is made of, on every arm alike. Pure.

`Passage` is what the engine's scheduler saw (`trace`); with what the client saw it makes `Phases`.
All clocks are `time.monotonic` of one host.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Passage(msgspec.Struct, kw_only=True):
    """One request's way through vLLM's scheduler, in seconds. Each is of the first time only: what
    happens after the first token, or after a preemption, is not told."""

    request: str
    queued_s: float
    has_connector: bool
    passed_s: float | None = None
    """When the next scheduling pass began."""
    lookup_s: float = 0.0
    """In which vLLM asked the connector, or was told that the answer is not there yet."""
    allocated_s: float | None = None
    retrieved_tokens: int = 0
    is_asynchronous: bool = False
    """Whether the request waits outside the batch while it retrieves."""
    released_s: float | None = None
    landed_s: float | None = None
    """When all slices were in their pages, by the server's account: only Lamina's tells."""
    scheduled_s: float | None = None
    first_token_s: float | None = None

    def note_lookup(self, asked_s: float, ended_s: float, unanswered_s: float | None) -> None:
        """vLLM asked; it last did so in vain until `unanswered_s`."""
        self.lookup_s += ended_s - (asked_s if unanswered_s is None else unanswered_s)


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """In ms; together the first-token time. None: not there, or not to be known, on this arm."""

    frontend: float
    """vLLM's frontend: from the client's call to the scheduler's queue; the token's way back."""
    step: float
    """Until the step is over that was under way: the next scheduling pass."""
    queue: float
    """Waiting for blocks (or a place in a step), without the lookup."""
    lookup: float | None
    lane: float | None
    """From having blocks until released: behind other transfers, and its own. Without a release,
    in a step that waits for all slices, until they have landed: computing hides behind it."""
    placing: float | None
    """From the release until it is in a step and all its slices are in their pages."""
    computing: float
    """The rest: in steps. With what is not to be known of lane and placing."""


PHASES = Phases.__struct_fields__


def phases_of(passage: Passage, sent_s: float, received_s: float) -> Phases | None:
    """None for a request that never had a first token in the scheduler's eyes."""
    scheduled_s, first_s = passage.scheduled_s, passage.first_token_s
    if scheduled_s is None or first_s is None or passage.passed_s is None:
        return None
    blocks_s = scheduled_s if passage.allocated_s is None else passage.allocated_s
    has_connector = passage.has_connector
    lane_s: float | None = 0.0 if has_connector else None
    placing_s = lane_s
    ready_s = blocks_s
    if passage.retrieved_tokens:
        landed_s = None if passage.landed_s is None else min(passage.landed_s, first_s)
        if passage.is_asynchronous and passage.released_s is not None:
            lane_s = passage.released_s - blocks_s
            ready_s = max(scheduled_s, passage.released_s, landed_s or 0.0)
            placing_s = ready_s - passage.released_s
        elif landed_s is not None:
            ready_s = max(blocks_s, landed_s)
            lane_s, placing_s = ready_s - blocks_s, 0.0
        else:
            lane_s = placing_s = None
    return Phases(
        frontend=_ms(passage.queued_s - sent_s + received_s - first_s),
        step=_ms(passage.passed_s - passage.queued_s),
        queue=_ms(blocks_s - passage.passed_s - passage.lookup_s),
        lookup=_ms(passage.lookup_s) if has_connector else None,
        lane=None if lane_s is None else _ms(lane_s),
        placing=None if placing_s is None else _ms(placing_s),
        computing=_ms(first_s - ready_s),
    )


def read_passages(path: Path) -> dict[str, Passage]:
    """What `trace` has written so far, by the name that vLLM gives to a request."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    passages = [msgspec.json.decode(line, type=Passage) for line in lines]
    return {passage.request: passage for passage in passages}


def passage_named(passages: dict[str, Passage], name: str) -> Passage | None:
    """Of the request that the client called `name`: vLLM may append something of its own."""
    return next(
        (p for request, p in passages.items() if request == name or request.startswith(f"{name}-")),
        None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
