"""What the server does for each request: one method per message of the protocol.

All run on the event loop and never block it: what grows with a request's keys is done in turns
(`turns`). Retrieves and stores are answered when their lane has ended them; everything else at
once. `rpc.handlers_of` checks the methods against the protocol, so everything else here is private.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from lamina import __version__, protocol
from lamina.board import TransferStatus
from lamina.copies import CopyPlan
from lamina.errors import (
    CopyDeniedError,
    DeviceError,
    ErrorCode,
    GeometryError,
    RequestRefusedError,
)
from lamina.geometry import check_block_ids
from lamina.server import limits, logs
from lamina.server.counters import Counters
from lamina.server.index import Chunk, Index
from lamina.server.lane import Lane, Lanes
from lamina.server.leases import LeaseTable
from lamina.server.mappings import Memories
from lamina.server.retrieve import Landed, RetrieveTransfer, pin_for_retrieve
from lamina.server.sessions import InFlight, Session, Sessions, Worker
from lamina.server.store import (
    Room,
    Saved,
    StoreTransfer,
    blocks_of_chunks,
    end_room,
    make_room,
    no_room,
)
from lamina.server.transfer import Transfer
from lamina.server.turns import Chores, Turns, in_turns

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Service:
    """The handlers. `gauges` adds current values to the counters in `Stats`."""

    def __init__(
        self,
        index: Index,
        leases: LeaseTable,
        lanes: Lanes,
        sessions: Sessions,
        memories: Memories,
        chores: Chores,
        counters: Counters,
        chunk_tokens: int,
        lease_ttl_s: float,
        budget: limits.StoreBudget,
        clock: Callable[[], float],
        arena_bytes: int,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._index = index
        self._leases = leases
        self._lanes = lanes
        self._sessions = sessions
        self._memories = memories
        self._chores = chores
        self._counters = counters
        self._chunk_tokens = chunk_tokens
        self._lease_ttl_s = lease_ttl_s
        self._budget = budget
        self._clock = clock
        self._arena_bytes = arena_bytes
        self._gauges = gauges

    def hello(self, session: Session, request: protocol.Hello) -> protocol.Welcome:
        if session.engine:
            raise limits.refuse("the connection said hello before", "Say it once")
        limits.check_hello(request)
        session.engine = request.engine
        session.label, session.model = request.label, request.model
        session.log("said hello")
        return protocol.Welcome(
            request.id,
            __version__,
            self._chunk_tokens,
            self._lease_ttl_s,
            time.monotonic_ns(),
            session.number,
        )

    def register(self, session: Session, request: protocol.Register) -> Turns[protocol.Registered]:
        session.need_hello()
        if session.worker is not None:
            raise RequestRefusedError(
                ErrorCode.ALREADY_REGISTERED,
                f"{session} has registered its KV memory before",
                "Register once per connection; reconnect to register anew",
            )
        limits.check_regions(request)
        limits.check_description(request.description)
        geometry = request.geometry
        try:
            limits.check_chunk(geometry, self._chunk_tokens, self._arena_bytes)
            request.page_map.check(geometry, [region.nbytes for region in request.regions])
        except GeometryError as error:
            raise RequestRefusedError(ErrorCode.BAD_GEOMETRY, error.cause, error.remedy) from error
        if request.device not in self._lanes.devices:
            raise limits.refuse(
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
            raise RequestRefusedError(ErrorCode.COPY_DENIED, error.cause, error.remedy) from error
        nbytes = sum(region.nbytes for region in request.regions)
        worker = Worker(
            request.device,
            geometry,
            request.page_map,
            nbytes,
            memory,
            self._memories,
            *lanes,
            request.description,
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
        except Exception:  # refused: nobody comes back for the lease
            self._leases.end(session.engine, request.lease)
            raise

    def _retrieve(
        self, session: Session, request: protocol.Retrieve
    ) -> Turns[Awaitable[protocol.Retrieved]]:
        worker = session.need_worker()
        chunks = self._leases.get(session.need_hello(), request.lease).chunks
        addresses = yield from pin_for_retrieve(self._index, chunks, worker.geometry.digest)
        try:
            landed = self._begin_retrieve(session, worker, request, addresses)
        except Exception:
            self._index.unpin(chunks)
            raise
        return self._retrieved(session, request, chunks, landed)

    def _begin_retrieve(
        self,
        session: Session,
        worker: Worker,
        request: protocol.Retrieve,
        addresses: array[int],
    ) -> Awaitable[Landed]:
        """Of chunks at `addresses`, which are pinned for it."""
        lease = self._leases.get(session.engine, request.lease)  # it may have ended meanwhile
        geometry = worker.geometry
        block_ids = limits.unpack(request.block_ids)
        covered = len(addresses) * geometry.chunk_tokens
        check_block_ids(geometry, worker.page_map, request.start_tokens, covered, block_ids)
        slices = geometry.slices(request.layers_per_slice)
        limits.check_slot(session, request)
        limits.check_number(session, request.id)
        blocks = sum(map(len, block_ids))
        limits.check_retrieves(session, blocks)
        plan = CopyPlan(
            geometry,
            worker.page_map,
            worker.memory.addresses,
            addresses,
            request.start_tokens,
            block_ids,
        )
        make = partial(
            RetrieveTransfer,
            worker.memory,
            session.board,
            request.ticket,
            plan,
            slices,
            request.slot,
            request.base,
        )
        return self._begin(
            session,
            request.id,
            worker.retrieves,
            make,
            request=lease.request,
            slot=request.slot,
            blocks=blocks,
        )

    async def _retrieved(
        self,
        session: Session,
        request: protocol.Retrieve,
        chunks: tuple[Chunk, ...],
        landed: Awaitable[Landed],
    ) -> protocol.Retrieved:
        status, nbytes, first_slice_us, total_us, error = await landed
        _log_failure("retrieve", session, error)
        session.finish(request.id)
        self._index.unpin(chunks)
        self._leases.end(session.engine, request.lease)
        self._counters.retrieves += 1
        self._counters.retrieves_failed += bool(status)
        self._counters.retrieved_bytes += nbytes
        self._counters.first_slice_us += first_slice_us
        self._counters.retrieve_us += total_us
        return protocol.Retrieved(request.id, status, nbytes, first_slice_us, total_us)

    def store(self, session: Session, request: protocol.Store) -> Turns[Awaitable[protocol.Stored]]:
        worker = session.need_worker()
        yield from limits.check_keys(request.keys)
        geometry = worker.geometry
        block_ids = limits.unpack(request.block_ids)
        covered = len(request.keys) * geometry.chunk_tokens
        tokens = check_block_ids(geometry, worker.page_map, 0, covered, block_ids)
        if tokens != covered:
            raise limits.refuse(
                f"blocks for {tokens} tokens, but {len(request.keys)} chunks have {covered}",
                "Store full chunks",
            )
        limits.check_number(session, request.id)
        room, chunk_bytes = no_room(), geometry.chunk_bytes
        most_chunks = min(self._budget.chunks_for(session, chunk_bytes), len(request.keys))
        self._budget.reserved_bytes += most_chunks * chunk_bytes  # others reserve between our turns
        if most_chunks:
            room = yield from make_room(
                self._index, geometry, request.parent, request.keys, most_chunks
            )
        nbytes = len(room.reserved) * chunk_bytes
        self._budget.reserved_bytes += nbytes - most_chunks * chunk_bytes
        chosen = blocks_of_chunks(geometry, block_ids, room.numbers)
        plan = CopyPlan(
            geometry,
            worker.page_map,
            worker.memory.addresses,
            room.addresses,
            0,
            chosen,
        )
        make = partial(
            StoreTransfer,
            worker.memory,
            session.board,
            request.ticket,
            plan,
            len(geometry.layers),
        )
        saved = None
        if room.reserved:
            saved = self._begin(session, request.id, worker.stores, make, reserved_bytes=nbytes)
        return self._stored(session, request, room, nbytes, saved)

    async def _stored(
        self,
        session: Session,
        request: protocol.Store,
        room: Room,
        nbytes: int,
        saved: Awaitable[Saved] | None,
    ) -> protocol.Stored:
        status, is_void = TransferStatus.OK, False
        if saved is not None:
            status, error = await saved
            _log_failure("store", session, error)
            # After the copies, or their bytes would prove nothing; before a session that has ended
            # closes the board, on which an engine that lost the connection still writes.
            is_void = session.board.is_void(request.ticket)
        if is_void:
            status = TransferStatus.CANCELLED
        await in_turns(end_room(self._index, room, is_whole=not status))
        self._budget.reserved_bytes -= nbytes
        if saved is not None:
            session.finish(request.id)  # a server that stops waits for this
        present = len(room.present) - bool(room.present and request.parent)
        stored = 0 if status else len(room.reserved)
        dropped = len(request.keys) - present - stored
        self._counters.stores += 1
        self._counters.stores_failed += bool(status) and not is_void
        self._counters.stores_void += is_void
        self._counters.stored_chunks += stored
        self._counters.stored_bytes += 0 if status else nbytes
        self._counters.present_chunks += present
        self._counters.dropped_chunks += dropped
        return protocol.Stored(request.id, status, stored, present, dropped)

    def cancel(self, session: Session, request: protocol.Cancel) -> Awaitable[protocol.Cancelled]:
        in_flight = session.transfers.get(request.transfer)
        if in_flight is not None:
            in_flight.transfer.cancel()
        return self._cancelled(request.id, in_flight.ended if in_flight else None)

    async def _cancelled(
        self, number: int, ended: asyncio.Future[None] | None
    ) -> protocol.Cancelled:
        if ended is not None:
            await ended
        return protocol.Cancelled(number)

    def end_lease(self, session: Session, request: protocol.EndLease) -> protocol.Done:
        self._leases.end(session.need_hello(), request.lease)
        return protocol.Done(request.id)

    def end_request(self, session: Session, request: protocol.EndRequest) -> protocol.Done:
        self._leases.end_request(session.need_hello(), request.request)
        for other in self._sessions.of_engine(session.engine):
            other.cancel(lambda in_flight: in_flight.request == request.request)
        return protocol.Done(request.id)

    def end_session(
        self, session: Session, request: protocol.EndSession
    ) -> Awaitable[protocol.Done]:
        engine, former = session.need_hello(), self._sessions.find(request.session)
        if former is not None and (former is session or former.engine != engine):
            raise limits.refuse(
                "the session is not a former one of this engine", "Name one that is"
            )
        if former is not None:
            former.hang_up()
        return self._session_ended(request.id, former)

    async def _session_ended(self, number: int, former: Session | None) -> protocol.Done:
        if former is not None:
            await former.over.wait()
        return protocol.Done(number)

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

    def _begin(
        self,
        session: Session,
        number: int,
        lane: Lane,
        make: Callable[[Callable[[_Result], None]], Transfer],
        *,
        request: str | None = None,
        slot: int | None = None,
        blocks: int = 0,
        reserved_bytes: int = 0,
    ) -> Awaitable[_Result]:
        """Give a transfer to its lane; what comes back is how it ended."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()
        transfer = make(lambda value: _on_loop(loop, result, value))
        ended = loop.create_future()
        begun_s = self._clock()
        session.begin(
            number, InFlight(transfer, begun_s, ended, request, slot, blocks, reserved_bytes)
        )
        lane.submit(transfer)
        return result


def _log_failure(kind: str, session: Session, error: DeviceError | None) -> None:
    """Say why a transfer failed, once until one does not: a thousand may of an engine that dies."""
    failure = "" if error is None else str(error)
    if failure not in ("", session.failure):
        log.warning("a %s of %s failed: %s", kind, session, failure)
    session.failure = failure


def _on_loop(
    loop: asyncio.AbstractEventLoop, result: asyncio.Future[_Result], value: _Result
) -> None:
    loop.call_soon_threadsafe(result.set_result, value)
