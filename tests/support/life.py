"""Engines' lives on a real server, with a model of who owns every page and what it must hold.

A `Life` is one engine: a worker whose blocks are all poison unless a transfer has them. What its
blocks hold after computing a chunk follows from the chunk's key, so whoever finds a chunk knows its
bytes. A `World` is a server with its valves and all lives on it, and checks the invariants:

    no late write     a page that is the engine's again keeps the poison that the engine puts there
    no early read     the pages of every slice that a gate lets through hold the right bytes
    once              an outcome never changes, a released gate stays released, and in the end
                      nothing is pinned, leased, in flight or quarantined, and every slot is free
    whole or absent   every chunk that can be found has all its bytes, at any time
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lamina.board import TransferStatus
from lamina.client import MISS
from lamina.errors import DeviceError
from lamina.server.sessions import Session
from lamina.server.turns import at_once
from lamina_lab.known.content import POISON, content_of, equal_layers
from lamina_lab.known.engine import KnownEngine, KnownRetrieve, KnownStore
from lamina_lab.known.stream import StreamDevice
from tests.support.server import ServerThread
from tests.support.valve import Valve
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK, PageWorker

GEOMETRY = equal_layers(layers=4, page_bytes=256)
"""A chunk fills its 4 KiB of the arena to the last byte."""
BLOCKS = 96
LINK_BROKE = DeviceError("the link broke", "Mend it")


@dataclass(eq=False)
class Lease:
    """What a lookup found. `is_live` is False once it must have ended."""

    number: int
    keys: list[bytes]
    is_live: bool = True
    retrieves: list[KnownRetrieve] = field(default_factory=list)


class Life(KnownEngine):
    """One engine from its start to its death. Times are virtual."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock_s = 0.0
        socket = world.server.settings.socket
        super().__init__(
            PageWorker(socket, GEOMETRY, BLOCKS, StreamDevice(), clock=lambda: self.clock_s)
        )
        self.leases: dict[str, Lease] = {}
        self._evicted: dict[KnownStore, int] = {}
        """Chunks that the server had evicted when a store began."""

    def lookup(self, request: str, keys: Sequence[bytes]) -> int:
        """Look up and wait for the answer; returns how many chunks were found."""
        result = self.client.lookup(request, keys).wait(20)
        assert result is not None
        self.world.check_found(keys, result.chunks)
        self._forget_lease(request)
        if result.chunks:
            self.leases[request] = Lease(result.lease, list(keys[: result.chunks]))
        return result.chunks

    def retrieve(
        self, request: str, first_block: int, width: int, release_after: int, ticketed: bool
    ) -> KnownRetrieve | None:
        """Retrieve the leased run from `first_block` on; None when the engine has no room."""
        lease = self.leases.get(request)
        if lease is None:
            return None
        first_block %= len(lease.keys) * BLOCKS_PER_CHUNK
        blocks = self.take(len(lease.keys) * BLOCKS_PER_CHUNK - first_block)
        if blocks is None:
            return None
        ticket = None
        if ticketed:  # the pages are still written by work enqueued before
            self.device.enqueue(lambda: self._overwrite(blocks))
            ticket = self.client.write_ticket()
        may_end_as = {TransferStatus.REFUSED}
        if lease.is_live:
            may_end_as = {TransferStatus.OK, *self.world.retrieve_faults}
            if lease.retrieves:  # the lease ends with the first of them that does
                may_end_as.add(TransferStatus.REFUSED)
        retrieve = self.begin_retrieve(
            request,
            lease.number,
            lease.keys,
            blocks,
            first_block=first_block,
            width=width,
            release_after=release_after,
            ticket=ticket,
        )
        assert retrieve is not None
        retrieve.may_end_as = may_end_as
        lease.retrieves.append(retrieve)
        return retrieve

    def store(self, keys: Sequence[bytes], first: int) -> None:
        """Compute chunks `keys[first:]` and store them, if the engine has room."""
        blocks = self.take((len(keys) - first) * BLOCKS_PER_CHUNK)
        if blocks is None:
            return
        self.world.offered.update(keys)
        evicted = self.world.evicted()
        store = self.begin_store(keys, first, blocks)
        assert store is not None
        self._evicted[store] = evicted

    def compute(self) -> None:
        self.device.compute()

    def cancel(self, retrieve: KnownRetrieve) -> None:
        retrieve.may_end_as.add(TransferStatus.CANCELLED)
        self.client.cancel(retrieve.transfer)

    def end_request(self, request: str) -> None:
        """As a request does that has finished, was aborted or preempted."""
        for retrieve in self.retrieves:
            if retrieve.request == request:
                retrieve.may_end_as.add(TransferStatus.CANCELLED)
        self.client.end_request(request)
        self._forget_lease(request)

    def end_lease(self, request: str) -> None:
        """As a request does that does not use its hit; its retrieves go on."""
        if (lease := self.leases.get(request)) is not None:
            lease.is_live = False
            self.client.end_lease(lease.number)

    def leave_lookup(self, keys: Sequence[bytes]) -> None:
        """Look up, and mostly count a miss before the answer is there; no lease may be left."""
        lookup = self.client.lookup("impatient", keys)
        self._pass_time(self.client.settings.lookup_timeout_ms)
        assert lookup.result is not None
        if lookup.result != MISS:  # the answer was there already
            self.client.end_request("impatient")

    def give_up_stores(self) -> None:
        """As an engine does that resets its caches."""
        self.client.give_up_stores()
        assert all(store.transfer.is_over for store in self.stores)

    def pass_deadlines(self) -> None:
        """Let the time of all transfers in flight run out: retrieves fail, and stores are over at
        the next poll."""
        settings = self.client.settings
        if self.client.has_rings:
            self.compute()  # what has landed is placed behind it, whatever the time
        self._pass_time(max(settings.retrieve_timeout_ms, settings.store_timeout_ms))
        eventually(
            lambda: all(retrieve.transfer.outcome is not None for retrieve in self.retrieves)
        )

    def poll(self) -> None:
        """Read replies, and take back the pages of all that is over."""
        super().poll()
        for lease in self.leases.values():
            if any(retrieve.transfer.is_acknowledged for retrieve in lease.retrieves):
                lease.is_live = False

    def retrieve_ended(self, retrieve: KnownRetrieve) -> None:
        assert retrieve.outcome is not None
        self.world.ended[retrieve.outcome] += 1

    def store_ended(self, store: KnownStore) -> None:
        self.world.note_stored(store, self._evicted.pop(store))

    def finish(self) -> None:
        """End every request, wait for every transfer; then nothing may be left with anybody."""
        self.compute()
        self._poll_until(lambda: not self.retrieves and not self.stores)
        for request in list(self.leases):
            self.end_request(request)
        assert self.client._link is not None
        transfers = self.client._link.transfers
        assert transfers is not None
        self._poll_until(lambda: transfers.is_idle)
        assert len(transfers._free_slots) == transfers.slots
        assert self.client.quarantined == 0
        assert sorted(self.free) == list(range(BLOCKS))
        self.check()

    def _poll_until(self, condition: Callable[[], bool]) -> None:
        def polled() -> bool:
            self.poll()
            self.check()
            return condition()

        eventually(polled)

    def _pass_time(self, ms: int) -> None:
        for retrieve in self.retrieves:
            retrieve.may_end_as.add(TransferStatus.TIMED_OUT)
        self.clock_s += ms / 1000

    def _overwrite(self, blocks: list[int]) -> None:
        self.worker.pages[:, :, blocks] = POISON ^ 0xFF

    def _forget_lease(self, request: str) -> None:
        if (lease := self.leases.pop(request, None)) is not None:
            lease.is_live = False


class World:
    """One server and the lives on it, from nothing cached to nothing held."""

    def __init__(self, server: ServerThread, engines: int) -> None:
        self.server = server
        self.offered: set[bytes] = set()
        """Chunks that were ever sent: no other can be found."""
        self.ended = dict.fromkeys(TransferStatus, 0)
        """Transfers of engines that lived to see them end."""
        self.given_up = 0
        """Stores that engines gave up."""
        self._faults = 0
        self._sessions: list[Session] = []
        self._kept: set[bytes] = set()  # stored, and nothing was evicted since
        self._evicted = self.evicted()
        self._dead: list[Life] = []
        self.lives = [self._new_life() for _ in range(engines)]

    @property
    def retrieves(self) -> list[tuple[Life, KnownRetrieve]]:
        """Every retrieve whose pages are not the engine's again."""
        return [(life, retrieve) for life in self.lives for retrieve in life.retrieves]

    @property
    def storing(self) -> list[Life]:
        """Every engine with a store whose pages are not its own again."""
        return [life for life in self.lives if life.stores]

    @property
    def busy(self) -> list[Life]:
        """Every engine that has a lease or a transfer."""
        return [life for life in self.lives if life.leases or life.retrieves or life.stores]

    @property
    def leased(self) -> list[tuple[Life, str]]:
        """Every request that was granted a lease and has not ended."""
        return [(life, request) for life in self.lives for request in life.leases]

    @property
    def retrieve_faults(self) -> set[TransferStatus]:
        """How a retrieve may end that is about to begin, besides well."""
        return {TransferStatus.COPY_FAILED} if self.server.device.retrieves.has_fault else set()

    def evicted(self) -> int:
        """Chunks that the server has evicted so far."""
        return self.server.server.index.evicted

    def die(self, life: Life) -> None:
        """The engine's connection ends without a word; another engine takes its place."""
        life.client.close()
        for store in life.stores:
            life.worker.poison(store.blocks)
        self._dead.append(life)  # its memory stays mapped: the server may still write to it
        self.lives[self.lives.index(life)] = self._new_life()

    def break_link(self, valve: Valve) -> None:
        """Make the next copy through `valve` fail."""
        self._faults += 1
        if valve is self.server.device.retrieves:
            for _, retrieve in self.retrieves:
                retrieve.may_end_as.add(TransferStatus.COPY_FAILED)
        valve.fail_next(LINK_BROKE)

    def expire_leases(self) -> None:
        """Let the time of all leases run out."""

        def expire() -> None:
            self.server.clock_s += self.server.settings.lease_ttl_s
            self.server.server.leases.expire()

        self.server.after_reading(expire)
        for life in self.lives:
            for lease in life.leases.values():
                lease.is_live = False

    def clear(self) -> None:
        """Forget all chunks that are not in use."""
        self.server.on_loop(lambda: at_once(self.server.server.index.clear()))

    def note_stored(self, store: KnownStore, evicted: int) -> None:
        """A store's reply has come, or it was given up: then it may be stored all the same.
        `evicted` chunks were evicted when it began."""
        if store.transfer.given_up:
            self.given_up += 1
            return
        ended = store.transfer.ended
        assert ended is not None
        assert ended.stored + ended.present + ended.dropped == len(store.keys)
        status = TransferStatus(ended.status)
        self.ended[status] += 1
        assert status in (TransferStatus.OK, TransferStatus.COPY_FAILED)
        assert self.ended[TransferStatus.COPY_FAILED] <= self._faults
        if ended.stored == len(store.keys) and self.evicted() == evicted:
            self._kept.update(store.keys)

    def check_found(self, keys: Sequence[bytes], found: int) -> None:
        """Nothing is found that was not stored, and nothing that was stored is lost."""
        assert found <= _prefix(keys, self.offered), "found what nobody stored"
        if (evicted := self.evicted()) != self._evicted:
            self._evicted = evicted
            self._kept.clear()
        assert found >= _prefix(keys, self._kept), "lost without being evicted"

    def settle(self) -> None:
        """Wait until the server has done all that valves and tickets let it do."""
        eventually(lambda: self.server.after_reading(self._is_settled))

    def check(self) -> None:
        """All invariants, now."""
        for life in self.lives:
            life.check()
        self.server.on_loop(self._check_server)

    def finish(self) -> None:
        """Open everything, end everything: nothing may be left."""
        for valve in (self.server.device.retrieves, self.server.device.stores):
            valve.open()
        for life in self.lives:
            life.finish()
        eventually(lambda: self.server.on_loop(self._is_idle))
        for life in self._dead:
            life.worker.poison(range(BLOCKS))
        self.check()
        self.clear()
        gauges = self.server.gauges()
        assert gauges["pins"] == gauges["leases"] == gauges["queued_transfers"] == 0
        assert gauges["chunks"] == 0
        assert gauges["arena_free_bytes"] == gauges["arena_capacity_bytes"]
        for life in self._dead:
            life.worker.expect(range(BLOCKS), POISON, "a dead engine's page was written")

    def close(self) -> None:
        """End all lives and leave the server as it was found."""
        for valve in (self.server.device.retrieves, self.server.device.stores):
            valve.heal()
        for life in self.lives:
            life.worker.close()
        eventually(lambda: self.server.gauges()["sessions"] == 0)

    def abandon(self) -> None:
        """After a failed check: stop the server, whose numbers may be wrong, and end all lives."""
        self.server.stop()
        for life in self.lives:
            life.worker.close()

    def _new_life(self) -> Life:
        life = Life(self)
        self._sessions += self.server.on_loop(
            lambda: [s for s in self.server.server.sessions if s not in self._sessions]
        )
        return life

    def _is_idle(self) -> bool:
        """Whether no transfer of any session, ended or not, is in flight; and no lease is left."""
        in_flight = any(session.transfers for session in self._sessions)
        return not in_flight and not len(self.server.server.leases)

    def _is_settled(self) -> bool:
        retrieves, stores = self.server.device.retrieves, self.server.device.stores
        for session in self._sessions:
            for transfer in session.transfers.values():
                valve = stores if transfer.slot is None else retrieves
                if transfer.is_ready() and not valve.is_holding:
                    return False
        return True

    def _check_server(self) -> None:
        """On the event loop: pins and memory add up, and no chunk that can be found is wrong."""
        index, arena = self.server.server.index, self.server.server.arena
        chunks = [chunk for chunks in index._dicts for chunk in chunks.values()]
        assert min((chunk.pins for chunk in chunks), default=0) >= 0
        assert index.pins >= sum(chunk.pins for chunk in chunks)
        assert arena.free_bytes == arena.capacity_bytes - sum(
            chunk.layout.chunk_bytes for chunk in chunks
        )
        for chunk in chunks:
            if not chunk.missing:
                stored = ctypes.string_at(chunk.address, chunk.layout.chunk_bytes)
                wanted = content_of(chunk.key, GEOMETRY).tobytes()
                assert stored == wanted, "a chunk is whole, but wrong"


def _prefix(keys: Sequence[bytes], known: set[bytes]) -> int:
    """How many of the first keys are all in `known`."""
    return next((number for number, key in enumerate(keys) if key not in known), len(keys))
