"""Copy lists against a naive model, for any geometry: every byte once, and nothing else.

`Layout` and `layouts()` describe a transfer in full; the device conformance suite uses them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.copies import (
    BATCH_BYTES,
    BATCH_PIECES,
    CopyList,
    CopyPlan,
    batches,
    merge_adjacent,
)
from lamina.geometry import (
    BlockIds,
    Geometry,
    Group,
    Layer,
    PageMap,
    PlanePages,
    check_block_ids,
)

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 64
"""Between regions: a copy that runs past its region is seen there."""


class Page(NamedTuple):
    """One page of a transfer: where it is in engine memory and where in which chunk."""

    region: int
    engine_offset: int
    chunk: int
    chunk_offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A transfer: what KV is, where its pages and chunks lie, which blocks of it move."""

    geometry: Geometry
    page_map: PageMap
    region_bytes: tuple[int, ...]
    chunk_slots: tuple[int, ...]
    """Where each chunk lies in host memory, in units of `chunk_bytes`."""
    start_tokens: int
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def host_bytes(self) -> int:
        return (max(self.chunk_slots) + 2) * self.geometry.chunk_bytes

    @property
    def packed_ids(self) -> list[BlockIds]:
        return [np.array(ids, np.int32) for ids in self.block_ids]

    def chunk_addresses(self, base: int) -> list[int]:
        return [base + slot * self.geometry.chunk_bytes for slot in self.chunk_slots]

    def plan(self, region_addresses: list[int], host_base: int) -> CopyPlan:
        return CopyPlan(
            self.geometry,
            self.page_map,
            region_addresses,
            self.chunk_addresses(host_base),
            self.start_tokens,
            self.packed_ids,
        )

    def pages(self) -> Iterator[Page]:
        """Every page that moves, by the definition `[layer][plane][block][page bytes]`."""
        layer_offset = 0
        for layer, planes in zip(self.geometry.layers, self.page_map.planes, strict=True):
            block_tokens = self.geometry.groups[layer.group].block_tokens
            blocks_a_chunk = self.geometry.chunk_tokens // block_tokens
            for number, plane in enumerate(planes):
                for position, block in enumerate(self.block_ids[layer.group]):
                    token = self.start_tokens + position * block_tokens
                    chunk, within = divmod(token, self.geometry.chunk_tokens)
                    row = number * blocks_a_chunk + within // block_tokens
                    yield Page(
                        plane.region,
                        plane.offset_bytes + block * plane.stride_bytes,
                        chunk,
                        layer_offset + row * layer.page_bytes,
                        layer.page_bytes,
                    )
            layer_offset += layer.planes * blocks_a_chunk * layer.page_bytes


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any geometry: up to three groups, one or two planes, odd page sizes, padded strides, layers
    apart, one after another or interleaved block by block, in one region or several."""
    block_tokens = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    step_tokens = math.lcm(*block_tokens)
    chunk_tokens = step_tokens * draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 3))
    layers = tuple(
        Layer(
            f"l{index}",
            draw(st.integers(0, len(block_tokens) - 1)),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 9)),
        )
        for index in range(draw(st.integers(1, 6)))
    )
    geometry = Geometry(chunk_tokens, tuple(map(Group, block_tokens)), layers)

    steps = chunks * (chunk_tokens // step_tokens)
    first_step = draw(st.integers(0, steps - 1))
    moved = step_tokens * draw(st.integers(1, steps - first_step))
    blocks, block_ids = [], []
    for tokens in block_tokens:
        needed = moved // tokens
        blocks.append(needed + draw(st.integers(0, 4)))
        block_ids.append(draw(_ids_of(needed, blocks[-1])))

    regions = draw(st.integers(1, 3))
    planes, region_bytes = _place(draw, geometry, blocks, regions)
    slots = draw(st.permutations(range(chunks + 1)))[:chunks]
    layout = Layout(
        geometry,
        PageMap(tuple(blocks), planes),
        region_bytes,
        tuple(slots),
        first_step * step_tokens,
        tuple(block_ids),
    )
    layout.page_map.check(geometry, region_bytes)
    covered = chunks * chunk_tokens
    check_block_ids(geometry, layout.page_map, layout.start_tokens, covered, layout.packed_ids)
    return layout


@st.composite
def _ids_of(draw: st.DrawFn, needed: int, blocks: int) -> tuple[int, ...]:
    """Distinct block ids: a consecutive run, which merges, or any order."""
    if draw(st.booleans()):
        first = draw(st.integers(0, blocks - needed))
        return tuple(range(first, first + needed))
    return tuple(draw(st.permutations(range(blocks)))[:needed])


def _place(
    draw: st.DrawFn, geometry: Geometry, blocks: list[int], regions: int
) -> tuple[tuple[tuple[PlanePages, ...], ...], tuple[int, ...]]:
    """A place for every plane, and the bytes that each region needs."""
    ends = [0] * regions
    gaps = st.integers(0, 3)
    places: dict[tuple[int, int], PlanePages] = {}
    for group, count in enumerate(blocks):
        wanted = [
            (index, plane, layer.page_bytes)
            for index, layer in enumerate(geometry.layers)
            if layer.group == group
            for plane in range(layer.planes)
        ]
        if draw(st.booleans()):  # interleaved: a block's pages of all layers lie together
            region = draw(st.integers(0, regions - 1))
            row, offsets = 0, []
            for _, _, page_bytes in wanted:
                offsets.append(row)
                row += page_bytes + draw(gaps)
            for (index, plane, _), offset in zip(wanted, offsets, strict=True):
                places[index, plane] = PlanePages(region, ends[region] + offset, row)
            ends[region] += count * row
        else:  # one plane after another
            for index, plane, page_bytes in wanted:
                region = draw(st.integers(0, regions - 1))
                stride = page_bytes + draw(gaps)
                offset = ends[region] + draw(gaps)
                places[index, plane] = PlanePages(region, offset, stride)
                ends[region] = offset + count * stride
    planes = tuple(
        tuple(places[index, plane] for plane in range(layer.planes))
        for index, layer in enumerate(geometry.layers)
    )
    return planes, tuple(max(end, 1) for end in ends)


class Memory:
    """Engine and host memory as real bytes with real addresses, and a count of writes to each."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        starts = np.cumsum([GUARD_BYTES, *(n + GUARD_BYTES for n in layout.region_bytes)]).tolist()
        self.region_starts: list[int] = starts[:-1]
        self.engine: Bytes = rng.integers(0, 256, starts[-1], np.uint8)
        self.host: Bytes = rng.integers(0, 256, layout.host_bytes, np.uint8)
        self.engine_base, self.host_base = self.engine.ctypes.data, self.host.ctypes.data
        self.engine_writes = np.zeros(len(self.engine), int)
        self.host_writes = np.zeros(len(self.host), int)
        self._layout = layout
        self.plan = layout.plan([self.engine_base + s for s in self.region_starts], self.host_base)

    def store(self, copies: CopyList) -> None:
        """Execute a copy list from engine to host."""
        for engine, host, size in self._offsets(copies):
            self.host[host : host + size] = self.engine[engine : engine + size]
            self.host_writes[host : host + size] += 1

    def retrieve(self, copies: CopyList) -> None:
        """Execute a copy list from host to engine."""
        for engine, host, size in self._offsets(copies):
            self.engine[engine : engine + size] = self.host[host : host + size]
            self.engine_writes[engine : engine + size] += 1

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """Where each page is in `engine` and in `host`, by the naive model."""
        addresses = self._layout.chunk_addresses(0)
        for page in self._layout.pages():
            engine = self.region_starts[page.region] + page.engine_offset
            host = addresses[page.chunk] + page.chunk_offset
            yield slice(engine, engine + page.nbytes), slice(host, host + page.nbytes)

    def _offsets(self, copies: CopyList) -> Iterator[tuple[int, int, int]]:
        for engine, host, size in zip(*(array.tolist() for array in copies), strict=True):
            engine, host = engine - self.engine_base, host - self.host_base
            assert 0 <= engine <= engine + size <= len(self.engine)
            assert 0 <= host <= host + size <= len(self.host)
            yield engine, host, size


@settings(derandomize=True, deadline=None, max_examples=150)
@given(layouts(), st.data())
def test_any_geometry_is_copied_byte_for_byte_once_and_nothing_else_is_touched(
    layout: Layout, data: st.DataObject
) -> None:
    width = data.draw(st.integers(1, len(layout.geometry.layers)), "width")
    slices = layout.geometry.slices(width)
    memory = Memory(layout)
    before_engine, before_host = memory.engine.copy(), memory.host.copy()
    expected_host, once_host = before_host.copy(), np.zeros_like(memory.host_writes)
    expected_engine, once_engine = before_engine.copy(), np.zeros_like(memory.engine_writes)
    for engine, host in memory.spans():
        expected_host[host] = before_engine[engine]
        expected_engine[engine] = before_host[host]
        once_host[host] += 1
        once_engine[engine] += 1
    assert once_host.max() == 1, "the model itself would write a byte twice"
    assert once_engine.max() == 1, "the model itself would write a byte twice"

    for part in slices:
        memory.store(memory.plan.copies(part.first_layer, part.end_layer))
    assert np.array_equal(memory.host_writes, once_host)
    assert np.array_equal(memory.host, expected_host)
    assert np.array_equal(memory.engine, before_engine), "a store wrote to the engine"

    memory.host[:] = before_host
    for part in slices:
        memory.retrieve(memory.plan.copies(part.first_layer, part.end_layer))
    assert np.array_equal(memory.engine_writes, once_engine)
    assert np.array_equal(memory.engine, expected_engine)
    assert np.array_equal(memory.host, before_host), "a retrieve wrote to the host"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(layouts())
def test_a_slice_moves_the_bytes_of_its_own_layers_only(layout: Layout) -> None:
    memory = Memory(layout)
    layers = len(layout.geometry.layers)
    offsets = layout.geometry.layer_offsets.tolist()
    for index in range(layers):
        memory.host_writes[:] = 0
        memory.store(memory.plan.copies(index, index + 1))
        written = np.flatnonzero(memory.host_writes) % layout.geometry.chunk_bytes
        assert offsets[index] <= written.min()
        assert written.max() < offsets[index + 1]


def plain_layout(
    layers: int,
    planes: int = 1,
    chunks: int = 2,
    first_block: int = 3,
    gap_bytes: int = 5,
    page_bytes: int = 32,
) -> Layout:
    """Blocks of 16 tokens, four a chunk, consecutive ids, stride equal to the page."""
    blocks = 4 * chunks + first_block
    plane_bytes = blocks * page_bytes + gap_bytes
    return Layout(
        Geometry(
            64,
            (Group(16),),
            tuple(Layer(f"l{i}", 0, planes, page_bytes) for i in range(layers)),
        ),
        PageMap(
            (blocks,),
            tuple(
                tuple(
                    PlanePages(0, (index * planes + plane) * plane_bytes, page_bytes)
                    for plane in range(planes)
                )
                for index in range(layers)
            ),
        ),
        (layers * planes * plane_bytes,),
        tuple(reversed(range(chunks))),
        0,
        (tuple(range(first_block, first_block + 4 * chunks)),),
    )


@pytest.mark.parametrize("planes", [1, 2])
def test_consecutive_blocks_make_one_piece_per_chunk_layer_and_plane(planes: int) -> None:
    layout = plain_layout(layers=3, planes=planes)
    copies = layout.plan([0], 0).copies(0, 3)
    assert copies.size.tolist() == [4 * 32] * (2 * 3 * planes)


def test_a_padded_stride_leaves_one_piece_per_page() -> None:
    layout = plain_layout(layers=1)
    padded = PageMap(layout.page_map.blocks, ((PlanePages(0, 0, 33),),))
    plan = CopyPlan(layout.geometry, padded, [0], [0, 4096], 0, layout.packed_ids)
    assert plan.copies(0, 1).size.tolist() == [32] * 8


def test_descending_blocks_are_not_merged() -> None:
    layout = plain_layout(layers=1)
    ids = [np.arange(8, 0, -1, dtype=np.int32)]
    plan = CopyPlan(layout.geometry, layout.page_map, [0], [0, 4096], 0, ids)
    assert plan.copies(0, 1).size.tolist() == [32] * 8


def test_chunks_that_follow_each_other_on_both_sides_make_one_piece() -> None:
    layout = plain_layout(layers=1, page_bytes=1024)
    assert layout.geometry.chunk_bytes == 4 * 1024, "a chunk without padding"
    plan = CopyPlan(layout.geometry, layout.page_map, [0], [0, 4096], 0, layout.packed_ids)
    assert plan.copies(0, 1).size.tolist() == [8 * 1024]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(layouts())
def test_no_two_neighbouring_pieces_of_a_plan_could_be_one(layout: Layout) -> None:
    memory = Memory(layout)
    engine, host, size = memory.plan.copies(0, len(layout.geometry.layers))
    joins = (engine[:-1] + size[:-1] == engine[1:]) & (host[:-1] + size[:-1] == host[1:])
    assert not joins.any()


@st.composite
def copy_lists(draw: st.DrawFn) -> CopyList:
    """Pieces whose sides follow each other, or not, independently."""
    engine, host, pieces = 1000, 1000, []
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.integers(1, 5))
        engine += draw(st.sampled_from([0, 0, 1, -7]))
        host += draw(st.sampled_from([0, 0, 1, -7]))
        pieces.append((engine, host, size))
        engine, host = engine + size, host + size
    rows = np.array(pieces, np.int64).reshape(-1, 3)
    return CopyList(rows[:, 0], rows[:, 1], rows[:, 2])


def byte_pairs(copies: CopyList) -> list[tuple[int, int]]:
    """Which engine byte goes with which host byte, in order."""
    return [
        (engine + i, host + i)
        for engine, host, size in zip(*(array.tolist() for array in copies), strict=True)
        for i in range(size)
    ]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(copy_lists())
def test_merging_joins_all_it_can_and_changes_no_byte(copies: CopyList) -> None:
    merged = merge_adjacent(copies)
    assert byte_pairs(merged) == byte_pairs(copies)
    assert merged.nbytes == copies.nbytes
    engine, host, size = merged
    joins = (engine[:-1] + size[:-1] == engine[1:]) & (host[:-1] + size[:-1] == host[1:])
    assert not joins.any()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("planes", [1, 2])
def test_every_width_on_32_layers_equals_whole_byte_for_byte(width: int, planes: int) -> None:
    layout = plain_layout(layers=32, planes=planes, chunks=3, page_bytes=7)
    whole, layered = Memory(layout), Memory(layout)
    whole.store(whole.plan.copies(0, 32))
    whole.retrieve(whole.plan.copies(0, 32))
    slices = layout.geometry.slices(width)
    for part in slices:
        layered.store(layered.plan.copies(part.first_layer, part.end_layer))
    for part in slices:
        layered.retrieve(layered.plan.copies(part.first_layer, part.end_layer))
    assert np.array_equal(layered.host, whole.host)
    assert np.array_equal(layered.engine, whole.engine)
    assert np.array_equal(layered.host_writes, whole.host_writes)
    assert np.array_equal(layered.engine_writes, whole.engine_writes)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.integers(0, 5000),
    st.sampled_from([1, 4096, BATCH_BYTES // 1024, BATCH_BYTES // 10, 2 * BATCH_BYTES]),
    st.sampled_from([1, 2, BATCH_PIECES // 4, BATCH_PIECES]),
    st.integers(0, 2**32),
)
def test_batches_are_a_partition_under_their_limits(
    pieces: int, largest: int, most_pieces: int, seed: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, largest + 1, pieces)
    numbers = np.arange(pieces, dtype=np.int64)
    parts = list(batches(CopyList(numbers, 2 * numbers, sizes), most_pieces))
    for field, whole in enumerate((numbers, 2 * numbers, sizes)):
        joined = np.concatenate([np.empty(0, np.int64), *(part[field] for part in parts)])
        assert np.array_equal(joined, whole)
    for part in parts:
        assert 1 <= len(part.size) <= most_pieces
        assert part.nbytes <= BATCH_BYTES or len(part.size) == 1
    for part, following in itertools.pairwise(parts):
        more = part.nbytes + int(following.size[0])
        assert len(part.size) == most_pieces or more > BATCH_BYTES, "a batch is cut too early"


def test_a_list_as_long_as_a_batch_is_one_batch() -> None:
    sizes = np.full(BATCH_PIECES, BATCH_BYTES // BATCH_PIECES)
    assert [len(part.size) for part in batches(CopyList(sizes, sizes, sizes))] == [BATCH_PIECES]
    one_more = np.append(sizes, 1)
    parts = [len(part.size) for part in batches(CopyList(one_more, one_more, one_more))]
    assert parts == [BATCH_PIECES, 1]
