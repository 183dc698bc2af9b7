"""An engine of known bytes: it owns its blocks, and knows at any time what each must hold.

What is nobody's is poison, and so is what a transfer has and has not written yet. So a late write,
an early read, a chunk that is not whole and another prompt's chunk all show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.board import TransferStatus
from lamina.client import Gate, Retrieve, Store, Ticket
from lamina_lab.known.content import POISON, Pages, content_of_run, ids
from lamina_lab.known.stream import StreamDevice
from lamina_lab.known.worker import KnownWorker, WrongBytesError


@dataclass(eq=False)
class KnownRetrieve:
    """A retrieve, and what its blocks must come to hold."""

    gate: Gate
    blocks: list[int]
    expected: Pages | None
    """Shape (layers, planes, blocks, page bytes); None when nothing may ever land."""
    may_end_as: set[TransferStatus] = field(default_factory=lambda: set(TransferStatus))
    outcome: TransferStatus | None = None
    was_released: bool = False

    @property
    def transfer(self) -> Retrieve:
        return self.gate.retrieve

    @property
    def request(self) -> str:
        return self.transfer.request


@dataclass(eq=False)
class KnownStore:
    """A store, and what its blocks hold once they are computed."""

    transfer: Store
    keys: list[bytes]
    blocks: list[int]
    is_computed: bool = False


class KnownEngine:
    """Its worker's device is a `StreamDevice`. All calls raise `WrongBytesError` for what may never
    be; what a server that is gone does not begin is None."""

    def __init__(self, worker: KnownWorker) -> None:
        assert isinstance(worker.space.device, StreamDevice)
        self.device = worker.space.device
        self.worker = worker
        self.client = worker.client
        self.free = list(range(worker.space.blocks))
        self.retrieves: list[KnownRetrieve] = []
        """Those whose blocks are not the engine's again; likewise:"""
        self.stores: list[KnownStore] = []

    def take(self, count: int) -> list[int] | None:
        """So many free blocks; None when there are fewer."""
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        self.worker.expect(taken, POISON, "a free page was written")
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self.device.compute()  # the engine's next work on them comes after what it has enqueued
        self.worker.poison(blocks)
        self.free += blocks

    def begin_retrieve(
        self,
        request: str,
        lease: int,
        keys: Sequence[bytes],
        blocks: list[int],
        *,
        first_block: int = 0,
        width: int = 1,
        release_after: int = 1,
        ticket: Ticket | None = None,
    ) -> KnownRetrieve | None:
        """Retrieve the chunks of a lease, from a block of theirs on; without `keys`, nothing may
        land. The blocks were taken, and are given back when it is over or does not begin."""
        worker = self.worker
        start_tokens = first_block * worker.geometry.groups[0].block_tokens
        # Before it begins: what follows at once, as a cancel, is to find it on its way.
        expected = content_of_run(keys, worker.geometry)[:, :, first_block:] if keys else None
        begun = self.client.retrieve(request, lease, start_tokens, [ids(blocks)], width, ticket)
        if begun is None:
            self.give_back(blocks)
            return None
        retrieve = KnownRetrieve(Gate(begun, release_after), blocks, expected)
        self.retrieves.append(retrieve)
        return retrieve

    def begin_store(
        self, keys: Sequence[bytes], first: int, blocks: list[int]
    ) -> KnownStore | None:
        """Enqueue computing the chunks `keys[first:]`, and store them then. The blocks were taken,
        and are given back when it is over or does not begin."""
        mine = list(keys[first:])
        self.device.enqueue(lambda: self.worker.compute(mine, blocks))
        ticket = self.client.write_ticket()
        begun = self.client.store(keys[first - 1] if first else b"", mine, [ids(blocks)], ticket)
        if begun is None:
            self.give_back(blocks)
            return None
        store = KnownStore(begun, mine, blocks)
        self.device.enqueue(lambda: setattr(store, "is_computed", True))
        self.stores.append(store)
        return store

    def poll(self) -> None:
        """Read replies, look at every retrieve, and take back the blocks of all that is over."""
        self.client.poll()
        for retrieve in list(self.retrieves):
            is_over = retrieve.transfer.is_over  # before the look, which is the last one then
            self.check_retrieve(retrieve)
            if is_over:
                self.retrieves.remove(retrieve)
                self.retrieve_ended(retrieve)
                self.give_back(retrieve.blocks)
        for store in [s for s in self.stores if s.transfer.is_over and s.transfer.is_settled]:
            self.check_store(store)
            self.stores.remove(store)
            self.store_ended(store)
            self.give_back(store.blocks)

    def retrieve_ended(self, retrieve: KnownRetrieve) -> None:
        """Its blocks are about to be given back."""

    def store_ended(self, store: KnownStore) -> None:
        """Likewise."""

    def check(self) -> None:
        """Every page is as its owner left it."""
        for retrieve in self.retrieves:
            self.check_retrieve(retrieve)
        for store in self.stores:
            self.check_store(store)
        self.worker.expect(self.free, POISON, "a free page was written")

    def check_retrieve(self, retrieve: KnownRetrieve) -> None:
        """What has landed is right, and nothing that was said is taken back."""
        transfer, gate = retrieve.transfer, retrieve.gate
        released = gate.is_released
        landed = transfer.landed_slices  # before the outcome: a failure forces the count last
        outcome = transfer.outcome
        if retrieve.was_released and not released:
            raise WrongBytesError("released, then not")
        if retrieve.outcome not in (None, outcome):
            raise WrongBytesError("an outcome changed")
        if released and outcome is None and landed < gate.release_after_slices:
            raise WrongBytesError("released too early")
        if outcome is not None and outcome not in retrieve.may_end_as:
            raise WrongBytesError(f"ended as {outcome!r} without a reason")
        retrieve.was_released, retrieve.outcome = released, outcome
        if outcome is TransferStatus.OK:
            landed = len(transfer.slices)  # the slot may be another's by now
        if outcome or not landed:
            return
        if retrieve.expected is None:
            raise WrongBytesError("something landed under a lease that was never given")
        layers = transfer.slices[landed - 1].end_layer
        self.worker.expect(retrieve.blocks, retrieve.expected, "landed, but not its bytes", layers)

    def check_store(self, store: KnownStore) -> None:
        """A store changes none of the pages that it reads."""
        content = content_of_run(store.keys, self.worker.geometry) if store.is_computed else POISON
        self.worker.expect(store.blocks, content, "a store wrote to its pages")
