"""Statistics through vLLM's own hooks: its log line, and its `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


@dataclass
class SchedulerCounts:
    """Since the last report, on the scheduler's side."""

    loads: int = 0
    loaded_tokens: int = 0
    recomputed: int = 0
    failed: int = 0
    stored_chunks: int = 0
    dropped_chunks: int = 0


@dataclass
class WorkerCounts:
    """Since the last report, on the worker's side."""

    releases: int = 0
    release_s: float = 0.0
    stall_s: float = 0.0
    failed: int = 0
    loaded_bytes: int = 0


DESCRIPTIONS = {
    "loads": "Loads begun.",
    "loaded_tokens": "Tokens of the loads begun: the hits.",
    "recomputed": "Requests whose load failed before they ran, and who computed instead.",
    "failed": "Loads that failed after their request was released.",
    "stored_chunks": "Chunks sent to be stored.",
    "dropped_chunks": "Chunks not stored because too many blocks were held.",
    "releases": "Requests released from an asynchronous load.",
    "release_s": "Seconds from the start of those loads to the release.",
    "stall_s": "Seconds that the launching thread waited for slices.",
    "loaded_bytes": "Bytes of loads that ended well.",
}


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
