"""What the server does for each request: one method per message of the protocol.

All run on the event loop and never block it. Retrieves and stores are answered when their lane has
ended them; everything else at once. `rpc.handlers_of` checks the methods against the protocol, so
everything else here is private.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from lamina import __version__, protocol
from lamina.copies import CopyPlan
from lamina.errors import (
    CopyDeniedError,
    ErrorCode,
    GeometryError,
    RequestRefusedError,
)
from lamina.geometry import BlockIds, check_block_ids
from lamina.keys import KEY_BYTES
from lamina.server.counters import Counters
from lamina.server.index import Chunk, Index
from lamina.server.lane import Lane, Lanes, Transfer
from lamina.server.leases import LeaseTable
from lamina.server.retrieve import Landed, RetrieveTransfer
from lamina.server.sessions import Session, Sessions, Worker
from lamina.server.store import Room, Saved, StoreTransfer, blocks_of_chunks, make_room

log = logging.getLogger(__name__)

MAX_STORES_IN_FLIGHT = 256
"""Per session; stores beyond are dropped, which costs an engine nothing but a later hit."""

_Result = TypeVar("_Result")


class Service:
    """The handlers. `gauges` adds current values to the counters in `Stats`."""

    def __init__(
        self,
        index: Index,
        leases: LeaseTable,
        lanes: Lanes,
        sessions: Sessions,
        counters: Counters,
        chunk_tokens: int,
        lease_ttl_s: float,
        arena_bytes: int,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._index = index
        self._leases = leases
        self._lanes = lanes
        self._sessions = sessions
        self._counters = counters
        self._chunk_tokens = chunk_tokens
        self._lease_ttl_s = lease_ttl_s
        self._arena_bytes = arena_bytes
        self._gauges = gauges

    def hello(self, session: Session, request: protocol.Hello) -> protocol.Welcome:
        if session.engine:
            raise _refuse("the connection said hello before", "Say it once")
        if not 1 <= len(request.engine) <= 128 or len(request.label) > 256:
            raise _refuse(
                "an engine's name has 1 to 128 characters and its label at most 256", "Shorten them"
            )
        session.engine, session.label = request.engine, request.label
        return protocol.Welcome(
            request.id,
            __version__,
            self._chunk_tokens,
            self._lease_ttl_s,
            time.monotonic_ns(),
        )

    def register(self, session: Session, request: protocol.Register) -> protocol.Registered:
        session.need_hello()
        if session.worker is not None:
            raise RequestRefusedError(
                ErrorCode.ALREADY_REGISTERED,
                f"{session} has registered its KV memory before",
                "Register once per connection; reconnect to register anew",
            )
        geometry = request.geometry
        try:
            self._check_chunk(geometry.chunk_tokens, geometry.chunk_bytes)
            request.page_map.check(geometry, [region.nbytes for region in request.regions])
        except GeometryError as error:
            raise RequestRefusedError(ErrorCode.BAD_GEOMETRY, error.cause, error.remedy) from error
        if request.device not in self._lanes.devices:
            raise _refuse(
                f"this server has no device {request.device!r}",
                f"It has {', '.join(self._lanes.devices)}",
            )
        try:
            memory = self._lanes.devices[request.device].open(
                session.peer, session.board, request.regions
            )
        except CopyDeniedError as error:
            raise RequestRefusedError(ErrorCode.COPY_DENIED, error.cause, error.remedy) from error
        lanes = self._lanes.of(request.device)
        session.worker = Worker(geometry, request.page_map, memory, *lanes)
        return protocol.Registered(request.id)

    def lookup(self, session: Session, request: protocol.Lookup) -> protocol.Found:
        engine = session.need_hello()
        _check_keys(request.keys)
        chunks = self._index.find(request.keys)
        self._counters.lookups += 1
        self._counters.lookup_chunks += len(request.keys)
        self._counters.hit_chunks += len(chunks)
        if not chunks:
            self._leases.end_request(engine, request.request)
            return protocol.Found(request.id, 0, 0)
        lease = self._leases.grant(engine, session, request.request, chunks)
        return protocol.Found(request.id, lease.number, len(chunks))

    def retrieve(
        self, session: Session, request: protocol.Retrieve
    ) -> Awaitable[protocol.Retrieved]:
        worker = session.need_worker()
        lease = self._leases.get(session.need_hello(), request.lease)
        geometry, chunks = worker.geometry, lease.chunks
        if {chunk.layout for chunk in chunks} != {geometry.digest}:
            raise _refuse(
                "the leased chunks were stored with another geometry",
                "Make the geometry part of the namespace of the keys",
            )
        block_ids = _unpack(request.block_ids)
        covered = len(chunks) * geometry.chunk_tokens
        check_block_ids(geometry, worker.page_map, request.start_tokens, covered, block_ids)
        slices = geometry.slices(request.layers_per_slice)
        self._check_slot(session, request)
        self._check_number(session, request.id)
        plan = CopyPlan(
            geometry,
            worker.page_map,
            worker.memory.addresses,
            [chunk.address for chunk in chunks],
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
        self._index.pin(chunks)
        landed = self._begin(session, request.id, worker.loads, make, lease.request, request.slot)
        return self._retrieved(session, request, chunks, landed)

    async def _retrieved(
        self,
        session: Session,
        request: protocol.Retrieve,
        chunks: tuple[Chunk, ...],
        landed: Awaitable[Landed],
    ) -> protocol.Retrieved:
        status, nbytes, first_slice_us, total_us, error = await landed
        if error is not None:
            log.warning("a retrieve of %s failed: %s", session, error)
        session.finish(request.id)
        self._index.unpin(chunks)
        self._leases.end(session.engine, request.lease)
        self._counters.retrieves += 1
        self._counters.retrieves_failed += bool(status)
        self._counters.retrieved_bytes += nbytes
        self._counters.first_slice_us += first_slice_us
        self._counters.retrieve_us += total_us
        return protocol.Retrieved(request.id, status, nbytes, first_slice_us, total_us)

    def store(self, session: Session, request: protocol.Store) -> Awaitable[protocol.Stored]:
        worker = session.need_worker()
        _check_keys(request.keys)
        geometry = worker.geometry
        block_ids = _unpack(request.block_ids)
        covered = len(request.keys) * geometry.chunk_tokens
        tokens = check_block_ids(geometry, worker.page_map, 0, covered, block_ids)
        if tokens != covered:
            raise _refuse(
                f"blocks for {tokens} tokens, but {len(request.keys)} chunks have {covered}",
                "Store full chunks",
            )
        self._check_number(session, request.id)
        room = Room([], [])
        if len(session.transfers) < MAX_STORES_IN_FLIGHT:
            room = make_room(self._index, geometry, request.parent, request.keys)
        numbers = [number for number, _ in room.reserved]
        chosen = blocks_of_chunks(geometry, block_ids, numbers)
        plan = CopyPlan(
            geometry,
            worker.page_map,
            worker.memory.addresses,
            [chunk.address for _, chunk in room.reserved],
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
        saved = self._begin(session, request.id, worker.stores, make) if numbers else None
        return self._stored(session, request, room, saved)

    async def _stored(
        self,
        session: Session,
        request: protocol.Store,
        room: Room,
        saved: Awaitable[Saved] | None,
    ) -> protocol.Stored:
        status = 0
        if saved is not None:
            status, error = await saved
            if error is not None:
                log.warning("a store of %s failed: %s", session, error)
            session.finish(request.id)
        reserved = [chunk for _, chunk in room.reserved]
        if status:
            for chunk in reversed(reserved):
                self._index.discard(chunk)
            reserved = []
        for chunk in reserved:
            self._index.commit(chunk)
        self._index.unpin(room.held)
        present = sum(chunk.key != request.parent for chunk in room.held)
        stored = len(reserved)
        dropped = len(request.keys) - present - stored
        self._counters.stores += 1
        self._counters.stores_failed += bool(status)
        self._counters.stored_chunks += stored
        self._counters.stored_bytes += sum(chunk.nbytes for chunk in reserved)
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

    def ping(self, session: Session, request: protocol.Ping) -> protocol.Pong:
        return protocol.Pong(request.id)

    def get_stats(self, session: Session, request: protocol.GetStats) -> protocol.Stats:
        return protocol.Stats(request.id, {**self._counters.totals(), **self._gauges()})

    def clear(self, session: Session, request: protocol.Clear) -> protocol.Cleared:
        session.need_hello()
        return protocol.Cleared(request.id, self._index.clear())

    def _begin(
        self,
        session: Session,
        number: int,
        lane: Lane,
        make: Callable[[Callable[[_Result], None]], Transfer],
        request: str | None = None,
        slot: int | None = None,
    ) -> Awaitable[_Result]:
        """Give a transfer to its lane; what comes back is how it ended."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()
        transfer = make(lambda value: _on_loop(loop, result, value))
        session.begin(number, transfer, request, slot)
        lane.submit(transfer)
        return result

    def _check_chunk(self, chunk_tokens: int, chunk_bytes: int) -> None:
        if chunk_tokens != self._chunk_tokens:
            raise GeometryError(
                f"the engine's chunks have {chunk_tokens} tokens, "
                f"the server's {self._chunk_tokens}",
                "Set both to the same --chunk-tokens",
            )
        if chunk_bytes > self._arena_bytes:
            raise GeometryError(
                f"one chunk takes {chunk_bytes} bytes, but the arena has {self._arena_bytes}",
                f"Start the server with an --arena of several times {chunk_bytes} bytes",
            )

    def _check_slot(self, session: Session, request: protocol.Retrieve) -> None:
        if not 0 <= request.slot < session.board.slots or not 0 <= request.base < 2**32:
            raise _refuse(
                f"slot {request.slot} with base {request.base} is not on the board",
                f"Use slots below {session.board.slots} and 32-bit counts",
            )
        if any(f.slot == request.slot for f in session.transfers.values()):
            raise _refuse(f"slot {request.slot} belongs to a transfer in flight", "Use a free slot")

    def _check_number(self, session: Session, number: int) -> None:
        if number in session.transfers:
            raise _refuse(f"request id {number} is in use", "Give every request its own id")


def _on_loop(
    loop: asyncio.AbstractEventLoop, result: asyncio.Future[_Result], value: _Result
) -> None:
    loop.call_soon_threadsafe(result.set_result, value)


def _refuse(cause: str, remedy: str) -> RequestRefusedError:
    return RequestRefusedError(ErrorCode.BAD_REQUEST, cause, remedy)


def _check_keys(keys: tuple[bytes, ...]) -> None:
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise _refuse(
            f"a request needs at least one key, each of {KEY_BYTES} bytes",
            "Compute keys with lamina.keys",
        )
    if len(set(keys)) != len(keys):
        raise _refuse("a key is named twice", "Send the keys of one prompt, in order")


def _unpack(packed: tuple[bytes, ...]) -> list[BlockIds]:
    return [protocol.unpack_block_ids(ids) for ids in packed]
