"""What the server counts. Plain integers on the event loop; read by `Stats` and the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """All only grow."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    leases_expired: int = 0
    leases_refused: int = 0
    """Hits told as misses because their engine had too many leases."""
    retrieves: int = 0
    retrieves_failed: int = 0
    retrieved_bytes: int = 0
    retrieve_us: int = 0
    first_slice_us: int = 0
    stores: int = 0
    stores_failed: int = 0
    stores_void: int = 0
    """Given up by their engine before they were whole or found; not counted as failed."""
    stored_chunks: int = 0
    present_chunks: int = 0
    dropped_chunks: int = 0
    stored_bytes: int = 0
    overdue_transfers: int = 0
    """Cancelled because they had not ended in time."""
    log_lines_dropped: int = 0
    """Nobody read the log in time, or it could not be written; counted by the log's writer."""
    refused: Counter[str] = field(default_factory=Counter)
    """Typed errors sent, by code."""

    def totals(self) -> dict[str, int]:
        """Every plain count by name."""
        names = (f.name for f in fields(self) if f.name != "refused")
        return {name: getattr(self, name) for name in names}
