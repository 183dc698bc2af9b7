"""A paged-attention Llama in NumPy whose bits depend on tokens and KV alone.

A row here is one token's hidden state. Its bits must not depend on what is computed beside it, on
where a prefill chunk starts, or on whether it is prefilled or decoded; only then does a comparison
of bytes with another run prove anything. BLAS keeps that promise only for calls of equal shape, so:

- rows are computed in tiles of `tile_tokens` that are aligned to absolute positions: a row's index
  in its tile is its position modulo `tile_tokens`, and rows that are not asked for are zero;
- every GEMM of a layer has `tile_tokens` rows, one request's each;
- the attention of tile t always runs over the padded context [0, (t + 1) * tile_tokens). Slots that
  hold no KV yet may contain anything, NaN included: they are read as zero and masked;
- BLAS runs on one thread.

The bits are those of one machine and one build of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from lamina_lab.reference.config import FloatArray, ReferenceConfig
from lamina_lab.reference.kv_memory import KVMemory
from lamina_lab.reference.weights import LayerWeights, Weights

NORM_EPSILON = np.float32(1e-5)
"""RMSNorm's, as in Llama."""

LayerHook = Callable[[int], None]


class Span(NamedTuple):
    """Consecutive tokens of one request, to compute in one step."""

    request: str
    start: int
    """Absolute position of the first token; the KV of all earlier positions is in the pages."""
    token_ids: Sequence[int] | npt.NDArray[np.integer]
    block_ids: npt.NDArray[np.int32]
    """The request's block table, covering at least the positions below `end`."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)


class _Tile(NamedTuple):
    """The part of a span that lies in one tile."""

    number: int
    """It holds positions [number * tile_tokens, (number + 1) * tile_tokens)."""
    rows: slice
    """Rows that are computed; the others are padding."""
    hidden: FloatArray
    """(tile_tokens, hidden), changed in place from layer to layer."""
    context_blocks: npt.NDArray[np.intp]
    """Blocks of the padded context [0, (number + 1) * tile_tokens)."""
    context_tokens: int
    """Tokens of the context that have KV once this tile has written its own."""
    slot_blocks: npt.NDArray[np.intp]
    slot_offsets: npt.NDArray[np.intp]
    """Per computed row: where its K and V go."""


class ReferenceModel:
    """The model, its weights, and nothing of any request.

    `weights` must have been made for a config of the same shape; by default they are seeded ones.
    One thread of a process may compute at a time: the BLAS thread limit is the process's.
    """

    def __init__(self, config: ReferenceConfig, weights: Weights | None = None) -> None:
        self.config = config
        self.weights = Weights.seeded(config) if weights is None else weights
        # Finding the BLAS libraries takes milliseconds, setting their limit microseconds.
        self._blas = ThreadpoolController()
        self._rotations: dict[int, tuple[FloatArray, FloatArray]] = {}
        future = np.triu(np.ones((config.tile_tokens, config.tile_tokens), dtype=np.bool_), k=1)
        self._causal = np.where(future, np.float32(-np.inf), np.float32(0))

    def forward(
        self,
        spans: Sequence[Span],
        memory: KVMemory,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> FloatArray:
        """Compute all spans, layer by layer, and write their K and V to the pages.

        In each layer, over the whole batch: project Q, K and V; write the new K and V to the pages;
        `before_layer(layer)`; attention, the only reader of the pages, and MLP;
        `after_layer(layer)`. An exception from a hook ends the step there.

        Returns:
            (len(spans), vocab) logits of each span's last token.

        Raises:
            ValueError: a span is empty, starts below zero, or ends beyond its block table.
        """
        tiles_of_spans = [self._tiles(span) for span in spans]
        tiles = [tile for span_tiles in tiles_of_spans for tile in span_tiles]
        logits = np.empty((len(spans), self.config.vocab), dtype=np.float32)
        with self._blas.limit(limits=1, user_api="blas"):
            for layer, weights in enumerate(self.weights.layers):
                keys, values = memory.keys(layer), memory.values(layer)
                queries = [self._write_kv(tile, weights, keys, values) for tile in tiles]
                if before_layer is not None:
                    before_layer(layer)
                for tile, query in zip(tiles, queries, strict=True):
                    attended = self._attend(tile, query, keys, values)
                    np.add(tile.hidden, attended @ weights.output, out=tile.hidden)
                    np.add(tile.hidden, self._mlp(tile, weights), out=tile.hidden)
                if after_layer is not None:
                    after_layer(layer)
            for index, span_tiles in enumerate(tiles_of_spans):
                last = span_tiles[-1]
                # The head too sees a whole tile: a GEMM of one row per span would have a shape,
                # and so bits, that depend on the batch.
                logits[index] = (_rms_norm(last.hidden) @ self.weights.head)[last.rows.stop - 1]
        return logits

    def _tiles(self, span: Span) -> list[_Tile]:
        """Cut a span at the tile boundaries and look up its tokens."""
        config = self.config
        blocks = np.asarray(span.block_ids, dtype=np.intp)
        if not len(span.token_ids) or span.start < 0:
            raise ValueError(
                f"request {span.request}: span of {len(span.token_ids)} tokens at position "
                f"{span.start}; give at least one token at a position of zero or more"
            )
        if span.end > len(blocks) * config.block_tokens:
            raise ValueError(
                f"request {span.request}: {len(blocks)} blocks of {config.block_tokens} tokens do "
                f"not reach position {span.end}; allocate blocks before computing the span"
            )
        size = config.tile_tokens
        embedded = self.weights.embedding[np.asarray(span.token_ids)]
        tiles = []
        for number in range(span.start // size, -(-span.end // size)):
            low, high = max(span.start, number * size), min(span.end, (number + 1) * size)
            rows = slice(low - number * size, high - number * size)
            hidden = np.zeros((size, config.hidden), dtype=np.float32)
            hidden[rows] = embedded[low - span.start : high - span.start]
            computed = blocks[: -(-high // config.block_tokens)]
            # The padding becomes zero after it is read; one's own block, so as to touch no other.
            context_blocks = np.full((number + 1) * size // config.block_tokens, computed[-1])
            context_blocks[: len(computed)] = computed
            positions = np.arange(low, high)
            tiles.append(
                _Tile(
                    number=number,
                    rows=rows,
                    hidden=hidden,
                    context_blocks=context_blocks,
                    context_tokens=high,
                    slot_blocks=blocks[positions // config.block_tokens],
                    slot_offsets=positions % config.block_tokens,
                )
            )
        return tiles

    def _write_kv(
        self, tile: _Tile, weights: LayerWeights, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Write the tile's new K and V to the pages; return its Q, scaled for attention.

        Returns:
            (kv_heads, heads_per_kv_head * tile_tokens, head_dim).
        """
        config = self.config
        heads, rotated_heads = config.heads, config.heads + config.kv_heads
        qkv = (_rms_norm(tile.hidden) @ weights.qkv).reshape(
            config.tile_tokens, rotated_heads + config.kv_heads, config.head_dim
        )
        rotated = self._rotate(qkv[:, :rotated_heads], tile.number)
        keys[tile.slot_blocks, tile.slot_offsets] = rotated[tile.rows, heads:]
        values[tile.slot_blocks, tile.slot_offsets] = qkv[tile.rows, rotated_heads:]
        query = rotated[:, :heads] * np.float32(1 / math.sqrt(config.head_dim))
        grouped = query.reshape(
            config.tile_tokens, config.kv_heads, config.heads_per_kv_head, config.head_dim
        )
        return grouped.transpose(1, 2, 0, 3).reshape(config.kv_heads, -1, config.head_dim)

    def _attend(
        self, tile: _Tile, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Causal attention of the tile over its padded context: (tile_tokens, heads * head_dim)."""
        config = self.config
        size, group = config.tile_tokens, config.heads_per_kv_head
        scores: FloatArray = query @ self._context(tile, keys).transpose(0, 2, 1)
        # All that lies before the tile is visible to all of its rows.
        scores.reshape(config.kv_heads, group, size, -1)[..., -size:] += self._causal
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        attended = scores @ self._context(tile, values)
        attended /= scores.sum(axis=-1, keepdims=True)
        by_row = attended.reshape(config.kv_heads, group, size, -1).transpose(2, 0, 1, 3)
        return by_row.reshape(size, -1)

    def _context(self, tile: _Tile, pages: FloatArray) -> FloatArray:
        """Gather the padded context from the pages: (kv_heads, context, head_dim)."""
        gathered = pages[tile.context_blocks].reshape(-1, *pages.shape[2:])
        # A weight of zero times NaN is NaN: mask the unwritten slots' contents too.
        gathered[tile.context_tokens :] = 0
        return gathered.transpose(1, 0, 2)

    def _mlp(self, tile: _Tile, weights: LayerWeights) -> FloatArray:
        """SwiGLU."""
        gate, up = np.split(_rms_norm(tile.hidden) @ weights.gate_up, 2, axis=1)
        activated: FloatArray = gate / (1 + np.exp(-gate)) * up
        return activated @ weights.down

    def _rotate(self, heads: FloatArray, tile_number: int) -> FloatArray:
        """RoPE over (tile_tokens, any, head_dim), halves rotated against each other as in Llama."""
        if tile_number not in self._rotations:
            size, dim = self.config.tile_tokens, self.config.head_dim
            frequencies = self.config.rope_theta ** (-np.arange(0, dim, 2) / dim)
            positions = np.arange(tile_number * size, (tile_number + 1) * size)
            angles = np.outer(positions, frequencies)[:, None, :]
            self._rotations[tile_number] = (
                np.cos(angles).astype(np.float32),
                np.sin(angles).astype(np.float32),
            )
        cos, sin = self._rotations[tile_number]
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms_norm(rows: FloatArray) -> FloatArray:
    """Scale each row to a mean square of one."""
    size: FloatArray = np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + NORM_EPSILON)
    return rows / size
