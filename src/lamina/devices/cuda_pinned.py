"""What is pinned of the arena, and where copies must be cut for it."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from lamina.copies import CopyList
from lamina.devices import cuda_driver as driver
from lamina.errors import DeviceError
from lamina.geometry import Int64Array

log = logging.getLogger(__name__)


class PinnedSegments:
    """What is pinned of the arena, once for all GPUs. Filled by one thread, read by the lanes."""

    def __init__(self) -> None:
        self._base = 0
        self._segment_bytes = 0  # all segments but the last are of one size
        self._pinned: set[int] = set()
        self._failed: set[int] = set()

    @property
    def incomplete(self) -> bool:
        """Whether something could not be pinned."""
        return bool(self._failed)

    def holds(self, address: int) -> bool:
        """Whether this segment is pinned: one GPU's device is enough for all."""
        return address in self._pinned

    def split(self, copies: CopyList) -> CopyList:
        """Cut pieces at the edges of segments: a copy may not span two registrations."""
        while (across := self._spanned_by(copies)) is not None:
            copies = _cut(copies, across, self._next_edge(copies.host))
        return copies

    def add(self, address: int, nbytes: int) -> None:
        """Pin a segment; some GPU's context must be current. Raises `DeviceError`."""
        if not self._segment_bytes:
            self._base, self._segment_bytes = address, nbytes
        driver.pin(address, nbytes)
        self._pinned.add(address)
        self._failed.discard(address)

    def note_failure(self, address: int, error: DeviceError) -> None:
        """A device could not pin a segment; the next one may."""
        if not self._failed:
            log.warning(
                "host memory cannot be pinned, copies will be slow: %s; give a smaller `--arena`",
                error.cause,
            )
        self._failed.add(address)

    def _spanned_by(self, copies: CopyList) -> npt.NDArray[np.bool_] | None:
        """Which pieces span two segments; None when none does, which is nearly always."""
        if not self._segment_bytes:
            return None
        begin = (copies.host - self._base) % self._segment_bytes
        across: npt.NDArray[np.bool_] = begin + copies.size > self._segment_bytes
        return across if across.any() else None

    def _next_edge(self, host: Int64Array) -> Int64Array:
        """Where the segment of each address ends."""
        segment = (host - self._base) // self._segment_bytes
        edge: Int64Array = self._base + (segment + 1) * self._segment_bytes
        return edge


def _cut(copies: CopyList, across: npt.NDArray[np.bool_], edge: Int64Array) -> CopyList:
    """Cut the pieces in `across` in two, at `edge` of the host side."""
    head = np.where(across, edge - copies.host, copies.size)
    rest = CopyList(*(array[across] for array in copies))
    skipped = head[across]
    return CopyList(
        np.concatenate([copies.engine, rest.engine + skipped]),
        np.concatenate([copies.host, rest.host + skipped]),
        np.concatenate([head, rest.size - skipped]),
    )
