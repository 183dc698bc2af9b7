"""Sessions: one per connection, with what the server has for the process at its other end.

A session ends when its socket closes or its process dies, whichever is seen first. Its leases end,
in turns; its transfers are cancelled; its memory, on another thread, and then its board and pidfd
are given back when the last transfer has ended, because a lane may be using them until then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.devices.base import EngineMemory
from lamina.errors import ErrorCode, refuse
from lamina.geometry import Geometry
from lamina.linux import Peer
from lamina.server.lane import Lane
from lamina.server.mappings import Memories
from lamina.server.transfer import Transfer
from lamina.server.ways import Ways
from lamina.shards import ALONE, ChunkLayout, Shard

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Worker:
    """What a connection registered: its KV memory (or its rings) with the ways to it and who closes
    it, the lanes of its device, what it says of itself to its engine's other processes, and which
    shard of a chunk it keeps."""

    device: str
    geometry: Geometry
    ways: Ways
    kv_bytes: int
    memory: EngineMemory
    memories: Memories
    retrieves: Lane
    stores: Lane
    description: bytes
    shard: Shard


class Session:
    """One connection. Used by the server's event loop only."""

    def __init__(self, peer: Peer, board: Board) -> None:
        self.peer = peer
        self.board = board
        self.engine = ""
        self.label = ""
        self.model = ""
        self.worker: Worker | None = None
        self.in_hand = False
        """Whether a request of it has been taken up and takes its turns."""
        self.transfers: dict[int, Transfer] = {}
        """Those that have not ended, by number. Below is what they take together."""
        self.slots: set[int] = set()
        """One of each retrieve."""
        self.blocks = 0
        """Into which all retrieves go."""
        self.stores = 0
        self.reserved_bytes = 0
        """By all stores, also one that still makes room; `StoreBudget` counts them."""
        self.number = 0
        self.failure = ""
        """Why its last transfer failed; empty after one that did not."""
        self.hang_up: Callable[[], None] = _not_connected
        """Closes the connection from this end."""
        self.over = asyncio.Event()
        """Set once nothing of the session will touch memory any more, and its own is given back."""
        self._is_lost = False
        self._is_closing = False

    def __str__(self) -> str:
        return f"{self.label or 'engine'} (pid {self.peer.pid})"

    @property
    def stats(self) -> protocol.EngineStats:
        """What an operator is told of it."""
        device, nbytes = "", 0
        if self.worker is not None:
            device, nbytes = self.worker.device, self.worker.kv_bytes
        return protocol.EngineStats(self.label, self.model, self.peer.pid, device, nbytes)

    def log(self, event: str) -> None:
        """Say what has become of it. Of connections without KV memory, as those of a scheduler
        or a command line, only debugging wants to know."""
        fields: dict[str, object] = {"label": self.label, "model": self.model}
        if self.worker is not None:
            fields |= {"device": self.worker.device, "kv_bytes": self.worker.kv_bytes}
        level = logging.DEBUG if self.worker is None else logging.INFO
        log.log(level, f"%s {event}", self, extra={"fields": fields})

    def need_hello(self) -> str:
        """The engine's name; raises `RequestRefusedError` before Hello."""
        if not self.engine:
            raise refuse("the connection has not said hello", "Send Hello first")
        return self.engine

    def need_worker(self) -> Worker:
        """What the connection registered; raises `RequestRefusedError` before Register."""
        if self.worker is None:
            raise refuse(
                "the connection has registered no KV memory",
                "Send Register first",
                ErrorCode.NOT_REGISTERED,
            )
        return self.worker

    @property
    def shard(self) -> Shard:
        """Which it keeps of every chunk; a connection without a worker is taken for the only."""
        return ALONE if self.worker is None else self.worker.shard

    def begin(self, transfer: Transfer) -> None:
        """Note a transfer before its lane gets it."""
        self.transfers[transfer.number] = transfer
        self.blocks += transfer.blocks
        if transfer.slot is None:
            self.stores += 1
        else:
            self.slots.add(transfer.slot.number)

    def finish(self, transfer: Transfer) -> None:
        """It has ended, and nothing is kept for it any more. Says why one failed, once until one
        does not: a thousand may of an engine that dies."""
        failure = "" if transfer.error is None else str(transfer.error)
        if failure not in ("", self.failure):
            log.warning("%s of %s failed: %s", transfer, self, failure)
        self.failure = failure
        del self.transfers[transfer.number]
        self.blocks -= transfer.blocks
        if transfer.slot is None:
            self.stores -= 1
        else:
            self.slots.remove(transfer.slot.number)
        self._close_if_over()

    def cancel(
        self,
        wanted: Callable[[Transfer], bool],
        status: TransferStatus = TransferStatus.CANCELLED,
    ) -> None:
        """Ask the lanes to stop the transfers that `wanted` picks."""
        for transfer in self.transfers.values():
            if wanted(transfer):
                transfer.cancel(status)

    def end(self) -> None:
        """The connection is gone."""
        self._is_lost = True
        self.cancel(lambda _: True, TransferStatus.STOPPED)
        self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._is_lost or self.transfers or self._is_closing:
            return
        self._is_closing = True
        if self.worker is None:
            self._give_back()
        else:
            closed = self.worker.memories.close(self.worker.memory)
            closed.add_done_callback(self._memory_closed)

    def _memory_closed(self, closed: asyncio.Future[None]) -> None:
        if (error := closed.exception()) is not None:
            log.error("the memory of %s could not be given back", self, exc_info=error)
        self._give_back()

    def _give_back(self) -> None:
        self.board.close()
        self.peer.close()
        self.over.set()


class Sessions:
    """All live sessions, and the pulse that tells their engines that the server lives.

    A session's number is unlike those of any other server process, so that an engine cannot ask one
    server about another's sessions and take the answer for a proof.
    """

    def __init__(self) -> None:
        self._live: set[Session] = set()
        self._ending: set[Session] = set()
        self._workers: dict[Session, Worker] = {}  # those of live sessions, as they registered
        self._layouts: dict[str, ChunkLayout] = {}
        self._process = random.getrandbits(31) << 32
        self._given_out = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._live))

    def of_engine(self, engine: str) -> list[Session]:
        """The sessions of one engine: its scheduler's and its workers'."""
        return [session for session in self._live if session.engine == engine]

    def workers_of(self, engine: str) -> list[Worker]:
        """What the sessions of one engine have registered, in that order."""
        return [w for session, w in self._workers.items() if session.engine == engine]

    def layout_of(self, engine: str) -> ChunkLayout | None:
        """Of the chunks of an engine; None while one of its shards has no worker."""
        return self._layouts.get(engine)

    def stats_beside(self, asking: Session) -> tuple[protocol.EngineStats, ...]:
        """Of all but the one that asks, in the order in which they came."""
        others = sorted(self._live - {asking}, key=lambda session: session.number)
        return tuple(session.stats for session in others)

    def find(self, number: int) -> Session | None:
        """The session of that number; None when it is over.

        Raises `RequestRefusedError` when this process never gave the number out.
        """
        if not self._process < number <= self._process + self._given_out:
            raise refuse(
                f"this server has had no session {number}",
                "Only the server that gave it out, or its death, can end it",
            )
        sessions = self._live | self._ending
        return next((session for session in sessions if session.number == number), None)

    def add(self, session: Session) -> None:
        self._given_out += 1
        session.number = self._process + self._given_out
        session.board.heartbeat_ns = time.monotonic_ns()
        self._live.add(session)

    def register(self, session: Session, worker: Worker) -> None:
        """The session is a worker's from now on."""
        session.worker = self._workers[session] = worker
        self._update_layout(session.engine)
        session.log("joined")

    def end(self, session: Session) -> None:
        """Its connection is gone."""
        session.log("left")
        self._live.discard(session)
        if self._workers.pop(session, None) is not None:
            self._update_layout(session.engine)
        session.end()
        self._ending = {s for s in self._ending | {session} if not s.over.is_set()}

    def _update_layout(self, engine: str) -> None:
        """One that is there stays as it is: `limits.check_shard` lets no other worker in."""
        workers = self.workers_of(engine)
        geometries = {worker.shard.number: worker.geometry for worker in workers}
        if not workers or len(geometries) < workers[0].shard.shards:
            self._layouts.pop(engine, None)
        elif engine not in self._layouts:
            self._layouts[engine] = ChunkLayout([geometries[n] for n in sorted(geometries)])

    async def all_over(self) -> None:
        """Return once those that have ended touch no memory any more, and have given theirs
        back."""
        for session in list(self._ending):
            await session.over.wait()

    def cancel_overdue(self, begun_before_s: float) -> int:
        """Cancel the transfers that began before a time; return how many were not yet."""
        overdue = [
            transfer
            for session in self._live
            for transfer in session.transfers.values()
            if transfer.begun_s < begun_before_s and not transfer.cancelled_as
        ]
        for transfer in overdue:
            transfer.cancel()
        return len(overdue)

    async def beat(self, every_s: float = HEARTBEAT_EVERY_S) -> None:
        """Write the server's clock on every board, for ever."""
        while True:
            now_ns = time.monotonic_ns()
            for session in self._live:
                session.board.heartbeat_ns = now_ns
            await asyncio.sleep(every_s)


def _not_connected() -> None:
    """Nothing to close yet."""
