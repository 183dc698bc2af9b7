"""One engine of the soak: random requests on pages of which every byte is known."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lamina.board import TransferStatus
from lamina.client import Lookup
from lamina_lab.known.content import POISON, chain, equal_layers, random_prompt
from lamina_lab.known.engine import KnownEngine, KnownRetrieve, KnownStore
from lamina_lab.known.memory import HostKvSpace
from lamina_lab.known.stream import StreamDevice
from lamina_lab.known.worker import KnownWorker

LAYERS, BLOCKS = 4, 128
GEOMETRY = equal_layers(LAYERS, page_bytes=4096)
BLOCKS_PER_CHUNK = GEOMETRY.blocks_per_chunk(0)
CHECK_ALL_EVERY = 50
RETRIEVE_TIMEOUT_MS, LOOKUP_TIMEOUT_MS = 1_000, 200
WEIGHTS = {
    "ask": 30,
    "compute": 25,
    "abort": 3,
    "preempt": 2,
    "cancel": 3,
    "not_needed": 2,
    "corrupt_a_lease": 2,
    "overlook": 1,
}


@dataclass(eq=False)
class _Asked:
    request: str
    keys: list[bytes]
    lookup: Lookup


class SoakEngine(KnownEngine):
    """Counts what it does in `operations` and how what failed has ended in `errors`."""

    def __init__(self, socket: Path, seed: int) -> None:
        super().__init__(
            KnownWorker(
                socket,
                HostKvSpace(GEOMETRY, BLOCKS, StreamDevice(), LAYERS),
                f"soak {seed}",
                suspect_after_ms=250,
                lookup_timeout_ms=LOOKUP_TIMEOUT_MS,
                retrieve_timeout_ms=RETRIEVE_TIMEOUT_MS,
                reconnect_every_ms=100,
            )
        )
        self._random = random.Random(seed)
        self._asked: list[_Asked] = []
        self._leases: dict[str, int] = {}
        self._own_leases: set[int] = set()
        self._requests = 0
        self._was_usable = True
        self.operations: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.reconnected = 0
        self.client.try_connect()

    def operate(self) -> None:
        """One random operation, then a poll and a look at all pages that changed hands."""
        (name,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self.operations[name] += 1
        getattr(self, f"_{name}")()
        self.step()
        if self.operations.total() % CHECK_ALL_EVERY == 0:
            self.check()

    def step(self) -> None:
        """Read replies; take back what is over; begin to retrieve what was found."""
        self.poll()
        if self.client.is_usable and not self._was_usable:
            self.reconnected += 1
        self._was_usable = self.client.is_usable
        for asked in [asked for asked in self._asked if asked.lookup.result is not None]:
            self._asked.remove(asked)
            self._serve(asked)

    @property
    def is_idle(self) -> bool:
        """Whether every page is the engine's."""
        return not (self._asked or self.retrieves or self.stores)

    def end_all(self) -> None:
        """End every request, as when the engine is shut down in order."""
        for request in {*self._leases, *(retrieve.request for retrieve in self.retrieves)}:
            self._end(request)
        self.device.compute()

    def leaks(self) -> list[str]:
        """What is still taken or in flight, once all has ended; empty when all is well."""
        found = []
        if sorted(self.free) != list(range(BLOCKS)):
            found.append(f"{BLOCKS - len(self.free)} blocks are held")
        if self.client.quarantined:
            found.append(f"{self.client.quarantined} retrieves are quarantined")
        if self.client.transfers_in_flight:
            found.append(f"{self.client.transfers_in_flight} transfers are in flight")
        self.worker.expect(range(BLOCKS), POISON, "a page was written after all had ended")
        return found

    def close(self) -> None:
        self.worker.close()

    def take(self, count: int) -> list[int] | None:
        self._random.shuffle(self.free)
        return super().take(count)

    def retrieve_ended(self, retrieve: KnownRetrieve) -> None:
        self._leases.pop(retrieve.request, None)
        if not retrieve.outcome:
            self.operations["retrieves"] += 1
            return
        self.errors[f"retrieve {_status_name(retrieve.outcome)}"] += 1
        if retrieve.outcome is TransferStatus.REFUSED:
            self.worker.expect(retrieve.blocks, POISON, "refused, but written")

    def store_ended(self, store: KnownStore) -> None:
        ended = store.transfer.ended
        self.operations["chunks stored"] += ended.stored if ended else 0
        if ended is None or ended.status != TransferStatus.OK:
            self.errors[f"store {_status_name(ended.status) if ended else 'lost'}"] += 1

    # Operations.

    def _ask(self) -> None:
        keys = random_prompt(self._random)
        self._requests += 1
        request = f"r{self._requests}"
        self._asked.append(_Asked(request, keys, self.client.lookup(request, keys)))

    def _compute(self) -> None:
        self.device.compute()

    def _abort(self) -> None:
        if self._leases:
            self._end(self._random.choice(list(self._leases)))

    def _preempt(self) -> None:
        if self.retrieves:
            self._end(self._random.choice(self.retrieves).request)
            self._ask()

    def _cancel(self) -> None:
        if self.retrieves:
            self.client.cancel(self._random.choice(self.retrieves).transfer)

    def _not_needed(self) -> None:
        if self._leases:
            self.client.end_lease(self._leases.pop(self._random.choice(list(self._leases))))

    def _corrupt_a_lease(self) -> None:
        """Retrieve under a number that was never given to this engine: nothing may be written."""
        if not self._own_leases:
            return
        number = self._random.choice(list(self._own_leases)) ^ 1 << self._random.randrange(20, 60)
        blocks = self.take(BLOCKS_PER_CHUNK)
        if blocks is not None and number not in self._own_leases:
            width = self._random.randint(1, LAYERS)
            self.begin_retrieve("corrupt", number, [], blocks, width=width)
        elif blocks is not None:
            self.give_back(blocks)

    def _overlook(self) -> None:
        """Go on without waiting for an answer; its lease must not stay."""
        self.client.lookup("overlooked", chain("document 0"))
        self.client.end_request("overlooked")

    def _serve(self, asked: _Asked) -> None:
        """Retrieve what was found, as an engine does, and compute and store the rest."""
        result = asked.lookup.result
        assert result is not None
        self.operations["hits" if result.chunks else "misses"] += 1
        if result.lease:
            self._own_leases.add(result.lease)
            self._leases[asked.request] = result.lease
            first = self._random.choice([0, 0, 1, 3]) % (result.chunks * BLOCKS_PER_CHUNK)
            blocks = self.take(result.chunks * BLOCKS_PER_CHUNK - first)
            if blocks is None:
                self._end(asked.request)
                return
            self.begin_retrieve(
                asked.request,
                result.lease,
                asked.keys[: result.chunks],
                blocks,
                first_block=first,
                width=self._random.randint(1, LAYERS),
            )
        missing = len(asked.keys) - result.chunks
        if missing and (blocks := self.take(missing * BLOCKS_PER_CHUNK)) is not None:
            self.begin_store(asked.keys, result.chunks, blocks)

    def _end(self, request: str) -> None:
        self._leases.pop(request, None)
        self.client.end_request(request)


def _status_name(status: int) -> str:
    return TransferStatus(status).name.lower().replace("_", " ")
