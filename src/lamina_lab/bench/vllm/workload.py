"""What is asked: documents seen before, each with a fresh tail. Pure; the same seeds every time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from lamina.errors import SettingsError

_FIRST_TOKEN = 3  # below are the unknown, the first and the last token


class Cell(NamedTuple):
    """Hit length and how many requests are sent at once."""

    hit_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.hit_tokens}:{self.concurrency}"


def parse_cells(text: str) -> tuple[Cell, ...]:
    """`"15104:1,14336:4"` → cells. Raises `SettingsError`."""
    cells = []
    for part in filter(None, text.split(",")):
        hit, colon, concurrency = part.strip().partition(":")
        if not (colon and hit.isdecimal() and concurrency.isdecimal() and int(concurrency)):
            raise SettingsError(
                f"{part!r} is no cell", "Use HIT:CONCURRENCY, for example 15104:1,14336:4"
            )
        cells.append(Cell(int(hit), int(concurrency)))
    return tuple(cells)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`documents` that were seen before; prompts begin with a document's first tokens."""

    documents: int = 8
    document_tokens: int = 15_104
    prompt_tokens: int = 15_154
    output_tokens: int = 16
    stream_prompt_tokens: int = 512
    vocabulary: int = 128_256
    seed: int = 0

    def document(self, number: int) -> list[int]:
        """The tokens of a document."""
        return list(tokens_of(self.document_tokens, self.vocabulary, (self.seed, 0, number)))

    def prompt(self, document: int, hit_tokens: int, *tail: int) -> list[int]:
        """A document's first `hit_tokens` tokens and a tail that only this `tail` seed gives."""
        fresh = self.prompt_tokens - hit_tokens
        tail = tuple(abs(part) * 2 + (part < 0) for part in tail)
        seed = (self.seed, 1, document, hit_tokens, *tail)
        return self.document(document)[:hit_tokens] + list(tokens_of(fresh, self.vocabulary, seed))

    def unseen(self, number: int, tokens: int) -> list[int]:
        """A prompt that shares nothing with any other."""
        return list(tokens_of(tokens, self.vocabulary, (self.seed, 2, number, tokens)))


@lru_cache(maxsize=64)
def tokens_of(count: int, vocabulary: int, seed: tuple[int, ...]) -> tuple[int, ...]:
    """`count` random tokens, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(_FIRST_TOKEN, vocabulary, count).tolist())
