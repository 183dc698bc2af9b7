"""What the server does for each request: one method per message of the protocol.

All run on the event loop and never block it: what grows with a request's keys is done in turns
(`turns`). Retrieves and stores are answered when their lane has ended them; everything else at
once. `rpc.handlers_of` checks the methods against the protocol, so everything else here is private.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lamina import __version__, protocol
from lamina.board import TransferStatus
from lamina.errors import CopyDeniedError, ErrorCode, GeometryError, refuse
from lamina.server import limits, logs
from lamina.server.chunks import (
    Room,
    end_room,
    make_room,
    no_room,
    pin_for_retrieve,
)
from lamina.server.counters import Counters
from lamina.server.index import Chunk, Index
from lamina.server.lane import Lanes
from lamina.server.leases import LeaseTable
from lamina.server.mappings import Memories
from lamina.server.sessions import Session, Sessions, Worker
from lamina.server.transfer import Slot, Transfer
from lamina.server.turns import Chores, Turns, in_turns
from lamina.server.ways import ways_of
from lamina.settings import ServerSettings
from lamina.shards import Shard


@dataclass(frozen=True, slots=True)
class Cache:
    """Which chunks there are, who may rely on them, what stores may reserve, and what remains to be
    done after requests."""

    index: Index
    leases: LeaseTable
    budget: limits.StoreBudget
    chores: Chores


class Service:
    """The handlers. `clock` is what transfers run out by; `gauges` adds current values to the
    counters in `Stats`."""

    def __init__(
        self,
        settings: ServerSettings,
        cache: Cache,
        lanes: Lanes,
        memories: Memories,
        sessions: Sessions,
        counters: Counters,
        clock: Callable[[], float],
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._settings = settings
        self._index = cache.index
        self._leases = cache.leases
        self._budget = cache.budget
        self._chores = cache.chores
        self._lanes = lanes
        self._memories = memories
        self._sessions = sessions
        self._counters = counters
        self._clock = clock
        self._gauges = gauges

    def hello(self, session: Session, request: protocol.Hello) -> protocol.Welcome:
        if session.engine:
            raise refuse("the connection said hello before", "Say it once")
        limits.check_hello(request)
        session.engine = request.engine
        session.label, session.model = request.label, request.model
        session.log("said hello")
        return protocol.Welcome(
            request.id,
            __version__,
            self._settings.chunk_tokens,
            self._settings.lease_ttl_s,
            time.monotonic_ns(),
            session.number,
        )

    def register(self, session: Session, request: protocol.Register) -> Turns[protocol.Registered]:
        session.need_hello()
        if session.worker is not None:
            raise refuse(
                f"{session} has registered its KV memory before",
                "Register once per connection; reconnect to register anew",
                ErrorCode.ALREADY_REGISTERED,
            )
        limits.check_regions(request)
        limits.check_description(request.description)
        geometry = request.geometry
        sizes = [region.nbytes for region in request.regions]
        try:
            limits.check_chunk(geometry, self._settings.chunk_tokens, self._budget.capacity_bytes)
            if request.page_map is not None:
                request.page_map.check(geometry, sizes)
            else:
                limits.check_rings(geometry, session.board, sizes)
        except GeometryError as error:
            raise refuse(error.cause, error.remedy, ErrorCode.BAD_GEOMETRY) from error
        if request.device not in self._lanes.devices:
            raise refuse(
                f"this server has no device {request.device!r}",
                f"It has {', '.join(self._lanes.devices)}",
            )
        lanes = self._lanes.of(request.device)  # may fail, and nothing is opened yet
        device = self._lanes.devices[request.device]
        try:
            memory = yield from self._memories.open(
                device, session.peer, session.board, request.regions
            )
        except CopyDeniedError as error:
            raise refuse(error.cause, error.remedy, ErrorCode.COPY_DENIED) from error
        try:
            # Not before: others may have registered while the memory was opened.
            workers = self._sessions.workers_of(session.engine)
            limits.check_shard(request.shard, geometry, workers, self._budget.capacity_bytes)
        except GeometryError as error:
            self._memories.close(memory)
            raise refuse(error.cause, error.remedy, ErrorCode.BAD_GEOMETRY) from error
        ways = ways_of(request, memory, session.board)
        worker = Worker(
            request.device,
            geometry,
            ways,
            sum(sizes),
            memory,
            self._memories,
            *lanes,
            request.description,
            request.shard,
        )
        self._sessions.register(session, worker)
        return protocol.Registered(request.id)

    def workers(self, session: Session, request: protocol.Workers) -> protocol.WorkersKnown:
        workers = self._sessions.workers_of(session.need_hello())
        return protocol.WorkersKnown(request.id, tuple(w.description for w in workers))

    def lookup(self, session: Session, request: protocol.Lookup) -> Turns[protocol.Found]:
        engine = session.need_hello()
        limits.check_name(request.request)
        yield from limits.check_keys(request.keys)
        chunks = yield from self._index.find_and_pin(request.keys)
        self._counters.lookups += 1
        self._counters.lookup_chunks += len(request.keys)
        self._counters.hit_chunks += len(chunks)
        self._leases.end_request(engine, request.request)
        leases, leased = self._leases.count_of(session)
        if leases >= limits.MAX_LEASES or leased + len(chunks) > limits.MAX_LEASED_CHUNKS:
            self._counters.leases_refused += bool(chunks)
            self._index.unpin(chunks)
            chunks = []
        if not chunks:
            return protocol.Found(request.id, 0, 0)
        lease = self._leases.grant(engine, session, request.request, chunks)
        return protocol.Found(request.id, lease.number, len(chunks))

    def retrieve(
        self, session: Session, request: protocol.Retrieve
    ) -> Turns[Awaitable[protocol.Retrieved]]:
        try:
            return (yield from self._retrieve(session, request))
        except Exception:  # refused: the rank does not come back for the lease
            self._leases.end_of_rank(session.engine, request.lease, session.shard)
            raise

    def _retrieve(
        self, session: Session, request: protocol.Retrieve
    ) -> Turns[Awaitable[protocol.Retrieved]]:
        worker = session.need_worker()
        chunks = self._leases.get(session.need_hello(), request.lease).chunks
        layout = self._sessions.layout_of(session.engine)
        if layout is None:
            raise refuse(
                f"not all {worker.shard.shards} shards of the engine have registered",
                "Wait until all of its workers are connected, or recompute",
                ErrorCode.NOT_REGISTERED,
            )
        column = worker.shard.number
        addresses = yield from pin_for_retrieve(self._index, chunks, layout, column)
        try:
            transfer = self._begin_retrieve(session, worker, request, addresses)
        except Exception:
            self._index.unpin(chunks)
            raise
        return self._retrieved(session, request, chunks, transfer)

    def _begin_retrieve(
        self,
        session: Session,
        worker: Worker,
        request: protocol.Retrieve,
        addresses: array[int],
    ) -> Transfer:
        """Of chunks at `addresses`, which are pinned for it."""
        lease = self._leases.get(session.engine, request.lease)  # it may have ended meanwhile
        blocks = worker.ways.check_retrieve(worker.geometry, request, len(addresses))
        limits.check_slot(session, request)
        limits.check_number(session, request.transfer)
        limits.check_retrieves(session, blocks)
        transfer = Transfer(
            request.transfer,
            worker.memory,
            session.board,
            request.ticket,
            worker.ways.retrieve(worker.geometry, request, addresses),
            begun_s=self._clock(),
            on_loop=asyncio.get_running_loop().call_soon_threadsafe,
            slot=Slot(request.slot, request.base),
            request=lease.request,
            blocks=blocks,
        )
        session.begin(transfer)
        worker.retrieves.submit(transfer)
        return transfer

    async def _retrieved(
        self,
        session: Session,
        request: protocol.Retrieve,
        chunks: tuple[Chunk, ...],
        transfer: Transfer,
    ) -> protocol.Retrieved:
        await transfer.ended.wait()
        session.finish(transfer)
        self._index.unpin(chunks)
        self._leases.end_of_rank(session.engine, request.lease, session.shard)
        self._counters.retrieves += 1
        self._counters.retrieves_failed += bool(transfer.status)
        self._counters.retrieved_bytes += transfer.nbytes
        self._counters.first_slice_us += transfer.first_slice_us
        self._counters.retrieve_us += transfer.total_us
        return protocol.Retrieved(
            request.id,
            transfer.status,
            transfer.nbytes,
            transfer.first_slice_us,
            transfer.total_us,
        )

    def store(self, session: Session, request: protocol.Store) -> Turns[Awaitable[protocol.Stored]]:
        worker = session.need_worker()
        yield from limits.check_keys(request.keys)
        geometry = worker.geometry
        tokens = worker.ways.check_store(geometry, request)
        covered = len(request.keys) * geometry.chunk_tokens
        if tokens != covered:
            raise refuse(
                f"blocks for {tokens} tokens, but {len(request.keys)} chunks have {covered}",
                "Store full chunks",
            )
        limits.check_number(session, request.transfer)
        room = yield from self._make_room(session, worker.shard, request)
        transfer = None
        route = worker.ways.store(geometry, request, room)
        if route is not None:
            transfer = Transfer(
                request.transfer,
                worker.memory,
                session.board,
                request.ticket,
                route,
                begun_s=self._clock(),
                on_loop=asyncio.get_running_loop().call_soon_threadsafe,
            )
            session.begin(transfer)
            worker.stores.submit(transfer)
        return self._stored(session, worker, request, room, transfer)

    def _make_room(self, session: Session, shard: Shard, request: protocol.Store) -> Turns[Room]:
        """Within what the session's stores may reserve; a column of what is there costs nothing."""
        layout = self._sessions.layout_of(session.engine)
        if layout is None or session.stores >= limits.MAX_STORES:
            return no_room()
        most_chunks = min(self._budget.chunks_for(session, layout.chunk_bytes), len(request.keys))
        most_bytes = most_chunks * layout.chunk_bytes
        self._budget.reserve(session, most_bytes)  # others do between our turns
        room = yield from make_room(
            self._index, layout, shard, request.parent, request.keys, most_chunks
        )
        self._budget.give_back(session, most_bytes - room.reserved_bytes)
        return room

    async def _stored(
        self,
        session: Session,
        worker: Worker,
        request: protocol.Store,
        room: Room,
        transfer: Transfer | None,
    ) -> protocol.Stored:
        status, is_void = TransferStatus.OK, False
        if transfer is not None:
            await transfer.ended.wait()
            # After the copies, or their bytes would prove nothing; before a session that has ended
            # closes the board, on which an engine that lost the connection still writes.
            is_void = transfer.is_void
            status = TransferStatus.CANCELLED if is_void else transfer.status
        await in_turns(end_room(self._index, room, worker.shard.number, is_whole=not status))
        self._budget.give_back(session, room.reserved_bytes)
        if transfer is not None:
            session.finish(transfer)  # a server that stops waits for this
        present = len(room.present) - bool(room.present and request.parent)
        stored = 0 if status else len(room.claimed)
        dropped = len(request.keys) - present - stored
        self._counters.stores += 1
        self._counters.stores_failed += bool(status) and not is_void
        self._counters.stores_void += is_void
        self._counters.stored_chunks += stored
        self._counters.stored_bytes += stored * worker.geometry.chunk_bytes
        self._counters.present_chunks += present
        self._counters.dropped_chunks += dropped
        return protocol.Stored(request.id, status, stored, present, dropped)

    def cancel(self, session: Session, request: protocol.Cancel) -> Awaitable[protocol.Cancelled]:
        transfer = session.transfers.get(request.transfer)
        if transfer is not None:
            transfer.cancel()
        return self._cancelled(request, transfer)

    async def _cancelled(
        self, request: protocol.Cancel, transfer: Transfer | None
    ) -> protocol.Cancelled:
        if transfer is not None:
            await transfer.ended.wait()
        return protocol.Cancelled(request.id)

    def end_lease(self, session: Session, request: protocol.EndLease) -> protocol.Done:
        self._leases.end(session.need_hello(), request.lease)
        return protocol.Done(request.id)

    def end_request(self, session: Session, request: protocol.EndRequest) -> protocol.Done:
        self._leases.end_request(session.need_hello(), request.request)
        for other in self._sessions.of_engine(session.engine):
            other.cancel(lambda transfer: transfer.request == request.request)
        return protocol.Done(request.id)

    def end_session(
        self, session: Session, request: protocol.EndSession
    ) -> Awaitable[protocol.Done]:
        engine, former = session.need_hello(), self._sessions.find(request.session)
        if former is not None and (former is session or former.engine != engine):
            raise refuse("the session is not a former one of this engine", "Name one that is")
        if former is not None:
            former.hang_up()
        return self._session_ended(request, former)

    async def _session_ended(
        self, request: protocol.EndSession, former: Session | None
    ) -> protocol.Done:
        if former is not None:
            await former.over.wait()
        return protocol.Done(request.id)

    def ping(self, session: Session, request: protocol.Ping) -> protocol.Pong:
        return protocol.Pong(request.id)

    def get_stats(self, session: Session, request: protocol.GetStats) -> protocol.Stats:
        values = {**self._counters.totals(), **self._gauges()}
        values["sessions"] -= 1
        engines = self._sessions.stats_beside(session)
        refused = dict(self._counters.refused)
        return protocol.Stats(request.id, __version__, values, refused, engines)

    def clear(self, session: Session, request: protocol.Clear) -> Turns[protocol.Cleared]:
        session.need_hello()
        yield from self._chores.backlog()  # pins that have ended keep nothing
        return protocol.Cleared(request.id, (yield from self._index.clear()))

    def set_log_level(self, session: Session, request: protocol.SetLogLevel) -> protocol.Done:
        session.need_hello()
        logs.set_level(request.level)
        return protocol.Done(request.id)
