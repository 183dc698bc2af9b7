"""What a mutation is: one guard of the code taken away, and the tests that must notice."""

from __future__ import annotations

from typing import Literal, NamedTuple

Environment = Literal["core", "vllm"]


class Mutation(NamedTuple):
    """`old` occurs exactly once in `file` (below `src/lamina`) and is replaced by `new`.

    `lost` says what may happen without the guard, `invariant` whose guard it is (the numbers are
    those of `docs/architecture.md`; 0: a measurement or a decision). `tests` are pytest arguments.
    `equivalent` is empty, or the reason why nothing that can be observed changes.
    """

    name: str
    invariant: int
    lost: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""
