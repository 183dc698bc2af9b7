"""Statistics through vLLM's own hooks: its log line, and its `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lamina.client import Reason


def _count(text: str) -> Any:
    """A counter from zero, and what an operator reads about it."""
    return field(default=0, metadata={"text": text})


@dataclass
class SchedulerCounts:
    """Since the last report, on the scheduler's side."""

    faults: int = _count(
        "Faults of Lamina's own that the engine survived; it goes on without the cache."
    )
    retrieves: int = _count("Retrieves begun.")
    retrieved_tokens: int = _count("Tokens of the retrieves begun: the hits.")
    recomputed: int = _count(
        "Requests whose retrieve failed before they ran, and who computed instead."
    )
    failed: int = _count("Retrieves that failed after their request was released.")
    stored_chunks: int = _count("Chunks sent to be stored.")
    dropped_chunks: int = _count(
        "Chunks not stored: too many blocks were held, or the server was not usable."
    )
    retrieves_fixed: int = _count("Retrieves as the settings fix them.")
    retrieves_unmeasured: int = _count("Retrieves by 'auto' before it had measured anything.")
    retrieves_hidden: int = _count(
        "Retrieves by 'auto' in the request's own step, which computes longer."
    )
    retrieves_alone: int = _count(
        "Retrieves by 'auto' in the request's own step, which waits, alone."
    )
    retrieves_cheaper: int = _count(
        "Retrieves by 'auto' in a step that waits although others are in it."
    )
    retrieves_outside: int = _count("Retrieves by 'auto' whose requests wait outside the batch.")
    hits_recomputed: int = _count("Hits that 'auto' computed instead of retrieving.")
    hit_tokens_computed: int = _count("Tokens of hits that were computed because that is sooner.")
    expected_release_s: float = _count("What 'auto' expected release_s to be.")
    first_tokens: int = _count("First tokens whose time 'auto' predicted.")
    first_token_s: float = _count("Seconds from those decisions to the first token.")
    expected_first_token_s: float = _count("What 'auto' expected first_token_s to be.")

    def count_decision(self, reason: Reason) -> None:
        """One more hit that was retrieved, or not, for this reason."""
        name = "hits_recomputed" if reason is Reason.RECOMPUTED else f"retrieves_{reason.value}"
        setattr(self, name, getattr(self, name) + 1)


@dataclass
class WorkerCounts:
    """Since the last report, on the worker's side."""

    releases: int = _count("Requests released from an asynchronous retrieve.")
    release_s: float = _count("Seconds from the start of those retrieves to the release.")
    stall_s: float = _count("Seconds that the launching thread waited for slices.")
    retrieved_bytes: int = _count("Bytes of retrieves that ended well.")
    copies: int = _count("Retrieves of which the server has told how long they took.")
    copy_s: float = _count("Seconds of those retrieves, from asking to landing.")


DESCRIPTIONS: dict[str, str] = {
    count.name: count.metadata["text"]
    for count in (*fields(SchedulerCounts), *fields(WorkerCounts))
}
"""What vLLM's `/metrics` says of each."""


@dataclass
class LaminaStats(KVConnectorStats):
    """Sums by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> LaminaStats:
        names = self.data.keys() | other.data.keys()
        return LaminaStats({n: self.data.get(n, 0) + other.data.get(n, 0) for n in names})

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


def take(counts: SchedulerCounts | WorkerCounts) -> LaminaStats | None:
    """The counts since the last call; None when nothing happened."""
    data = {f.name: getattr(counts, f.name) for f in fields(counts) if getattr(counts, f.name)}
    for name in data:
        setattr(counts, name, 0)
    return LaminaStats(data) if data else None


class LaminaPromMetrics(KVConnectorPromMetrics):
    """One counter per name, `vllm:lamina_<name>`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: {
                engine: counter.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }
            for name, text in DESCRIPTIONS.items()
            for counter in [
                self._counter_cls(
                    name=f"vllm:lamina_{name}",
                    documentation=text,
                    labelnames=self._labelnames,
                )
            ]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
