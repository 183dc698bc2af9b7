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

import numpy as np

from lamina.board import TransferStatus
from lamina.client import MISS, Gate, Retrieve, Store
from lamina.errors import DeviceError
from lamina.server.sessions import Session
from lamina.server.turns import at_once
from lamina_lab.soak.pages import Pages, StreamDevice, content_of, content_of_run
from tests.support.server import ServerThread
from tests.support.valve import Valve
from tests.support.wait import eventually
from tests.support.worker import (
    BLOCKS_PER_CHUNK,
    POISON,
    PageWorker,
    ids,
    small_geometry,
)

GEOMETRY = small_geometry(layers=4, page_bytes=256)
"""A chunk fills its 4 KiB of the arena to the last byte."""
BLOCKS = 96
LINK_BROKE = DeviceError("the link broke", "Mend it")


@dataclass(eq=False)
class Lease:
    """What a lookup found. `is_live` is False once it must have ended."""

    number: int
    keys: list[bytes]
    is_live: bool = True
    retrieves: list[LiveRetrieve] = field(default_factory=list)


@dataclass(eq=False)
class LiveRetrieve:
    """A retrieve and what the model knows of it."""

    retrieve: Retrieve
    gate: Gate
    blocks: list[int]
    expected: Pages
    """Shape (layers, blocks, page bytes)."""
    may_end_as: set[TransferStatus]
    outcome: TransferStatus | None = None
    was_released: bool = False

    def check(self, pages: Sequence[Pages]) -> None:
        """What has landed is right, and nothing that was said is taken back."""
        released = self.gate.is_released
        landed = self.retrieve.landed_slices  # before the outcome: a failure forces the count last
        outcome = self.retrieve.outcome
        assert released or not self.was_released, "released, then not"
        assert self.outcome in (None, outcome), "an outcome changed"
        if released and outcome is None:
            assert landed >= self.gate.release_after_slices, "released too early"
        self.was_released, self.outcome = released, outcome
        if outcome is TransferStatus.OK:
            landed = len(self.retrieve.slices)  # the slot may be another's by now
        if outcome in (None, TransferStatus.OK):
            for part in self.retrieve.slices[:landed]:
                for layer in range(part.first_layer, part.end_layer):
                    got = pages[layer][0, self.blocks]
                    assert np.array_equal(got, self.expected[layer]), "landed, but not its bytes"
        if outcome is not None:
            assert outcome in self.may_end_as, f"ended as {outcome!r} without a reason"


@dataclass(eq=False)
class Save:
    """A store and what the model knows of it."""

    store: Store
    keys: list[bytes]
    blocks: list[int]
    evicted: int
    """Chunks that the server had evicted when it began."""
    is_computed: bool = False


class Life:
    """One engine from its start to its death. Times are virtual."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock_s = 0.0
        self.device = StreamDevice()
        self.worker = PageWorker(
            world.server.settings.socket, GEOMETRY, BLOCKS, clock=lambda: self.clock_s
        )
        self.worker.client.device = self.device
        self.free = list(range(BLOCKS))
        self.leases: dict[str, Lease] = {}
        self.retrieves: list[LiveRetrieve] = []
        self.saves: list[Save] = []

    def lookup(self, request: str, keys: Sequence[bytes]) -> int:
        """Look up and wait for the answer; returns how many chunks were found."""
        result = self.worker.client.lookup(request, keys).wait(20)
        assert result is not None
        self.world.check_found(keys, result.chunks)
        self._forget_lease(request)
        if result.chunks:
            self.leases[request] = Lease(result.lease, list(keys[: result.chunks]))
        return result.chunks

    def retrieve(
        self, request: str, first_block: int, width: int, release_after: int, ticketed: bool
    ) -> LiveRetrieve | None:
        """Retrieve the leased run from `first_block` on; None when the engine has no room."""
        lease = self.leases.get(request)
        if lease is None:
            return None
        first_block %= len(lease.keys) * BLOCKS_PER_CHUNK
        expected = content_of_run(lease.keys, GEOMETRY)[:, first_block:]
        blocks = self._take(expected.shape[1])
        if blocks is None:
            return None
        ticket = None
        if ticketed:  # the pages are still written by work enqueued before
            self.device.enqueue(lambda: self._write(blocks, POISON ^ 0xFF))
            ticket = self.worker.client.write_ticket()
        may_end_as = {TransferStatus.REFUSED}
        if lease.is_live:
            may_end_as = {TransferStatus.OK, *self.world.retrieve_faults}
            if lease.retrieves:  # the lease ends with the first of them that does
                may_end_as.add(TransferStatus.REFUSED)
        start_tokens = first_block * GEOMETRY.groups[0].block_tokens
        begun = self.worker.client.retrieve(
            request, lease.number, start_tokens, [ids(blocks)], width, ticket
        )
        assert begun is not None
        retrieve = LiveRetrieve(begun, Gate(begun, release_after), blocks, expected, may_end_as)
        lease.retrieves.append(retrieve)
        self.retrieves.append(retrieve)
        return retrieve

    def store(self, keys: Sequence[bytes], first: int) -> Save | None:
        """Compute chunks `keys[first:]` and store them; None when the engine has no room."""
        mine = list(keys[first:])
        blocks = self._take(len(mine) * BLOCKS_PER_CHUNK)
        if blocks is None:
            return None
        self.world.offered.update(keys)
        content = content_of_run(mine, GEOMETRY)
        client, evicted = self.worker.client, self.world.evicted()
        self.device.enqueue(lambda: self._write(blocks, content))
        ticket = client.write_ticket()
        store = client.store(keys[first - 1] if first else b"", mine, [ids(blocks)], ticket)
        assert store is not None
        save = Save(store, mine, blocks, evicted)
        self.device.enqueue(lambda: setattr(save, "is_computed", True))
        self.saves.append(save)
        return save

    def compute(self) -> None:
        self.device.compute()

    def cancel(self, retrieve: LiveRetrieve) -> None:
        retrieve.may_end_as.add(TransferStatus.CANCELLED)
        self.worker.client.cancel(retrieve.retrieve)

    def end_request(self, request: str) -> None:
        """As a request does that has finished, was aborted or preempted."""
        for retrieve in self.retrieves:
            if retrieve.retrieve.request == request:
                retrieve.may_end_as.add(TransferStatus.CANCELLED)
        self.worker.client.end_request(request)
        self._forget_lease(request)

    def end_lease(self, request: str) -> None:
        """As a request does that does not use its hit; its retrieves go on."""
        if (lease := self.leases.get(request)) is not None:
            lease.is_live = False
            self.worker.client.end_lease(lease.number)

    def leave_lookup(self, keys: Sequence[bytes]) -> None:
        """Look up, and mostly count a miss before the answer is there; no lease may be left."""
        lookup = self.worker.client.lookup("impatient", keys)
        self._pass_time(self.worker.client.settings.lookup_timeout_ms)
        assert lookup.result is not None
        if lookup.result != MISS:  # the answer was there already
            self.worker.client.end_request("impatient")

    def give_up_stores(self) -> None:
        """As an engine does that resets its caches."""
        self.worker.client.give_up_stores()
        assert all(save.store.is_over for save in self.saves)

    def pass_deadlines(self) -> None:
        """Let the time of all transfers in flight run out: retrieves fail, and stores are over at
        the next poll."""
        settings = self.worker.client.settings
        self._pass_time(max(settings.retrieve_timeout_ms, settings.store_timeout_ms))
        eventually(
            lambda: all(retrieve.retrieve.outcome is not None for retrieve in self.retrieves)
        )

    def poll(self) -> None:
        """Read replies, and take back the pages of all that is over."""
        self.worker.client.poll()
        for retrieve in [retrieve for retrieve in self.retrieves if retrieve.retrieve.is_over]:
            retrieve.check(self.worker.pages)
            assert retrieve.outcome is not None
            self.retrieves.remove(retrieve)
            self._give_back(retrieve.blocks)
            self.world.ended[retrieve.outcome] += 1
        for lease in self.leases.values():
            if any(retrieve.retrieve.is_acknowledged for retrieve in lease.retrieves):
                lease.is_live = False
        for save in [save for save in self.saves if save.store.is_over]:
            self._check_save(save)
            self.saves.remove(save)
            self._give_back(save.blocks)
            self.world.note_stored(save)

    def check(self) -> None:
        """Every page is as its owner left it."""
        for retrieve in self.retrieves:
            retrieve.check(self.worker.pages)
        for save in self.saves:
            self._check_save(save)
        for pages in self.worker.pages:
            assert (pages[0, self.free] == POISON).all(), "a page was written after its end"

    def finish(self) -> None:
        """End every request, wait for every transfer; then nothing may be left with anybody."""
        self.compute()
        self._poll_until(lambda: not self.retrieves and not self.saves)
        for request in list(self.leases):
            self.end_request(request)
        assert self.worker.client._link is not None
        transfers = self.worker.client._link.transfers
        assert transfers is not None
        self._poll_until(lambda: transfers.is_idle)
        assert len(transfers._free_slots) == self.worker.client._link.board.slots
        assert self.worker.client.quarantined == 0
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

    def _take(self, blocks: int) -> list[int] | None:
        if blocks > len(self.free):
            return None
        taken, self.free = self.free[:blocks], self.free[blocks:]
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        self.compute()  # the engine's next work on them comes after what it has enqueued
        self.worker.poison(blocks)
        self.free += blocks

    def _write(self, blocks: list[int], content: Pages | int) -> None:
        for layer, pages in enumerate(self.worker.pages):
            pages[0, blocks] = content if isinstance(content, int) else content[layer]

    def _check_save(self, save: Save) -> None:
        """A store changes none of the pages that it reads."""
        content = content_of_run(save.keys, GEOMETRY)
        for layer, pages in enumerate(self.worker.pages):
            wanted = content[layer] if save.is_computed else POISON
            assert (pages[0, save.blocks] == wanted).all(), "a store wrote to its pages"

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
    def retrieves(self) -> list[tuple[Life, LiveRetrieve]]:
        """Every retrieve whose pages are not the engine's again."""
        return [(life, retrieve) for life in self.lives for retrieve in life.retrieves]

    @property
    def saving(self) -> list[Life]:
        """Every engine with a store whose pages are not its own again."""
        return [life for life in self.lives if life.saves]

    @property
    def busy(self) -> list[Life]:
        """Every engine that has a lease or a transfer."""
        return [life for life in self.lives if life.leases or life.retrieves or life.saves]

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
        life.worker.client.close()
        for save in life.saves:
            life.worker.poison(save.blocks)
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

    def note_stored(self, save: Save) -> None:
        """A store's reply has come, or it was given up: then it may be stored all the same."""
        if save.store.given_up:
            self.given_up += 1
            return
        ended = save.store.ended
        assert ended is not None
        assert ended.stored + ended.present + ended.dropped == len(save.keys)
        status = TransferStatus(ended.status)
        self.ended[status] += 1
        assert status in (TransferStatus.OK, TransferStatus.COPY_FAILED)
        assert self.ended[TransferStatus.COPY_FAILED] <= self._faults
        if ended.stored == len(save.keys) and self.evicted() == save.evicted:
            self._kept.update(save.keys)

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
            for pages in life.worker.pages:
                assert (pages == POISON).all(), "a dead engine's page was written after its end"

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
        chunks = [chunk for shard in index._shards for chunk in shard.values()]
        assert min((chunk.pins for chunk in chunks), default=0) >= 0
        assert index.pins >= sum(chunk.pins for chunk in chunks)
        assert arena.free_bytes == arena.capacity_bytes - sum(chunk.nbytes for chunk in chunks)
        for chunk in chunks:
            if chunk.whole:
                stored = ctypes.string_at(chunk.address, chunk.nbytes)
                wanted = content_of(chunk.key, GEOMETRY).tobytes()
                assert stored == wanted, "a chunk is whole, but wrong"


def _prefix(keys: Sequence[bytes], known: set[bytes]) -> int:
    """How many of the first keys are all in `known`."""
    return next((number for number, key in enumerate(keys) if key not in known), len(keys))
