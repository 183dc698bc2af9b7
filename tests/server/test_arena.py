"""The arena's free memory against a naive model, byte by byte."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lamina.server.arena
from lamina.errors import SettingsError
from lamina.server.arena import Arena, ArenaFiller, FreeExtents
from tests.support.wait import eventually

SPACE = 64
"""Addresses of the model, few enough to collide."""

CPUS = os.sched_getaffinity(0)


class FreeExtentsAgainstModel(RuleBasedStateMachine):
    """The model: which addresses are free, one flag each."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = FreeExtents()
        self.is_free = [False] * SPACE
        self.grown = 0
        self.taken: list[tuple[int, int]] = []

    def free_runs(self) -> list[tuple[int, int]]:
        """(size, start) of every maximal free run."""
        runs, start = [], None
        for address, free in enumerate([*self.is_free, False]):
            if free and start is None:
                start = address
            elif not free and start is not None:
                runs.append((address - start, start))
                start = None
        return runs

    def mark(self, start: int, nbytes: int, free: bool) -> None:
        span = slice(start, start + nbytes)
        assert self.is_free[span] == [not free] * nbytes, "bytes with two owners"
        self.is_free[span] = [free] * nbytes

    @precondition(lambda self: self.grown < SPACE)
    @rule(nbytes=st.integers(1, 16))
    def grow(self, nbytes: int) -> None:
        nbytes = min(nbytes, SPACE - self.grown)
        self.extents.give(self.grown, nbytes)
        self.mark(self.grown, nbytes, free=True)
        self.grown += nbytes

    @rule(nbytes=st.integers(1, 20))
    def take(self, nbytes: int) -> None:
        fitting = [run for run in self.free_runs() if run[0] >= nbytes]
        start = self.extents.take(nbytes)
        if not fitting:
            assert start is None
        else:
            assert start == min(fitting)[1], "not the best fit"
            self.mark(start, nbytes, free=False)
            self.taken.append((start, nbytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, nbytes = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.extents.give(start, nbytes)
        self.mark(start, nbytes, free=True)

    @invariant()
    def counts_its_bytes(self) -> None:
        assert self.extents.free_bytes == sum(self.is_free)

    def teardown(self) -> None:
        for start, nbytes in self.taken:
            self.extents.give(start, nbytes)
        if self.grown:
            assert self.extents.take(self.grown) == 0, "what is all free is not one extent"
        assert self.extents.free_bytes == 0


TestFreeExtents = FreeExtentsAgainstModel.TestCase
TestFreeExtents.settings = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=40
)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_join_whatever_the_order_in_which_they_are_freed(
    order: tuple[int, ...],
) -> None:
    extents = FreeExtents()
    extents.give(100, 30)
    starts = [extents.take(10) for _ in range(3)]
    assert starts == [100, 110, 120]
    assert extents.take(1) is None
    for index in order:
        extents.give(100 + 10 * index, 10)
    assert extents.take(30) == 100


def test_the_smallest_extent_that_is_long_enough_is_used() -> None:
    extents = FreeExtents()
    for start, nbytes in ((0, 50), (100, 10), (200, 20), (300, 10)):
        extents.give(start, nbytes)
    assert [extents.take(n) for n in (10, 10, 11, 51)] == [100, 300, 200, None]


def test_an_arena_hands_out_only_what_has_been_filled() -> None:
    arena = Arena(4 * mmap.PAGESIZE)
    assert arena.allocate(mmap.PAGESIZE) is None
    assert not arena.is_filled
    arena.extend(2 * mmap.PAGESIZE)
    assert (arena.ready_bytes, arena.free_bytes) == (2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert arena.allocate(3 * mmap.PAGESIZE) is None
    assert arena.allocate(mmap.PAGESIZE) == arena.base
    arena.extend(2 * mmap.PAGESIZE)
    assert arena.is_filled
    assert arena.allocate(3 * mmap.PAGESIZE) == arena.base + mmap.PAGESIZE, "segments do not join"
    assert arena.allocate(1) is None
    arena.free(arena.base, mmap.PAGESIZE)
    assert arena.allocate(mmap.PAGESIZE) == arena.base


def test_all_of_an_arenas_memory_can_be_written() -> None:
    arena = Arena(3 * mmap.PAGESIZE + 17)
    assert arena.capacity_bytes == 3 * mmap.PAGESIZE
    assert arena.base % (2 << 20) == 0, "chunks would not lie on huge pages"
    arena.extend(arena.capacity_bytes)
    address = arena.allocate(arena.capacity_bytes)
    assert address is not None
    ctypes.memset(address, 0xAB, arena.capacity_bytes)
    assert ctypes.string_at(address, arena.capacity_bytes) == b"\xab" * arena.capacity_bytes


def test_an_arena_larger_than_the_address_space_is_refused_with_the_remedy() -> None:
    with pytest.raises(SettingsError, match=r"cannot be reserved: .*\. Choose a smaller --arena"):
        Arena(1 << 60)


def test_a_filler_pins_and_then_publishes_every_segment_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lamina.server.arena, "SEGMENT_BYTES", 2 * mmap.PAGESIZE)
    arena = Arena(5 * mmap.PAGESIZE)
    calls: list[tuple[str, int, int]] = []
    filled = threading.Event()

    def publish(nbytes: int) -> None:
        calls.append(("publish", arena.base + arena.ready_bytes, nbytes))
        arena.extend(nbytes)
        if arena.is_filled:
            filled.set()

    filler = ArenaFiller(arena, CPUS, lambda address, n: calls.append(("pin", address, n)), publish)
    assert filled.wait(20)
    filler.stop()
    segments = [
        (arena.base + n * mmap.PAGESIZE, mmap.PAGESIZE * (2 if n < 4 else 1)) for n in (0, 2, 4)
    ]
    assert calls == [(what, *segment) for segment in segments for what in ("pin", "publish")]
    assert arena.allocate(arena.capacity_bytes) == arena.base


def test_a_filler_that_is_stopped_publishes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamina.server.arena, "SEGMENT_BYTES", mmap.PAGESIZE)
    arena = Arena(64 * mmap.PAGESIZE)
    published: list[int] = []
    first_is_out, go_on = threading.Event(), threading.Event()

    def publish(nbytes: int) -> None:
        published.append(nbytes)
        first_is_out.set()
        assert go_on.wait(20)

    filler = ArenaFiller(arena, CPUS, lambda address, nbytes: None, publish)
    assert first_is_out.wait(20)
    stopper = threading.Thread(target=filler.stop)
    stopper.start()
    eventually(filler._stop.is_set)
    go_on.set()
    stopper.join(20)
    assert not stopper.is_alive()
    assert published == [mmap.PAGESIZE]
