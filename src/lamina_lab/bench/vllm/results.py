"""What was measured, as it is written to disk: every sample, nothing summed up."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lamina.errors import LaminaError
from lamina_lab.bench.vllm.chat import Chat
from lamina_lab.bench.vllm.phases import Phases
from lamina_lab.bench.vllm.workload import Cell, Workload


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Requests of one `batch` were sent at once. `repeat` 0 is the proof: untimed."""

    arm: str
    hit_tokens: int
    concurrency: int
    repeat: int
    batch: int
    document: int
    ttft_ms: float
    tpot_ms: float | None
    cached_tokens: int
    expected_tokens: int
    """Tokens that had to be found in a cache."""
    tokens: list[int]
    comparable: bool = True
    """Whether the floor arm had the same prompt."""
    margins: list[float] = []

    @property
    def cell(self) -> Cell:
        return Cell(self.hit_tokens, self.concurrency)


class StreamSample(msgspec.Struct, frozen=True, kw_only=True):
    """Inter-token gaps of decoding streams while a pass of hits came and was served."""

    arm: str
    hit_tokens: int
    concurrency: int
    repeat: int
    gaps_ms: list[float]
    ttft_ms: list[float]


class ChatSample(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, in run `run` at `rate` a second."""

    arm: str
    rate: float
    run: int
    conversation: int
    turn: int
    """From 1, which has the cold document."""
    sent_s: float
    """Since its part of the run began."""
    late_ms: float
    """The driver's own: sent so long after it was due."""
    was_deferred: bool
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    phases: Phases | None = None


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """How often other bytes in one page, or in one block of all layers, changed a hit's tokens."""

    pages_tried: int
    pages_noticed: int
    blocks_tried: int
    blocks_noticed: int


class Start(msgspec.Struct, kw_only=True):
    """One start of one engine. `link_gbps` is the same run's ceiling."""

    connector: str
    model: str
    command: str
    date: str
    host: dict[str, str]
    engine: dict[str, str] = {}
    workload: Workload
    is_exact: bool = False
    """vLLM computed independently of batches (VLLM_BATCH_INVARIANT): for tokens, not for times."""
    batched_tokens: int = 0
    link_gbps: float = 0.0
    sensitivity: Sensitivity | None = None
    samples: list[Sample] = []
    streams: list[StreamSample] = []
    chat: Chat | None = None
    chats: list[ChatSample] = []
    gpu_blocks: int = 0
    """A chat's: vLLM's blocks of GPU memory."""
    server: dict[str, float] = {}
    notes: list[str] = []
    errors: list[str] = []
    """Requests that gave no tokens, and what ended the run early."""
    is_whole: bool = False
    """Whether all that was asked for has been measured."""


class Report(msgspec.Struct, kw_only=True):
    """One or more starts."""

    starts: list[Start]


def save(report: Report, path: Path) -> None:
    """Replace `path` in one step: a process killed at any time leaves a whole file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(msgspec.json.encode(report))
    partial.replace(path)


def load(paths: list[Path]) -> Report:
    """The starts of several files.

    Raises `LaminaError` for one that is no report, and for starts whose cells are not the same.
    """
    starts = []
    for path in paths:
        try:
            starts += msgspec.json.decode(path.read_bytes(), type=Report).starts
        except (OSError, msgspec.DecodeError) as error:
            raise LaminaError(f"{path} is no report of this benchmark", str(error)) from error
    sizes = sorted({start.batched_tokens for start in starts})
    if len(sizes) > 1:
        raise LaminaError(
            f"these starts have steps of {' and '.join(map(str, sizes))} tokens",
            "Merge starts of one step size",
        )
    return Report(starts=starts)
