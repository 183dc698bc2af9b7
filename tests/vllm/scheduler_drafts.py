"""What a step of the toy engine computes, and the drafts in it: some are right, some are not.

A drafted token's KV lies in its block whether it is accepted or not, until another token's
overwrites it: it stands for a text that nobody has said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.vllm.scripted_client import BLOCK, Text, ToyModel

NO_DRAFT = -1
"""What vLLM schedules where a draft is yet to come, or as padding: never accepted."""


class Part(NamedTuple):
    """A request's part of a step: it computes tokens [start, end), of which the last are `drafts`
    that were proposed, and writes `kv`. As many of them as are `accepted` are the model's own."""

    name: str
    start: int
    end: int
    blocks: npt.NDArray[np.int64]
    kv: list[int]
    drafts: int = 0
    accepted: int = 0

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Where each token's KV lies in a layer's memory."""
        return (self.blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()

    @property
    def written(self) -> list[int]:
        return [int(b) for b in self.blocks[self.start // BLOCK : -(-self.end // BLOCK)]]

    @property
    def computed(self) -> int:
        """Tokens that are computed after the step, and right."""
        return self.end - self.drafts + self.accepted


class Drafter:
    """Proposes up to `count` tokens after those that a request has."""

    def __init__(self, model: ToyModel, count: int) -> None:
        self.count = count
        self.is_right: Callable[[str, int], bool | None] = lambda name, position: position % 3 != 0
        """Whether the draft for a position of a request is right; None: nothing is proposed."""
        self.seen: Counter[str] = Counter()
        """How many drafts were accepted and how many rejected."""
        self._model = model

    def propose(self, name: str, text: Text, position: int) -> list[int]:
        """Tokens for the positions from this one on."""
        proposed: list[int] = []
        for each in range(position, position + self.count):
            is_right = self.is_right(name, each)
            if is_right is None:
                break
            proposed.append(text.tokens(each + 1)[-1] + (not is_right))
        return proposed

    def part(
        self,
        name: str,
        text: Text,
        start: int,
        end: int,
        blocks: npt.NDArray[np.int64],
        drafts: Sequence[int],
    ) -> Part:
        """The part of a step whose last tokens are these drafts."""
        known = end - len(drafts)
        truth = text.tokens(end)[known:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        kv = text.kv(known + accepted)[:]
        for token in drafts[accepted:]:
            kv.append(self._model.kv(kv[-1], token))
        self.seen["accepted"] += accepted
        self.seen["rejected"] += len(drafts) - accepted
        return Part(name, start, end, blocks, kv[start:], len(drafts), accepted)
