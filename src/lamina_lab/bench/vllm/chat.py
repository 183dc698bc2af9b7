"""What is asked in a chat, and when. Pure; the same seeds every time.

Every conversation begins with the same system prompt and a document of its own; a turn's prompt is
all that was said before, answers included, and new tokens. A *run* is all conversations once, at
one rate; each run has documents and words of its own, which every arm gets alike (not so the
answers, which an engine gives as it computes: only their length is the same).

A run has two parts. In the first the documents are read: everybody's first turn, at Poisson times.
Once all of these have ended the other turns come: again a Poisson process, whose arrivals belong to
the conversations in rounds, each in another order. It is an open loop: the times are drawn before,
at so many a second over all conversations, whatever the engine does. But nobody asks on before
having the answer: a turn whose former one has not ended at its time is *deferred*, and comes once
that has, plus a pause of its own, drawn before too.

So no cold document is computed beside the later turns, which are what a cache can help.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from lamina.errors import SettingsError
from lamina_lab.bench.vllm.workload import tokens_of

_SYSTEM, _LENGTHS, _DOCUMENT, _WORDS, _TIMES = range(10, 15)  # the seeds' second parts


class Turn(NamedTuple):
    """When a turn comes: `at_s` after its part of the run began, or `pause_s` after the end of the
    former turn if that ended later. Turns are counted from 1."""

    conversation: int
    turn: int
    at_s: float
    pause_s: float

    def due_s(self, former_end_s: float = -math.inf) -> float:
        """When it comes, on the clock of `at_s`."""
        return former_end_s + self.pause_s if former_end_s > self.at_s else self.at_s


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens. A document has from `least_document` to `most_document`."""

    conversations: int = 16
    system_tokens: int = 1024
    least_document: int = 6_000
    most_document: int = 14_000
    turns: int = 4
    turn_tokens: int = 192
    output_tokens: int = 64
    vocabulary: int = 128_256
    seed: int = 0

    def opening(self, run: int, conversation: int) -> list[int]:
        """The system prompt and the conversation's document."""
        system = tokens_of(self.system_tokens, self.vocabulary, (self.seed, _SYSTEM, run))
        length = self._document_tokens[conversation]
        seed = (self.seed, _DOCUMENT, run, conversation)
        return [*system, *tokens_of(length, self.vocabulary, seed)]

    def words(self, run: int, conversation: int, turn: int) -> list[int]:
        """What is new in a turn."""
        seed = (self.seed, _WORDS, run, conversation, turn)
        return list(tokens_of(self.turn_tokens, self.vocabulary, seed))

    def first_turns(self, run: int, rate: float) -> list[Turn]:
        """Everybody's first, `rate` a second; in the order of their times."""
        return self._arrivals(run, rate, [1])

    def later_turns(self, run: int, rate: float) -> list[Turn]:
        """All others; `at_s` counts from the end of the last first turn."""
        return self._arrivals(run, rate, list(range(2, self.turns + 1)))

    @property
    def longest_tokens(self) -> int:
        """The longest conversation at its end, the last answer included."""
        return max(self._final_tokens)

    def gpu_blocks(self, block_tokens: int, is_for_all: bool) -> int:
        """Blocks for all that is said in a run, or for a third of it; at least for one."""
        shared = self.system_tokens // block_tokens  # counted once
        each = [-(-tokens // block_tokens) for tokens in self._final_tokens]
        if is_for_all:
            return sum(each) + len(each) + 1  # nothing is ever pushed out; one is vLLM's own
        a_third = (sum(each) - shared * (len(each) - 1)) // 3
        return max(a_third, max(each) + 1) + 1

    def _arrivals(self, run: int, rate: float, turns: list[int]) -> list[Turn]:
        rng = np.random.default_rng((self.seed, _TIMES, run, *turns))
        order = [(int(c), turn) for turn in turns for c in rng.permutation(self.conversations)]
        times_s = rng.exponential(1 / rate, len(order)).cumsum().tolist()
        pauses_s = rng.exponential(1 / rate, len(order)).tolist()
        return [
            Turn(conversation, turn, at_s, pause_s)
            for (conversation, turn), at_s, pause_s in zip(order, times_s, pauses_s, strict=True)
        ]

    @property
    def _document_tokens(self) -> list[int]:
        """Of all runs alike: so is the memory that they need."""
        rng = np.random.default_rng((self.seed, _LENGTHS))
        lengths = rng.integers(self.least_document, self.most_document + 1, self.conversations)
        return [int(length) for length in lengths]

    @property
    def _final_tokens(self) -> list[int]:
        said = self.system_tokens + self.turns * (self.turn_tokens + self.output_tokens)
        return [said + length for length in self._document_tokens]


def parse_rates(text: str) -> tuple[float, ...]:
    """`"3,6"` → rates a second. Raises `SettingsError`."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise SettingsError(f"{text!r} are no rates", "Use requests a second, for example 3,6")
    return rates
