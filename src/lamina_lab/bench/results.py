"""What `lamina bench transfer` is asked and what it found."""

from __future__ import annotations

import msgspec

from lamina.settings import AUTO, DataPath


class TransferSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to sweep. `document_bytes` is the size of one retrieve."""

    device: str = "host"
    layers: int = 32
    page_bytes: tuple[int, ...] = (64 << 10,)
    widths: tuple[int, ...] = (1, 8, 32)
    concurrency: tuple[int, ...] = (1, 4)
    document_bytes: int = 1 << 30
    rounds: int = 5
    link_gbps: float | None = None
    """Throttle of the host device."""
    data_path: DataPath = AUTO
    """How KV moves, as an engine's setting."""
    overlap: bool = False
    """Also measure computation beside transfers; needs a GPU and torch."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measured cell; medians over its rounds. Rates count all documents of a round."""

    page_bytes: int
    layers_per_slice: int
    concurrency: int
    consecutive_blocks: bool
    gbps: float
    share_of_link: float
    share_of_bare_loop: float | None = None
    """Of what a bare loop of the driver's copy calls reached just before, with such pages."""
    first_slice_ms: float
    first_slice_worst_ms: float
    last_slice_ms: float
    engine_ms_per_gib: float | None = None
    """What beginning a retrieve takes of the engine's thread; None where nobody measured it."""
    server_cores: float
    server_cpu_s_per_gib: float
    store_gbps: float
    store_share_of_link: float
    wrong_bytes: int


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Slowdowns are ratios of medians with and without transfers; times in ms.

    `gated_total_ms` is from the retrieve's call to the end of the last layer; `transfer_ms` and
    `compute_ms` are the same transfer and the same layers alone.
    """

    gemm_slowdown: float
    memory_bound_slowdown: float
    transfer_ms: float
    compute_ms: float
    first_slice_ms: float
    gated_total_ms: float

    @property
    def bound_ms(self) -> float:
        """What overlapping can reach at best, with 5 % for its own cost."""
        return max(self.transfer_ms, self.compute_ms) * 1.05 + self.first_slice_ms


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """The sweep, with the link's ceiling measured in the same run."""

    spec: TransferSpec
    link_retrieve_gbps: float
    link_store_gbps: float
    cells: list[Cell]
    server_gpu_bytes: int | None = None
    """GPU memory that the server takes: its context, nothing else."""
    overlap: Overlap | None = None

    @property
    def is_correct(self) -> bool:
        """Whether every byte of every cell was right."""
        return not any(cell.wrong_bytes for cell in self.cells)
