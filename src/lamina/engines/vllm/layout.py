"""Geometry from the tensors that vLLM hands over: real shapes and strides, no backend's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from lamina.errors import GeometryError
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap, PlanePages

if TYPE_CHECKING:
    import torch


class KvLayout(NamedTuple):
    """What vLLM's KV is and where it lies.

    `layer_of` maps the names that vLLM's hooks use to layers; `signature` tells apart layouts whose
    pages have the same size but another order inside.
    """

    geometry: Geometry
    page_map: PageMap
    allocations: list[Allocation]
    layer_of: dict[str, int]
    signature: str

    @property
    def token_bytes(self) -> int:
        """The KV of a token, in all layers."""
        block = sum(layer.planes * layer.page_bytes for layer in self.geometry.layers)
        return block // self.geometry.groups[0].block_tokens


def layout_of(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_tokens: int, chunk_tokens: int
) -> KvLayout:
    """Describe `kv_caches` (layer name → tensor). Raises `GeometryError` for what does not fit."""
    allocations: list[Allocation] = []
    layers: list[Layer] = []
    planes: list[tuple[PlanePages, ...]] = []
    layer_of: dict[str, int] = {}
    seen: dict[int, int] = {}
    signatures = set()
    for name in sorted(kv_caches, key=_execution_order):
        tensor = kv_caches[name]
        if not hasattr(tensor, "data_ptr"):
            raise GeometryError(
                f"layer {name!r} keeps several tensors (a state-space layer?)",
                "Only attention layers can be cached: serve this model without Lamina",
            )
        if (shared := seen.get(tensor.data_ptr())) is not None:
            layer_of[name] = shared  # it uses another layer's KV
            continue
        seen[tensor.data_ptr()] = layer_of[name] = len(layers)
        page_bytes, stride_bytes, offsets = _pages(name, tensor, num_blocks, block_tokens)
        storage = tensor.untyped_storage()
        allocation = Allocation(storage.data_ptr(), storage.nbytes())
        if allocation not in allocations:
            allocations.append(allocation)
        region = allocations.index(allocation)
        first = tensor.data_ptr() - allocation.address
        layers.append(Layer(name, 0, len(offsets), page_bytes))
        planes.append(tuple(PlanePages(region, first + o, stride_bytes) for o in offsets))
        signatures.add(f"{tensor.dtype}{list(tensor.shape[1:])}{list(tensor.stride()[1:])}")
    return KvLayout(
        Geometry(chunk_tokens, (Group(block_tokens),), tuple(layers)),
        PageMap((num_blocks,), tuple(planes)),
        allocations,
        layer_of,
        ";".join(sorted(signatures)),
    )


def _pages(
    name: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int
) -> tuple[int, int, list[int]]:
    """Bytes of a page, distance between pages, and where each plane's first page begins.

    The block dimension is the outermost whose size is a multiple of the block count (a kernel may
    use smaller blocks than the scheduler). What lies outside it are planes, what lies inside must
    be contiguous bytes.
    """
    item = tensor.element_size()
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    fits = [
        size >= num_blocks
        and size % num_blocks == 0
        and block_tokens % (size // num_blocks) == 0  # kernel blocks divide a block
        for _, size in dimensions
    ]
    if True not in fits:
        raise GeometryError(
            f"layer {name!r} of shape {tuple(tensor.shape)} has no dimension for "
            f"{num_blocks} blocks",
            "This attention backend's KV cannot be cached: choose another one",
        )
    index = fits.index(True)
    block_stride, size = dimensions[index]
    kernel_blocks = size // num_blocks
    inside = 1
    for stride, length in reversed(dimensions[index + 1 :]):
        if length > 1 and stride != inside:
            raise GeometryError(
                f"a block of layer {name!r} is not contiguous (shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()})",
                "Choose an attention backend or a KV layout that keeps a block's bytes together",
            )
        inside *= length
    if kernel_blocks > 1 and block_stride != inside:
        raise GeometryError(
            f"the kernel blocks of a block of layer {name!r} are apart",
            "Choose a block size that the attention backend uses as it is",
        )
    offsets = [0]
    for stride, length in dimensions[:index]:
        offsets = [base + i * stride * item for base in offsets for i in range(length)]
    return inside * kernel_blocks * item, block_stride * kernel_blocks * item, offsets


def _execution_order(name: str) -> list[int | str]:
    """Sorts layer names by their numbers: `layers.9` before `layers.10`."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdigit() else part for part in parts]
