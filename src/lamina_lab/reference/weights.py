"""Seeded weights under which the output depends on every block of KV.

Weights that merely have the right shape prove nothing: with all of them near zero attention hardly
matters, and unrelated prompts give one and the same continuation. Here every projection is
N(0, gain / sqrt(fan_in)) with gains that keep attention sharp and its contribution large beside the
residual, so a damaged page shows in the logits. RMSNorm gains are 1 and hence not stored.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from lamina_lab.reference.config import FloatArray, ReferenceConfig

QUERY_KEY_GAIN = 1.5
"""Scores of standard deviation about 2: attention is far from a mean of all tokens, yet no token's
weight is so small that one altered byte of its page, in any layer, leaves the logits as they are.
(With 2.5, as for larger models, a third of the last layer's pages could be altered unseen.)"""
VALUE_OUTPUT_GAIN = 1.5
MLP_GAIN = 1.0
HEAD_GAIN = 4.0


@dataclass(frozen=True)
class LayerWeights:
    """One layer's projections, each of shape (inputs, outputs); read-only."""

    qkv: FloatArray
    """(hidden, (heads + 2 * kv_heads) * head_dim): all query heads, then K, then V."""
    output: FloatArray
    """(heads * head_dim, hidden)."""
    gate_up: FloatArray
    """(hidden, 2 * intermediate): gate, then up."""
    down: FloatArray
    """(intermediate, hidden)."""


@dataclass(frozen=True)
class Weights:
    """All weights of one model, float32 and read-only."""

    embedding: FloatArray
    """(vocab, hidden)."""
    layers: tuple[LayerWeights, ...]
    head: FloatArray
    """(hidden, vocab)."""

    @classmethod
    def seeded(cls, config: ReferenceConfig) -> Weights:
        """Weights that depend on nothing but `config`: the same config gives the same bytes."""
        rng = np.random.Generator(np.random.PCG64(config.seed))
        hidden, intermediate = config.hidden, config.intermediate
        query_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim

        def projections(inputs: int, *parts: tuple[int, float]) -> FloatArray:
            """One (inputs, sum of outputs) matrix of `parts` (outputs, gain), side by side."""
            drawn = [
                rng.standard_normal((inputs, outputs), dtype=np.float32)
                * np.float32(gain / math.sqrt(inputs))
                for outputs, gain in parts
            ]
            return _read_only(np.concatenate(drawn, axis=1))

        def layer() -> LayerWeights:
            return LayerWeights(
                qkv=projections(
                    hidden,
                    (query_width, QUERY_KEY_GAIN),
                    (kv_width, QUERY_KEY_GAIN),
                    (kv_width, VALUE_OUTPUT_GAIN),
                ),
                output=projections(query_width, (hidden, VALUE_OUTPUT_GAIN)),
                gate_up=projections(hidden, (intermediate, MLP_GAIN), (intermediate, MLP_GAIN)),
                down=projections(intermediate, (hidden, MLP_GAIN)),
            )

        return cls(
            embedding=_read_only(rng.standard_normal((config.vocab, hidden), dtype=np.float32)),
            layers=tuple(layer() for _ in range(config.layers)),
            head=projections(hidden, (config.vocab, HEAD_GAIN)),
        )

    def fingerprint(self) -> str:
        """Hex SHA-256 over the bytes of all weights, computed anew on each call."""
        digest = hashlib.sha256(self.embedding.data)
        for layer in self.layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                digest.update(matrix.data)
        digest.update(self.head.data)
        return digest.hexdigest()


def _read_only(array: FloatArray) -> FloatArray:
    array.setflags(write=False)
    return array
