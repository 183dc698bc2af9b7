"""The engine's own blocks: who holds them, and which prefixes they still hold when nobody does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks with a prefix cache; free ones are reused least recent first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, forgetting what they cached; None when there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._uncache(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more; a free one is free no longer."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Undo one `hold` or `allocate`; what is cached stays findable until its block is reused.

        Blocks are freed in the order given and reused in that order: give a prefix's tail first.
        """
        for block in blocks:
            assert self._references[block] > 0, "released more often than held"
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def cache(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make blocks findable under the keys of their prefixes; an earlier block stays."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The longest run of cached blocks; `hold` them before anything else is allocated."""
        run = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            run.append(block)
        return run

    def evict(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, for example because what they hold is bad."""
        for block in blocks:
            self._uncache(block)

    def _uncache(self, block: int) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
