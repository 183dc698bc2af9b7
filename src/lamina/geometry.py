"""Where KV is: layers, groups, planes and pages; chunks and slices. Pure arithmetic.

Two descriptions meet here. A `Geometry` says what KV *is* (layers in execution order, bytes of a
page, tokens of a block and of a chunk); it is part of a chunk's identity. A `PageMap` says where
one worker keeps it (which region of memory, at which offset and stride). Lamina's own layout of a
chunk is `[layer][plane][block][page bytes]`, so any slice of layers of a chunk is contiguous.

Words: a *page* is one block of one layer, contiguous bytes. A layer has one *plane* of pages where
the engine packs K and V together (or has only one, as MLA does), two where they are apart. Layers
of one *group* share a block table.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lamina.errors import GeometryError

Int64Array = npt.NDArray[np.int64]
BlockIds = npt.NDArray[np.int32]

MAX_PLANES = 8192
"""Planes of all layers together."""
MAX_BYTES = 1 << 60
"""Bounds sizes that a peer claims, so that no address computed from them overflows."""
CHUNK_ALIGNMENT_BYTES = 4096
"""Chunks start and end on memory pages, so that no two chunks share one."""


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one block table; `block_tokens` tokens a block."""

    block_tokens: int


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """One attention layer: its group and its pages (`planes` per block, `page_bytes` each)."""

    name: str
    group: int
    planes: int
    page_bytes: int


class Slice(NamedTuple):
    """A run of consecutive layers `[first_layer, end_layer)`, moved and announced together."""

    number: int
    first_layer: int
    end_layer: int


class Geometry(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What one worker's KV is. Raises `GeometryError` when it does not add up.

    `layers` are in execution order: the order in which slices are moved and waited for.
    """

    chunk_tokens: int
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.groups or not self.layers:
            raise GeometryError(
                "a geometry needs at least one group and one layer", "Register the KV tensors first"
            )
        if self.chunk_tokens < 1:
            raise GeometryError(
                f"chunk_tokens is {self.chunk_tokens}", "Use a positive number of tokens"
            )
        for index, group in enumerate(self.groups):
            if group.block_tokens < 1 or self.chunk_tokens % group.block_tokens:
                raise GeometryError(
                    f"block size {group.block_tokens} of group {index} does not divide the chunk "
                    f"of {self.chunk_tokens} tokens",
                    "Choose a chunk size that is a multiple of every block size",
                )
        for layer in self.layers:
            if not 0 <= layer.group < len(self.groups):
                raise GeometryError(
                    f"layer {layer.name!r} is in group {layer.group}, "
                    f"but there are {len(self.groups)} groups",
                    "Give every layer the index of a group",
                )
            if layer.planes < 1 or layer.page_bytes < 1:
                raise GeometryError(
                    f"layer {layer.name!r} has {layer.planes} planes of "
                    f"{layer.page_bytes}-byte pages",
                    "Give every layer at least one plane of at least one byte",
                )
        if sum(layer.planes for layer in self.layers) > MAX_PLANES:
            raise GeometryError(
                f"there are more than {MAX_PLANES} planes", "Register the layers of one model"
            )
        if self._bytes_of_layers()[-1] > MAX_BYTES:
            raise GeometryError("a chunk has more than 2**60 bytes", "Check the page sizes")

    @cached_property
    def layer_offsets(self) -> Int64Array:
        """Offset in bytes of each layer in a chunk, shape (layers + 1,); the last is its size."""
        return np.array([0, *self._bytes_of_layers()], np.int64)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk takes in the arena, rounded up to `CHUNK_ALIGNMENT_BYTES`."""
        return -(-int(self.layer_offsets[-1]) // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES

    @cached_property
    def token_bytes(self) -> int:
        """The KV of a token in all layers, rounded up."""
        return -(-int(self.layer_offsets[-1]) // self.chunk_tokens)

    @cached_property
    def mean_page_bytes(self) -> float:
        """Over all pages of a chunk."""
        pages = sum(layer.planes * self.blocks_per_chunk(layer.group) for layer in self.layers)
        return int(self.layer_offsets[-1]) / pages

    @cached_property
    def step_tokens(self) -> int:
        """The least common multiple of the block sizes: transfers start and end on it."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ whenever two geometries do, layer names aside."""
        shape = (
            self.chunk_tokens,
            [g.block_tokens for g in self.groups],
            [(layer.group, layer.planes, layer.page_bytes) for layer in self.layers],
        )
        return hashlib.sha256(b"lamina geometry 1" + msgspec.msgpack.encode(shape)).digest()

    def _bytes_of_layers(self) -> list[int]:
        """Bytes of the first layer, of the first two, and so on, in a chunk."""
        sizes = (
            layer.planes * self.blocks_per_chunk(layer.group) * layer.page_bytes
            for layer in self.layers
        )
        return list(accumulate(sizes))

    def blocks_per_chunk(self, group: int) -> int:
        """Blocks of `group` that one chunk holds."""
        return self.chunk_tokens // self.groups[group].block_tokens

    def chunk_range(self, start_tokens: int, tokens: int) -> tuple[int, int]:
        """The chunks `[first, end)` that hold these tokens, some of them perhaps in part."""
        end_tokens = start_tokens + tokens
        return start_tokens // self.chunk_tokens, -(-end_tokens // self.chunk_tokens)

    def slices(self, layers_per_slice: int) -> tuple[Slice, ...]:
        """Cut the layers into runs of `layers_per_slice`; the last may be shorter.

        Raises `GeometryError` for a width below 1 or above the layer count.
        """
        count = len(self.layers)
        if not 1 <= layers_per_slice <= count:
            raise GeometryError(
                f"a width of {layers_per_slice} layers a slice does not fit {count} layers",
                f"Use 1 to {count}, or {count} for whole transfers",
            )
        return _slices(count, layers_per_slice)


@lru_cache(256)
def _slices(layers: int, layers_per_slice: int) -> tuple[Slice, ...]:
    starts = range(0, layers, layers_per_slice)
    return tuple(
        Slice(i, first, min(first + layers_per_slice, layers)) for i, first in enumerate(starts)
    )


class Allocation(NamedTuple):
    """One allocation of this process that holds KV: a region of a page map."""

    address: int
    nbytes: int


class PlanePages(msgspec.Struct, frozen=True, array_like=True):
    """Where a plane's pages are: page `b` is at `offset_bytes + b * stride_bytes` of `region`."""

    region: int
    offset_bytes: int
    stride_bytes: int


class PageMap(msgspec.Struct, frozen=True, array_like=True):
    """Where one worker keeps its pages: `blocks[group]` blocks, `planes[layer][plane]`."""

    blocks: tuple[int, ...]
    planes: tuple[tuple[PlanePages, ...], ...]

    def check(self, geometry: Geometry, region_bytes: Sequence[int]) -> None:
        """Raise `GeometryError` unless every page lies inside its region and none overlap.

        Layers of different groups may share memory (a hybrid model's groups never use the same
        block at once); pages of one group may not.
        """
        if len(self.blocks) != len(geometry.groups) or len(self.planes) != len(geometry.layers):
            raise GeometryError(
                f"the page map has {len(self.blocks)} groups and {len(self.planes)} layers, the "
                f"geometry {len(geometry.groups)} and {len(geometry.layers)}",
                "Describe every group and every layer once",
            )
        if any(not 1 <= count < 2**31 for count in self.blocks):
            raise GeometryError(
                "a group has no blocks, or more than block ids can name",
                "Give every group at least one block",
            )
        if any(not 1 <= nbytes <= MAX_BYTES for nbytes in region_bytes):
            raise GeometryError(
                "a region is empty or larger than 2**60 bytes", "Export the allocations as they are"
            )
        occupied: dict[tuple[int, int], list[_Extent]] = {}
        for layer, planes in zip(geometry.layers, self.planes, strict=True):
            if len(planes) != layer.planes:
                raise GeometryError(
                    f"layer {layer.name!r} maps {len(planes)} planes instead of {layer.planes}",
                    "Map every plane of every layer",
                )
            for plane in planes:
                extent = _check_plane(layer, plane, self.blocks[layer.group], region_bytes)
                occupied.setdefault((layer.group, plane.region), []).append(extent)
        for (group, region), extents in occupied.items():
            _check_disjoint(group, region, extents)


class _Extent(NamedTuple):
    """The bytes from a plane's first page to its last, and how its pages repeat in them."""

    begin: int
    end: int
    stride: int
    page_bytes: int

    def interleaves_with(self, other: _Extent) -> bool:
        """Whether pages of both are apart though the extents overlap: equal strides, and pages at
        different places within a stride."""
        if self.stride != other.stride:
            return False
        gap = (other.begin - self.begin) % self.stride
        return self.page_bytes <= gap <= self.stride - other.page_bytes


def _check_plane(
    layer: Layer, plane: PlanePages, blocks: int, region_bytes: Sequence[int]
) -> _Extent:
    if not 0 <= plane.region < len(region_bytes):
        raise GeometryError(
            f"layer {layer.name!r} lies in region {plane.region} of {len(region_bytes)}",
            "Export every allocation that holds KV",
        )
    if plane.stride_bytes < layer.page_bytes or plane.offset_bytes < 0:
        raise GeometryError(
            f"layer {layer.name!r} has pages of {layer.page_bytes} bytes every "
            f"{plane.stride_bytes} bytes from offset {plane.offset_bytes}",
            "Pages are contiguous bytes and must not overlap",
        )
    end = plane.offset_bytes + (blocks - 1) * plane.stride_bytes + layer.page_bytes
    if end > region_bytes[plane.region]:
        raise GeometryError(
            f"layer {layer.name!r} ends at byte {end} of a region of {region_bytes[plane.region]}",
            "Check the block count, the stride and the size of the exported allocation",
        )
    return _Extent(plane.offset_bytes, end, plane.stride_bytes, layer.page_bytes)


def _check_disjoint(group: int, region: int, extents: list[_Extent]) -> None:
    """Extents lie one after another, or interleave with equal strides; anything else overlaps."""
    open_extents: list[_Extent] = []
    for extent in sorted(extents):
        open_extents = [other for other in open_extents if other.end > extent.begin]
        if not all(extent.interleaves_with(other) for other in open_extents):
            raise GeometryError(
                f"pages of group {group} overlap in region {region}",
                "Give every plane of a group its own bytes",
            )
        open_extents.append(extent)


def check_block_ids(
    geometry: Geometry,
    page_map: PageMap,
    start_tokens: int,
    covered_tokens: int,
    block_ids: Sequence[BlockIds],
) -> int:
    """Check the blocks of a transfer before any address is computed; return its tokens.

    Raises `GeometryError` when a block is out of range or named twice, when the groups disagree
    about the number of tokens, when the range starts off a block boundary or runs past the
    `covered_tokens` of the chunks at hand.
    """
    if len(block_ids) != len(geometry.groups):
        raise GeometryError(
            f"block ids for {len(block_ids)} groups, but the geometry has {len(geometry.groups)}",
            "Send one array of block ids per group",
        )
    tokens = len(block_ids[0]) * geometry.groups[0].block_tokens
    if start_tokens < 0 or start_tokens % geometry.step_tokens or tokens % geometry.step_tokens:
        raise GeometryError(
            f"a transfer of {tokens} tokens from token {start_tokens} does not lie on blocks of "
            f"{geometry.step_tokens} tokens",
            "Transfer whole blocks",
        )
    if tokens == 0 or start_tokens + tokens > covered_tokens:
        raise GeometryError(
            f"a transfer of tokens [{start_tokens}, {start_tokens + tokens}) does not fit the "
            f"{covered_tokens} tokens that are covered",
            "Send block ids for the covered tokens only",
        )
    for group, (ids, blocks) in enumerate(zip(block_ids, page_map.blocks, strict=True)):
        if len(ids) * geometry.groups[group].block_tokens != tokens:
            raise GeometryError(
                f"group {group} names {len(ids)} blocks for {tokens} tokens",
                "Cover the same tokens in every group",
            )
        ordered = np.sort(ids)
        if int(ordered[0]) < 0 or int(ordered[-1]) >= blocks:
            raise GeometryError(
                f"a block id of group {group} is outside [0, {blocks})",
                "Send the block ids of the registered KV memory",
            )
        if (ordered[1:] == ordered[:-1]).any():
            raise GeometryError(
                f"a block id of group {group} is named twice", "Give every block once"
            )
    return tokens
