"""Geometry: what is refused and why, and how layers are cut into slices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import GeometryError
from lamina.geometry import (
    CHUNK_ALIGNMENT_BYTES,
    MAX_BYTES,
    MAX_PLANES,
    Geometry,
    Group,
    Layer,
    PageMap,
    PlanePages,
    check_block_ids,
)
from lamina_lab.known.content import ids

CHUNK_TOKENS = 64
PAGE_BYTES = 100
BLOCKS = 8


def layer(name: str = "l", group: int = 0, planes: int = 1, page_bytes: int = PAGE_BYTES) -> Layer:
    return Layer(name, group, planes, page_bytes)


def two_groups() -> Geometry:
    """Blocks of 16 and of 32 tokens."""
    return Geometry(CHUNK_TOKENS, (Group(16), Group(32)), (layer("a", 0), layer("b", 1)))


def two_group_map() -> PageMap:
    return PageMap(
        (BLOCKS, BLOCKS), ((PlanePages(0, 0, PAGE_BYTES),), (PlanePages(1, 0, PAGE_BYTES),))
    )


def refused(call: Callable[[], object], cause: str, remedy: str) -> None:
    """`call` raises a `GeometryError` whose cause and remedy contain these words."""
    with pytest.raises(GeometryError) as caught:
        call()
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy
    assert str(caught.value) == f"{caught.value.cause}. {caught.value.remedy}"


@pytest.mark.parametrize(
    ("chunk_tokens", "groups", "layers", "cause", "remedy"),
    [
        (64, (), (layer(),), "at least one group and one layer", "Register the KV tensors first"),
        (64, (Group(16),), (), "at least one group and one layer", "Register the KV tensors first"),
        (0, (Group(16),), (layer(),), "chunk_tokens is 0", "positive number of tokens"),
        (-64, (Group(16),), (layer(),), "chunk_tokens is -64", "positive number of tokens"),
        (64, (Group(16), Group(48)), (layer(),), "size 48 of group 1 does not divide", "multiple"),
        (64, (Group(128),), (layer(),), "128 of group 0 does not divide", "multiple of every"),
        (64, (Group(0),), (layer(),), "block size 0 of group 0", "multiple of every block size"),
        (64, (Group(16),), (layer("x", 1),), "'x' is in group 1", "index of a group"),
        (64, (Group(16),), (layer("x", -1),), "'x' is in group -1", "index of a group"),
        (64, (Group(16),), (layer("x", planes=0),), "'x' has 0 planes", "at least one plane"),
        (64, (Group(16),), (layer("x", page_bytes=0),), "'x' has 1 planes of 0-byte", "one byte"),
        (64, (Group(16),), (layer(planes=MAX_PLANES),) * 2, "more than 8192 planes", "one model"),
        (64, (Group(16),), (layer(page_bytes=MAX_BYTES),), "more than 2**60 bytes", "page sizes"),
        (64, (Group(1),), (layer(page_bytes=2**53),) * 3, "more than 2**60 bytes", "page sizes"),
    ],
)
def test_a_geometry_that_does_not_add_up_is_refused_with_cause_and_remedy(
    chunk_tokens: int,
    groups: tuple[Group, ...],
    layers: tuple[Layer, ...],
    cause: str,
    remedy: str,
) -> None:
    refused(lambda: Geometry(chunk_tokens, groups, layers), cause, remedy)


@pytest.mark.parametrize("width", [-1, 0, 9, 1000])
def test_a_width_outside_the_layers_is_refused_with_the_widths_that_fit(width: int) -> None:
    geometry = Geometry(64, (Group(16),), tuple(layer(str(i)) for i in range(8)))
    refused(lambda: geometry.slices(width), f"{width} layers a slice does not fit 8", "1 to 8")


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 130).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_slices_cover_every_layer_once_and_in_order(layers_and_width: tuple[int, int]) -> None:
    layers, width = layers_and_width
    geometry = Geometry(64, (Group(16),), tuple(layer(str(i)) for i in range(layers)))
    slices = geometry.slices(width)
    covered = [index for part in slices for index in range(part.first_layer, part.end_layer)]
    assert covered == list(range(layers))
    assert [part.number for part in slices] == list(range(len(slices)))
    assert all(part.end_layer - part.first_layer == width for part in slices[:-1])
    assert 1 <= slices[-1].end_layer - slices[-1].first_layer <= width


def test_layer_offsets_are_the_running_sum_of_layer_sizes() -> None:
    geometry = Geometry(
        CHUNK_TOKENS,
        (Group(16), Group(32)),
        (layer("a", 0, 2, 10), layer("b", 1, 1, 7), layer("c", 0, 1, 10)),
    )
    sizes = [2 * 4 * 10, 1 * 2 * 7, 1 * 4 * 10]
    assert geometry.layer_offsets.tolist() == [0, *np.cumsum(sizes).tolist()]
    assert geometry.step_tokens == 32
    assert [geometry.blocks_per_chunk(group) for group in (0, 1)] == [4, 2]


@pytest.mark.parametrize(
    ("page_bytes", "chunk_bytes"), [(1, 4096), (1024, 4096), (1025, 8192), (2048, 8192)]
)
def test_a_chunk_takes_whole_memory_pages(page_bytes: int, chunk_bytes: int) -> None:
    geometry = Geometry(64, (Group(16),), (layer(page_bytes=page_bytes),))
    assert geometry.chunk_bytes == chunk_bytes
    assert geometry.chunk_bytes % CHUNK_ALIGNMENT_BYTES == 0


def test_a_digest_tells_geometries_apart_but_not_layer_names() -> None:
    base = Geometry(64, (Group(16), Group(32)), (layer("a", 0, 2, 8), layer("b", 1, 1, 8)))
    renamed = Geometry(64, (Group(16), Group(32)), (layer("c", 0, 2, 8), layer("d", 1, 1, 8)))
    others = [
        Geometry(128, base.groups, base.layers),
        Geometry(64, (Group(32), Group(32)), base.layers),
        Geometry(64, base.groups, base.layers[::-1]),
        Geometry(64, base.groups, base.layers[:1]),
        Geometry(64, base.groups, (layer("a", 1, 2, 8), layer("b", 1, 1, 8))),
        Geometry(64, base.groups, (layer("a", 0, 1, 8), layer("b", 1, 1, 8))),
        Geometry(64, base.groups, (layer("a", 0, 2, 16), layer("b", 1, 1, 8))),
    ]
    assert renamed.digest == base.digest
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def map_of(*planes: PlanePages, blocks: int = BLOCKS) -> PageMap:
    """A page map of one group; one plane a layer."""
    return PageMap((blocks,), tuple((plane,) for plane in planes))


def one_group(layers: int = 2) -> Geometry:
    return Geometry(CHUNK_TOKENS, (Group(16),), tuple(layer(f"l{i}") for i in range(layers)))


def test_pages_that_fill_their_regions_exactly_are_accepted() -> None:
    size = BLOCKS * PAGE_BYTES
    packed = map_of(PlanePages(0, 0, PAGE_BYTES), PlanePages(0, size, PAGE_BYTES))
    packed.check(one_group(), [2 * size])
    apart = map_of(PlanePages(0, 0, PAGE_BYTES), PlanePages(1, 0, PAGE_BYTES))
    apart.check(one_group(), [size, size])


def test_layers_interleaved_in_one_region_are_accepted() -> None:
    stride = 2 * PAGE_BYTES
    interleaved = map_of(PlanePages(0, 0, stride), PlanePages(0, PAGE_BYTES, stride))
    interleaved.check(one_group(), [BLOCKS * stride])


def test_layers_of_different_groups_may_share_memory() -> None:
    shared = PageMap(
        (BLOCKS, BLOCKS), ((PlanePages(0, 0, PAGE_BYTES),), (PlanePages(0, 0, PAGE_BYTES),))
    )
    shared.check(two_groups(), [BLOCKS * PAGE_BYTES])


_WHOLE = PlanePages(0, 0, PAGE_BYTES)
_SIZE = BLOCKS * PAGE_BYTES


@pytest.mark.parametrize(
    ("page_map", "cause", "remedy"),
    [
        (map_of(_WHOLE), "1 groups and 1 layers", "every group and every layer once"),
        (PageMap((8, 8), ((_WHOLE,), (_WHOLE,))), "2 groups", "every group and every layer once"),
        (map_of(_WHOLE, _WHOLE, blocks=0), "no blocks", "at least one block"),
        (map_of(_WHOLE, _WHOLE, blocks=2**31), "more than block ids can name", "at least one"),
        (PageMap((8,), ((_WHOLE,), ())), "'l1' maps 0 planes instead of 1", "Map every plane"),
        (map_of(_WHOLE, PlanePages(2, 0, 100)), "'l1' lies in region 2 of 2", "Export every"),
        (map_of(_WHOLE, PlanePages(-1, 0, 100)), "'l1' lies in region -1 of 2", "Export every"),
        (map_of(_WHOLE, PlanePages(1, 0, 99)), "100 bytes every 99 bytes", "must not overlap"),
        (map_of(_WHOLE, PlanePages(1, -1, 100)), "from offset -1", "contiguous bytes"),
        (map_of(_WHOLE, PlanePages(1, 1, 100)), "ends at byte 801 of a region of 800", "size of"),
        (map_of(_WHOLE, PlanePages(1, 0, 101)), "ends at byte 807 of a region", "the stride"),
        (map_of(_WHOLE, _WHOLE, blocks=9), "ends at byte 900 of a region", "the block count"),
        (map_of(_WHOLE, _WHOLE), "group 0 overlap in region 0", "its own bytes"),
        (
            map_of(PlanePages(0, 0, 100), PlanePages(0, 399, 100), blocks=4),
            "group 0 overlap in region 0",
            "its own bytes",
        ),
        (
            map_of(PlanePages(0, 0, 200), PlanePages(0, 99, 200), blocks=4),
            "group 0 overlap in region 0",
            "its own bytes",
        ),
    ],
)
def test_a_page_map_that_does_not_fit_is_refused_with_cause_and_remedy(
    page_map: PageMap, cause: str, remedy: str
) -> None:
    refused(lambda: page_map.check(one_group(), [_SIZE, _SIZE]), cause, remedy)


@pytest.mark.parametrize("nbytes", [-1, 0, MAX_BYTES + 1, 2**64 - 1])
def test_a_region_of_impossible_size_is_refused(nbytes: int) -> None:
    page_map = map_of(_WHOLE, PlanePages(1, 0, PAGE_BYTES))
    refused(lambda: page_map.check(one_group(), [_SIZE, nbytes]), "larger than 2**60", "as they")


def test_the_largest_geometry_and_regions_are_accepted_without_enumerating_pages() -> None:
    geometry = Geometry(64, (Group(64),), tuple(layer(f"l{i}") for i in range(MAX_PLANES)))
    blocks, stride = 2**31 - 1, MAX_PLANES * PAGE_BYTES
    planes = tuple((PlanePages(0, i * PAGE_BYTES, stride),) for i in range(MAX_PLANES))
    PageMap((blocks,), planes[:50]).check(
        Geometry(64, (Group(64),), geometry.layers[:50]), [blocks * stride]
    )
    apart = tuple((PlanePages(i, 0, PAGE_BYTES),) for i in range(MAX_PLANES))
    PageMap((blocks,), apart).check(geometry, [MAX_BYTES] * MAX_PLANES)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(5, 30), st.integers(1, 4)),
        min_size=2,
        max_size=3,
    ),
    st.booleans(),
)
def test_an_overlap_is_refused_and_pages_that_lie_apart_or_interleave_are_not(
    planes: list[tuple[int, int, int]], equal_strides: bool
) -> None:
    """Pages that are apart in another way, which no engine has, may be refused too."""
    blocks = 4
    if equal_strides:
        planes = [(offset, planes[0][1], size) for offset, _, size in planes]
    geometry = Geometry(
        CHUNK_TOKENS,
        (Group(16),),
        tuple(layer(f"l{i}", page_bytes=size) for i, (_, _, size) in enumerate(planes)),
    )
    page_map = map_of(*(PlanePages(0, offset, every) for offset, every, _ in planes), blocks=blocks)
    owners, extents = np.zeros(200, int), np.zeros(200, int)
    for offset, every, size in planes:
        extents[offset : offset + (blocks - 1) * every + size] += 1
        for block in range(blocks):
            owners[offset + block * every :][:size] += 1
    if owners.max() > 1:
        refused(lambda: page_map.check(geometry, [200]), "overlap in region 0", "its own bytes")
    elif equal_strides or extents.max() == 1:
        page_map.check(geometry, [200])


def test_the_tokens_of_a_transfer_are_counted() -> None:
    blocks = [ids([5, 0, 3, 1]), ids([7, 6])]
    assert check_block_ids(two_groups(), two_group_map(), 0, 64, blocks) == 64
    assert check_block_ids(two_groups(), two_group_map(), 32, 96, blocks) == 64


@pytest.mark.parametrize(
    ("start", "covered", "blocks", "cause", "remedy"),
    [
        (0, 64, [[0, 1]], "block ids for 1 groups", "one array of block ids per group"),
        (0, 64, [[0, 1], [0], [0]], "block ids for 3 groups", "one array of block ids per group"),
        (0, 64, [[0, 1], [8]], "block id of group 1 is outside [0, 8)", "registered KV memory"),
        (0, 64, [[0, -1], [0]], "block id of group 0 is outside [0, 8)", "registered KV memory"),
        (0, 64, [[2, 2], [0]], "block id of group 0 is named twice", "Give every block once"),
        (0, 64, [[0, 1, 2, 3], [5, 5]], "id of group 1 is named twice", "Give every block once"),
        (0, 64, [[0, 1], [0, 1]], "group 1 names 2 blocks for 32 tokens", "the same tokens"),
        (0, 64, [[0, 1, 2, 3], [0]], "group 1 names 1 blocks for 64 tokens", "the same tokens"),
        (16, 64, [[0, 1], [0]], "from token 16 does not lie on blocks of 32", "whole blocks"),
        (-32, 64, [[0, 1], [0]], "from token -32 does not lie on blocks", "whole blocks"),
        (0, 64, [[0], [0]], "a transfer of 16 tokens", "whole blocks"),
        (0, 64, [[], []], "tokens [0, 0) does not fit the 64", "covered tokens only"),
        (32, 64, [[0, 1, 2, 3], [0, 1]], "[32, 96) does not fit the 64", "covered tokens only"),
        (2**70, 64, [[0, 1], [0]], "does not fit the 64 tokens", "covered tokens only"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused_with_cause_and_remedy(
    start: int, covered: int, blocks: list[list[int]], cause: str, remedy: str
) -> None:
    packed = [ids(group) for group in blocks]
    refused(
        lambda: check_block_ids(two_groups(), two_group_map(), start, covered, packed),
        cause,
        remedy,
    )
