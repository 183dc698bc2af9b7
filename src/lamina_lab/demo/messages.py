"""What the demo tells its engine process, and what that reports, as JSON lines."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

RECOMPUTE = "recompute"
WHOLE = "whole"
NO_RELEASE = "layered, no early release"
EARLY_RELEASE = "layered, early release"
ARMS = (RECOMPUTE, WHOLE, NO_RELEASE, EARLY_RELEASE)


class DemoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The workload: each document is `hit_tokens` seen before plus a fresh tail."""

    documents: int = 3
    hit_tokens: int = 1024
    tail_tokens: int = 128
    layers: int = 16
    layers_per_slice: int = 1
    chunk_tokens: int = 64
    socket: str = ""


class Calibrated(msgspec.Struct, frozen=True, tag=True):
    """Seconds to compute a tail whose document is in engine memory; bytes of a document."""

    compute_s: float
    retrieve_bytes: int


class Populated(msgspec.Struct, frozen=True, tag=True):
    """A document is in the cache."""

    document: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One request of a hit round."""

    arm: str
    document: int
    ttft_s: float
    hit_tokens: int
    transfer_s: float | None
    """From the server's receipt of the retrieve until its last copy had taken effect, as the
    server's reply has it; None without a retrieve."""
    logits_sha256: str


class Timeline(msgspec.Struct, frozen=True, tag=True):
    """One hit of an arm, layer by layer; seconds since the request arrived."""

    arm: str
    arrived_s: list[float]
    compute_began_s: list[float]
    compute_ended_s: list[float]
    first_token_s: float


Report: TypeAlias = Calibrated | Populated | Measured | Timeline
"""A line from the engine process."""
