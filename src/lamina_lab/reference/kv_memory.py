"""The reference engine's paged KV: one private anonymous mapping per layer.

As in vLLM each layer is one allocation, cut into pages of one block each. A page is contiguous
bytes. With K and V packed a layer has one plane of pages (2, block_tokens, kv_heads, head_dim);
with K and V apart it has two planes of pages (block_tokens, kv_heads, head_dim) in the same
allocation, all K pages first.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from lamina_lab.reference.config import FloatArray, ReferenceConfig


class KVMemory:
    """KV pages of `num_blocks` blocks in every layer, zero at first.

    All arrays it hands out are writable views of the pages, never copies.

    Raises:
        ValueError: `num_blocks` is not positive.
    """

    def __init__(self, config: ReferenceConfig, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks is {num_blocks}; a KV memory needs at least one block")
        self.config = config
        self.num_blocks = num_blocks
        self.page_stride_bytes = config.page_bytes
        """Bytes from one page of a plane to the next."""
        self._layers = [self._allocate() for _ in range(config.layers)]

    def _allocate(self) -> FloatArray:
        """One layer: (planes, num_blocks, K and V if packed, block_tokens, kv_heads, head_dim)."""
        config = self.config
        # Python's default for anonymous memory is MAP_SHARED; an engine's KV is private.
        mapping = mmap.mmap(
            -1,
            config.planes * self.num_blocks * config.page_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        page = (config.block_tokens, config.kv_heads, config.head_dim)
        return np.frombuffer(mapping, dtype=np.float32).reshape(
            config.planes, self.num_blocks, 2 // config.planes, *page
        )

    def planes(self, layer: int) -> list[FloatArray]:
        """The layer's planes of pages, each (num_blocks, *page)."""
        planes = self._layers[layer]
        return list(planes if self.config.planes == 1 else planes[:, :, 0])

    def keys(self, layer: int) -> FloatArray:
        """All K of the layer, (num_blocks, block_tokens, kv_heads, head_dim)."""
        return self._layers[layer][0, :, 0]

    def values(self, layer: int) -> FloatArray:
        """All V of the layer, (num_blocks, block_tokens, kv_heads, head_dim)."""
        return self._layers[layer][-1, :, -1]

    def page(self, layer: int, plane: int, block: int) -> npt.NDArray[np.uint8]:
        """The page_bytes bytes of one page."""
        page: FloatArray = self.planes(layer)[plane][block]
        return page.reshape(-1).view(np.uint8)

    def address(self, layer: int) -> int:
        """Address of the layer's first byte in this process; a multiple of the OS page size."""
        return self._layers[layer].ctypes.data

    def nbytes(self, layer: int) -> int:
        """Bytes of the layer's allocation, all planes."""
        return self._layers[layer].nbytes

    def plane_offset_bytes(self, plane: int) -> int:
        """Bytes from the start of a layer's allocation to its plane number `plane`."""
        return plane * self.num_blocks * self.page_stride_bytes

    def poison(self, block_ids: npt.ArrayLike) -> None:
        """Fill these blocks with NaN in all layers: whoever reads them shows it."""
        blocks = np.asarray(block_ids, dtype=np.intp)
        for layer in self._layers:
            layer[:, blocks] = np.nan

    def close(self) -> None:
        """Let go of the memory; this object is then unusable. May be called twice.

        The mappings end now, or with the last view of them that a caller still holds.
        """
        self._layers.clear()
