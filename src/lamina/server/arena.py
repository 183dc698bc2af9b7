"""The arena: the host memory of all chunks, and who has which part of it.

Anonymous memory on huge pages, reserved at once and filled (touched) segment by segment by a
background thread, so that the server answers long before a large arena is resident. Only filled
memory is handed out. Allocation is best fit over free extents that join with their neighbours:
chunks of one model are all of one size and fit exactly; models of different sizes share the arena.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lamina.errors import SettingsError
from lamina.linux import MADV_HUGEPAGE, MADV_POPULATE_WRITE, madvise

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
_MAP_NORESERVE = 0x4000  # Python 3.12 and older do not name it
_HUGE_PAGE_BYTES = 2 << 20
_FILL_PART_BYTES = 8 << 20


class FreeExtents:
    """Free ranges of addresses. `take` is best fit, `give` joins neighbours. Not thread-safe."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self.free_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """The start of a range of `nbytes`, or None when no free extent is that long."""
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, start + size)
        if size > nbytes:
            self._add(start + nbytes, start + size)
        return start

    @property
    def longest_bytes(self) -> int:
        """The size of the longest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def give(self, start: int, nbytes: int) -> None:
        """Free `[start, start + nbytes)`; it must not be free already."""
        end = start + nbytes
        if (before := self._start_of.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (after := self._end_of.get(end)) is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        bisect.insort(self._by_size, (end - start, start))
        self._end_of[start], self._start_of[end] = end, start
        self.free_bytes += end - start

    def _remove(self, start: int, end: int) -> None:
        self._by_size.pop(bisect.bisect_left(self._by_size, (end - start, start)))
        del self._end_of[start], self._start_of[end]
        self.free_bytes -= end - start


class Arena:
    """`capacity_bytes` of memory, handed out to chunks. Used by the server's event loop only.

    Raises `SettingsError` when the address space for it cannot be reserved.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.ready_bytes = 0
        self._extents = FreeExtents()
        try:
            self._map = mmap.mmap(
                -1,
                self.capacity_bytes + _HUGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
        except (OSError, OverflowError, ValueError) as error:
            raise SettingsError(
                f"an arena of {capacity_bytes} bytes cannot be reserved: {error}",
                "Choose a smaller --arena",
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.base = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        madvise(self.base, self.capacity_bytes, MADV_HUGEPAGE)

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    @property
    def is_filled(self) -> bool:
        """Whether all of the arena can be handed out."""
        return self.ready_bytes == self.capacity_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` can be allocated."""
        return self._extents.longest_bytes >= nbytes

    def allocate(self, nbytes: int) -> int | None:
        """The address of `nbytes` of filled memory, or None."""
        return self._extents.take(nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._extents.give(address, nbytes)

    def extend(self, nbytes: int) -> None:
        """Hand out the next `nbytes`, which a filler has just made resident."""
        self._extents.give(self.base + self.ready_bytes, nbytes)
        self.ready_bytes += nbytes


class ArenaFiller:
    """Makes an arena resident in the background, segment by segment, touched on `cpus`.

    `pin(address, nbytes)` and then `publish(nbytes)` are called per segment, on the filler's
    thread: hand `publish` over to the event loop.
    """

    def __init__(
        self,
        arena: Arena,
        cpus: set[int],
        pin: Callable[[int, int], None],
        publish: Callable[[int], None],
    ) -> None:
        self._arena = arena
        self._cpus = cpus
        self._pin = pin
        self._publish = publish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="lamina-fill", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _fill(self) -> None:
        threads = max(1, len(self._cpus) // 2)
        move = partial(os.sched_setaffinity, 0, self._cpus)
        with ThreadPoolExecutor(threads, "lamina-touch", move) as pool:
            for start in range(0, self._arena.capacity_bytes, SEGMENT_BYTES):
                end = min(start + SEGMENT_BYTES, self._arena.capacity_bytes)
                list(pool.map(self._touch, range(start, end, _FILL_PART_BYTES)))
                if self._stop.is_set():
                    return
                self._pin(self._arena.base + start, end - start)
                self._publish(end - start)
        log.info("arena of %.1f GiB is resident", self._arena.capacity_bytes / 2**30)

    def _touch(self, offset: int) -> None:
        if self._stop.is_set():
            return
        address = self._arena.base + offset
        nbytes = min(_FILL_PART_BYTES, self._arena.capacity_bytes - offset)
        if not madvise(address, nbytes, MADV_POPULATE_WRITE):
            ctypes.memset(address, 0, nbytes)  # a kernel before 5.14
