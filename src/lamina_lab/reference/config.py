"""Shape of the reference engine's model and of its KV pages, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ReferenceConfig:
    """A small Llama with paged KV, all in float32.

    Raises:
        ValueError: a combination that cannot be computed; the message names cause and remedy.
    """

    layers: int = 16
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 704
    vocab: int = 512
    rope_theta: float = 10000.0
    block_tokens: int = 16
    """Tokens of one block, that is of one page."""
    tile_tokens: int = 64
    """Rows of every GEMM: the model computes in absolutely aligned tiles of so many tokens."""
    planes: int = 1
    """1: K and V packed in one page per block and layer; 2: K pages and V pages apart."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "seed" and getattr(self, field.name) <= 0:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)}; set it to a positive number"
                )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; set it to zero or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) do not divide evenly among kv_heads ({self.kv_heads}); "
                "make heads a multiple of kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, but RoPE rotates pairs; make head_dim even"
            )
        if self.tile_tokens % self.block_tokens:
            raise ValueError(
                f"tile_tokens ({self.tile_tokens}) is not a whole number of blocks; "
                f"make it a multiple of block_tokens ({self.block_tokens})"
            )
        if self.planes not in (1, 2):
            raise ValueError(
                f"planes is {self.planes}; set 1 (K and V packed) or 2 (K and V apart)"
            )

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one plane: one block of one layer, K and V if they are packed."""
        page_tensors = 2 // self.planes
        return page_tensors * self.block_tokens * self.kv_heads * self.head_dim * FLOAT32_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT32_BYTES
