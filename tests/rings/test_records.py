"""The arithmetic of records, for geometries of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina import records
from lamina.errors import GeometryError
from lamina.geometry import Geometry, Slice
from lamina.records import Shape, last_records, lay_out, ring_bytes, shapes
from lamina_lab.known.content import equal_layers
from tests.rings.geometries import geometries, least_ring

ALIGNMENT_BYTES = 256

SETTINGS = settings(derandomize=True, deadline=None)


class Case(NamedTuple):
    geometry: Geometry
    slices: tuple[Slice, ...]
    chunks: int
    ring_bytes: int

    @property
    def cut(self) -> tuple[Shape, ...]:
        return shapes(self.geometry, self.slices, self.chunks, self.ring_bytes)

    def layer_bytes(self, first: int, end: int) -> int:
        offsets = self.geometry.layer_offsets
        return int(offsets[end] - offsets[first])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    geometry = draw(geometries())
    least = -(-least_ring(geometry) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Case(
        geometry,
        geometry.slices(draw(st.integers(1, len(geometry.layers)))),
        draw(st.integers(1, 60)),
        least * draw(st.integers(1, 20)),
    )


@SETTINGS
@given(cases())
def test_every_layer_of_every_chunk_is_in_exactly_one_record(case: Case) -> None:
    held = [
        (layer, chunk)
        for shape in case.cut
        for layer in range(shape.first_layer, shape.end_layer)
        for chunk in range(shape.first_chunk, shape.end_chunk)
    ]
    layers = range(len(case.geometry.layers))
    assert sorted(held) == [(layer, chunk) for layer in layers for chunk in range(case.chunks)]


@SETTINGS
@given(cases())
def test_records_move_in_the_order_of_slices(case: Case) -> None:
    """Of two records, the later one has later layers, or later chunks of the same."""
    cut = case.cut
    for before, after in itertools.pairwise(cut):
        same_layers = before[:2] == after[:2]
        assert after.first_layer == (before.first_layer if same_layers else before.end_layer)
        assert after.first_chunk == (before.end_chunk if same_layers else 0)


@SETTINGS
@given(cases())
def test_a_record_takes_at_most_a_quarter_of_its_ring(case: Case) -> None:
    for shape in case.cut:
        assert shape.chunk_stride_bytes == case.layer_bytes(shape.first_layer, shape.end_layer)
        assert 0 < shape.nbytes <= case.ring_bytes // 4
        assert shape.nbytes == shape.chunks * shape.chunk_stride_bytes


@SETTINGS
@given(cases())
def test_small_slices_are_joined_and_others_end_with_their_records(case: Case) -> None:
    """A record has layers of two slices only where the first of them, with all that is joined to
    it, is smaller than a record should be."""
    joined = case.ring_bytes // records.RECORDS_A_RING // records.JOINED_PART
    ends = [part.end_layer for part in case.slices]
    for shape in case.cut:
        crossed = [end for end in ends if shape.first_layer < end < shape.end_layer]
        for end in crossed:
            assert case.chunks * case.layer_bytes(shape.first_layer, end) < joined


def test_slices_are_joined_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 layers of 1 KiB a chunk, a layer a slice; a ring of 16 KiB has records of 4."""
    monkeypatch.setattr(records, "JOINED_PART", 1)
    records.shapes.cache_clear()
    geometry = equal_layers(8, 256)
    by_chunks = {
        chunks: [shape[:4] for shape in shapes(geometry, geometry.slices(1), chunks, 16 << 10)]
        for chunks in (1, 2, 3, 5)
    }
    assert by_chunks[1] == [(0, 4, 0, 1), (4, 8, 0, 1)]
    assert by_chunks[2] == [(layer, layer + 2, 0, 2) for layer in (0, 2, 4, 6)]
    assert by_chunks[3] == [(layer, layer + 1, 0, 3) for layer in range(8)]
    assert by_chunks[5] == [
        (layer, layer + 1, *chunks) for layer in range(8) for chunks in ((0, 3), (3, 5))
    ]
    wide = geometry.slices(8)
    assert shapes(geometry, wide, 1, 1 << 20) == (Shape(0, 8, 0, 1, 8 << 10),)
    assert len(shapes(geometry, wide, 1, 16 << 10)) == 2


def test_slices_larger_than_needed_are_not_joined() -> None:
    """4 MiB take 76 us of an H200's link: more in a record would make steps wait."""
    geometry = equal_layers(8, 1 << 20)
    cut = shapes(geometry, geometry.slices(1), 1, records.RETRIEVE_RING_BYTES)
    assert len(cut) == 8
    assert len(shapes(geometry, geometry.slices(2), 1, records.RETRIEVE_RING_BYTES)) == 4


@SETTINGS
@given(cases())
def test_a_slice_is_there_with_its_last_record(case: Case) -> None:
    cut, lasts = case.cut, last_records(case.cut, case.slices)
    for part, last in zip(case.slices, lasts, strict=True):
        with_it = [
            index
            for index, shape in enumerate(cut)
            if shape.first_layer < part.end_layer and part.first_layer < shape.end_layer
        ]
        assert last == max(with_it)


def check_positions(
    cut: Sequence[Shape], positions: Sequence[int], start: int, ring_bytes: int
) -> int:
    for shape, position in zip(cut, positions, strict=True):
        assert position >= start
        assert position - start < shape.nbytes + 2 * ALIGNMENT_BYTES  # no room is left idle
        assert position % ALIGNMENT_BYTES == 0
        assert position % ring_bytes + shape.nbytes <= ring_bytes
        start = position + shape.nbytes
    return start


@SETTINGS
@given(cases(), st.integers(0, 1 << 40), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_positions_only_grow_and_never_wrap(
    case: Case, position: int, number: int, transfers: int
) -> None:
    for _ in range(transfers):
        span = lay_out(case.cut, number, position, case.ring_bytes)
        position = check_positions(case.cut, span.positions, position, case.ring_bytes)
        assert span.end_position == position
        numbers = [span.number(index) for index in range(len(span.shapes))]
        assert numbers == [(number + index) % 2**32 for index in range(len(span.shapes))]
        assert span.last_number == numbers[-1]
        number = (span.last_number + 1) % 2**32


@SETTINGS
@given(cases())
def test_both_sides_cut_alike(case: Case) -> None:
    """The server has the geometry from the wire, and never names its layers."""
    geometry = Geometry(
        case.geometry.chunk_tokens,
        case.geometry.groups,
        tuple(replace(layer, name="") for layer in case.geometry.layers),
    )
    slices = geometry.slices(case.slices[0].end_layer)
    assert shapes.__wrapped__(geometry, slices, case.chunks, case.ring_bytes) == case.cut


@SETTINGS
@given(geometries(), st.integers(1, 5))
def test_a_ring_that_is_too_small_for_a_layer_of_a_chunk_is_refused(
    geometry: Geometry, chunks: int
) -> None:
    least = least_ring(geometry)
    for width in range(1, len(geometry.layers) + 1):
        slices = geometry.slices(width)
        assert shapes(geometry, slices, chunks, least)
        with pytest.raises(GeometryError, match="a layer of a chunk takes"):
            shapes(geometry, slices, chunks, least - 1)


@SETTINGS
@given(geometries(), st.sampled_from([1, 2, 4]))
def test_rings_are_as_large_as_layers_need(geometry: Geometry, part: int) -> None:
    for nbytes in ring_bytes(geometry, part):
        assert nbytes % ALIGNMENT_BYTES == 0
        assert shapes(geometry, geometry.slices(1), 1, nbytes)


def test_large_layers_have_large_rings() -> None:
    geometry = equal_layers(2, 16 << 20)  # 64 MiB a chunk
    assert ring_bytes(geometry) == (256 << 20, 256 << 20)
    assert ring_bytes(equal_layers(), 4) == (24 << 20, 8 << 20)
