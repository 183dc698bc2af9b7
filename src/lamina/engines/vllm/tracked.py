"""What the scheduler's side keeps about a request, and the hold that transfers have on blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lamina.client import Offer, Prefix


@dataclass(eq=False)
class Tracked:
    """A request that vLLM knows."""

    request: Any
    prefix: Prefix
    offer: Offer | None = None
    """What vLLM was told about a hit; it counts once blocks are allocated for it."""
    table: Any = None
    """vLLM's own view of the request's blocks (`KVCacheBlocks`): it follows what vLLM does."""
    admitted_tokens: int = 0
    """Tokens that counted as computed when the request was last scheduled anew. Others may be
    computing them in that very step, so they are confirmed only once more than they are."""

    @property
    def name(self) -> str:
        return str(self.request.request_id)

    @property
    def blocks(self) -> list[int]:
        """The blocks that the request has now, by position."""
        return self.blocks_from(0)

    def blocks_from(self, first: int, end: int | None = None) -> list[int]:
        """Those at these positions."""
        blocks = () if self.table is None else self.table.blocks[0][first:end]
        return [block.block_id for block in blocks]


NULL_BLOCK = 0
"""The block that vLLM puts where a request has none: nobody's KV."""


class HeldBlocks:
    """One more reference in vLLM's own block pool on every block that a transfer may touch.

    So abort, preemption, finish and time-out, in any order, never hand a block out while it may
    still be read or written.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """vLLM's block pool; before anything is held."""
        self._pool = pool

    def hold(self, blocks: list[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: list[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def evict(self, blocks: Iterable[int]) -> None:
        """Nobody may find the blocks in the prefix cache any more."""
        self._pool.evict_blocks(set(blocks))
