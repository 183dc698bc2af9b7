"""Leases: a looked-up run stays pinned until all ranks of its engine have ended their retrieve of
it, its request ends, its owner dies, or its time is up. Used by the server's event loop only."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from lamina.errors import ErrorCode, refuse
from lamina.server.index import Chunk, Index
from lamina.server.turns import CHUNKS_PER_TURN, KEYS_PER_TURN, Pace, Turns, at_once
from lamina.shards import Shard


@dataclass(frozen=True, slots=True)
class Lease:
    """`chunks` are pinned for `request` of `engine`; `owner` is the session that looked them up."""

    number: int
    engine: str
    owner: Hashable
    request: str
    chunks: tuple[Chunk, ...]
    ends_at_s: float
    ended_ranks: set[int] = field(default_factory=set)
    """Those of the engine's ranks that have ended a retrieve of it."""


class LeaseTable:
    """All leases. `clock` gives seconds and never goes back; `later` gets what remains to be done
    when an owner with many leases dies."""

    def __init__(
        self,
        index: Index,
        ttl_s: float,
        clock: Callable[[], float],
        later: Callable[[Turns[None]], None] = at_once,
    ) -> None:
        self._index = index
        self._later = later
        self._ttl_s = ttl_s
        self._clock = clock
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # in the order in which they run out
        self._of_request: dict[tuple[str, str], int] = {}
        self._of_owner: dict[Hashable, dict[int, Lease]] = {}
        self._chunks_of_owner: Counter[Hashable] = Counter()
        self._number = random.getrandbits(31) << 32  # no lease of a server before this one

    def __len__(self) -> int:
        return len(self._leases)

    def count_of(self, owner: Hashable) -> tuple[int, int]:
        """How many leases an owner has, and of how many chunks together."""
        return len(self._of_owner.get(owner, ())), self._chunks_of_owner[owner]

    def grant(self, engine: str, owner: Hashable, request: str, chunks: list[Chunk]) -> Lease:
        """Take over a pin of each of `chunks`; ends the lease that the same request had before."""
        self.end_request(engine, request)
        self._number += 1
        ends_at_s = self._clock() + self._ttl_s
        lease = Lease(self._number, engine, owner, request, tuple(chunks), ends_at_s)
        self._leases[lease.number] = lease
        self._of_request[engine, request] = lease.number
        self._of_owner.setdefault(owner, {})[lease.number] = lease
        self._chunks_of_owner[owner] += len(lease.chunks)
        return lease

    def get(self, engine: str, number: int) -> Lease:
        """The lease, if it is this engine's; raises `RequestRefusedError` otherwise."""
        lease = self._leases.get(number)
        if lease is None or lease.engine != engine:
            raise refuse(
                f"there is no lease {number}",
                "It ended or ran out: look the prompt up again, or recompute",
                ErrorCode.UNKNOWN_LEASE,
            )
        return lease

    def end(self, engine: str, number: int) -> None:
        """End a lease if it is there and this engine's."""
        lease = self._leases.get(number)
        if lease is not None and lease.engine == engine:
            self._drop(lease)

    def end_of_rank(self, engine: str, number: int, shard: Shard) -> None:
        """A worker's retrieve has ended, however: a lease ends with that of the last rank."""
        lease = self._leases.get(number)
        if lease is not None and lease.engine == engine:
            lease.ended_ranks.add(shard.rank)
            if len(lease.ended_ranks) >= shard.ranks:
                self._drop(lease)

    def end_request(self, engine: str, request: str) -> None:
        if (number := self._of_request.get((engine, request))) is not None:
            self._drop(self._leases[number])

    def end_owner(self, owner: Hashable) -> None:
        """The owner looks nothing up any more: end its leases, many of them in turns."""
        if (own := self._of_owner.get(owner)) is not None:
            self._later(self._end_all(list(own.values())))

    def expire(self) -> int:
        """End leases whose time is up, as many as one turn may; return how many, 0 in the end."""
        expired, now, pace = 0, self._clock(), Pace()
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.ends_at_s > now:
                break
            self._drop(lease)
            expired += 1
            if pace.is_spent(_steps(lease)):
                break
        return expired

    def _end_all(self, leases: list[Lease]) -> Turns[None]:
        pace = Pace()
        for lease in leases:
            if lease.number in self._leases:  # not ended in another way since
                self._drop(lease)
            if pace.is_spent(_steps(lease)):
                yield None

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.number]
        del self._of_request[lease.engine, lease.request]
        own = self._of_owner[lease.owner]
        del own[lease.number]
        self._chunks_of_owner[lease.owner] -= len(lease.chunks)
        if not own:
            del self._of_owner[lease.owner], self._chunks_of_owner[lease.owner]
        self._index.unpin(lease.chunks)


def _steps(lease: Lease) -> int:
    """What dropping it costs; of a long run, all but the first part is unpinned later on."""
    return 1 + len(lease.chunks) * CHUNKS_PER_TURN // KEYS_PER_TURN
