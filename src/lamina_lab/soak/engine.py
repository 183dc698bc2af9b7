"""One engine of the soak: random requests on pages of which every byte is known.

What is nobody's is poison, and so is what a transfer has and has not written yet. So a late write,
an early read, a chunk that is not whole and another prompt's chunk all show.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.board import TransferStatus
from lamina.client import Client, Lookup, Retrieve, Store
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina.settings import ClientSettings
from lamina_lab.soak.pages import Pages, StreamDevice, chain, content_of_run

CHUNK_TOKENS, BLOCK_TOKENS = 64, 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
LAYERS, PAGE_BYTES, BLOCKS = 4, 4096, 128
GEOMETRY = Geometry(
    CHUNK_TOKENS,
    (Group(BLOCK_TOKENS),),
    tuple(Layer(f"layers.{index}", 0, 1, PAGE_BYTES) for index in range(LAYERS)),
)
POISON = 0xA5
PROMPTS, MAX_CHUNKS = 60, 5
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


class WrongBytesError(Exception):
    """Something is in the pages, or not in them, that an invariant forbids."""


@dataclass(eq=False)
class _Asked:
    request: str
    keys: list[bytes]
    lookup: Lookup


@dataclass(eq=False)
class _Retrieve:
    retrieve: Retrieve
    blocks: list[int]
    expected: Pages | None
    """Shape (layers, blocks, page bytes); None when nothing may ever land."""
    outcome: TransferStatus | None = None


@dataclass(eq=False)
class _Save:
    store: Store
    blocks: list[int]
    content: Pages
    is_computed: bool = False


class SoakEngine:
    """Counts what it does in `operations` and how what failed has ended in `errors`."""

    def __init__(self, socket: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._pages = np.full((LAYERS, BLOCKS, PAGE_BYTES), POISON, np.uint8)
        self._free = list(range(BLOCKS))
        self._asked: list[_Asked] = []
        self._leases: dict[str, int] = {}
        self._retrieves: list[_Retrieve] = []
        self._saves: list[_Save] = []
        self._own_leases: set[int] = set()
        self._requests = 0
        self._was_usable = True
        self.operations: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.reconnected = 0
        self.checked_bytes = 0
        self._device = StreamDevice()
        self.client = Client(
            ClientSettings(
                socket=socket,
                suspect_after_ms=250,
                lookup_timeout_ms=LOOKUP_TIMEOUT_MS,
                retrieve_timeout_ms=RETRIEVE_TIMEOUT_MS,
                reconnect_every_ms=100,
            ),
            self._device,
            f"soak {seed}",
        )
        layer_bytes = BLOCKS * PAGE_BYTES
        planes = tuple((PlanePages(0, layer * layer_bytes, PAGE_BYTES),) for layer in range(LAYERS))
        region = self._device.export(self._pages.ctypes.data, self._pages.nbytes)
        self.client.register(GEOMETRY, PageMap((BLOCKS,), planes), [region])
        self.client.try_connect()

    def operate(self) -> None:
        """One random operation, then a poll and a look at all pages that changed hands."""
        (name,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self.operations[name] += 1
        getattr(self, f"_{name}")()
        self.step()
        if self.operations.total() % CHECK_ALL_EVERY == 0:
            self._expect(self._pages[:, self._free], POISON, "a free page was written")

    def step(self) -> None:
        """Read replies; begin to retrieve what was found; take back what is over."""
        self.client.poll()
        if self.client.is_usable and not self._was_usable:
            self.reconnected += 1
        self._was_usable = self.client.is_usable
        for asked in [asked for asked in self._asked if asked.lookup.result is not None]:
            self._asked.remove(asked)
            self._serve(asked)
        for retrieve in list(self._retrieves):
            self._check_retrieve(retrieve)
            if retrieve.retrieve.is_over:
                self._end_retrieve(retrieve)
        for save in [save for save in self._saves if save.store.is_over]:
            self._check_save(save)
            self._saves.remove(save)
            ended = save.store.ended
            self.operations["chunks stored"] += ended.stored if ended else 0
            self.errors[f"store {_status_name(ended.status) if ended else 'lost'}"] += (
                ended is None or ended.status != TransferStatus.OK
            )
            self._give_back(save.blocks)

    @property
    def is_idle(self) -> bool:
        """Whether every page is the engine's."""
        return not (self._asked or self._retrieves or self._saves)

    def end_all(self) -> None:
        """End every request, as when the engine is shut down in order."""
        for request in {
            *self._leases,
            *(retrieve.retrieve.request for retrieve in self._retrieves),
        }:
            self._end(request)
        self._device.compute()

    def leaks(self) -> list[str]:
        """What is still held, once all requests have ended; empty when all is well."""
        found = []
        if sorted(self._free) != list(range(BLOCKS)):
            found.append(f"{BLOCKS - len(self._free)} blocks are held")
        if self.client.quarantined:
            found.append(f"{self.client.quarantined} retrieves are quarantined")
        if self.client.transfers_in_flight:
            found.append(f"{self.client.transfers_in_flight} transfers are in flight")
        self._expect(self._pages, POISON, "a page was written after all had ended")
        return found

    def close(self) -> None:
        self.client.close()

    # Operations.

    def _ask(self) -> None:
        number = int(self._random.paretovariate(0.7)) % PROMPTS
        parts = range(1, self._random.randint(1, MAX_CHUNKS))
        keys = chain(f"document {number // 3}", *(f"{number} {part}" for part in parts))
        self._requests += 1
        request = f"r{self._requests}"
        self._asked.append(_Asked(request, keys, self.client.lookup(request, keys)))

    def _compute(self) -> None:
        self._device.compute()

    def _abort(self) -> None:
        if self._leases:
            self._end(self._random.choice(list(self._leases)))

    def _preempt(self) -> None:
        if self._retrieves:
            request = self._random.choice(self._retrieves).retrieve.request
            self._end(request)
            self._ask()

    def _cancel(self) -> None:
        if self._retrieves:
            self.client.cancel(self._random.choice(self._retrieves).retrieve)

    def _not_needed(self) -> None:
        if self._leases:
            self.client.end_lease(self._leases.pop(self._random.choice(list(self._leases))))

    def _corrupt_a_lease(self) -> None:
        """Retrieve under a number that was never given to this engine: nothing may be written."""
        if not self._own_leases:
            return
        number = self._random.choice(list(self._own_leases)) ^ 1 << self._random.randrange(20, 60)
        blocks = self._take(BLOCKS_PER_CHUNK)
        if blocks is not None and number not in self._own_leases:
            self._begin_retrieve("corrupt", number, blocks, 1, None)
        elif blocks is not None:
            self._give_back(blocks)

    def _overlook(self) -> None:
        """Go on without waiting for an answer; its lease must not stay."""
        self.client.lookup("overlooked", chain("document 0"))
        self.client.end_request("overlooked")

    # Transfers.

    def _serve(self, asked: _Asked) -> None:
        """Retrieve what was found, as an engine does, and compute and store the rest."""
        result = asked.lookup.result
        assert result is not None
        self.operations["hits" if result.chunks else "misses"] += 1
        if result.lease:
            self._own_leases.add(result.lease)
            self._leases[asked.request] = result.lease
            first = self._random.choice([0, 0, 1, 3]) % (result.chunks * BLOCKS_PER_CHUNK)
            expected = content_of_run(asked.keys[: result.chunks], GEOMETRY)[:, first:]
            blocks = self._take(expected.shape[1])
            if blocks is None:
                self._end(asked.request)
                return
            self._begin_retrieve(asked.request, result.lease, blocks, first, expected)
        if result.chunks < len(asked.keys):
            self._save(asked.keys, result.chunks)

    def _begin_retrieve(
        self, request: str, lease: int, blocks: list[int], first: int, expected: Pages | None
    ) -> None:
        width = self._random.randint(1, LAYERS)
        ids = np.array(blocks, np.int32)
        retrieve = self.client.retrieve(request, lease, first * BLOCK_TOKENS, [ids], width)
        if retrieve is None:
            self._give_back(blocks)
            return
        self._retrieves.append(_Retrieve(retrieve, blocks, expected))

    def _save(self, keys: list[bytes], first: int) -> None:
        blocks = self._take((len(keys) - first) * BLOCKS_PER_CHUNK)
        if blocks is None:
            return
        content = content_of_run(keys[first:], GEOMETRY)
        self._device.enqueue(lambda: self._write(blocks, content))
        ticket = self.client.write_ticket()
        parent = keys[first - 1] if first else b""
        store = self.client.store(parent, keys[first:], [np.array(blocks, np.int32)], ticket)
        if store is None:
            self._device.compute()
            self._give_back(blocks)
            return
        save = _Save(store, blocks, content)
        self._device.enqueue(lambda: setattr(save, "is_computed", True))
        self._saves.append(save)

    def _end(self, request: str) -> None:
        self._leases.pop(request, None)
        self.client.end_request(request)

    def _end_retrieve(self, retrieve: _Retrieve) -> None:
        self._retrieves.remove(retrieve)
        self._leases.pop(retrieve.retrieve.request, None)
        outcome = retrieve.retrieve.outcome
        if outcome:
            self.errors[f"retrieve {_status_name(outcome)}"] += 1
            if outcome is TransferStatus.REFUSED:
                self._expect(self._pages[:, retrieve.blocks], POISON, "refused, but written")
        else:
            self.operations["retrieves"] += 1
        self._give_back(retrieve.blocks)

    def _check_retrieve(self, retrieve: _Retrieve) -> None:
        landed = (
            retrieve.retrieve.landed_slices
        )  # before the outcome: a failure forces the count last
        outcome = retrieve.retrieve.outcome
        if retrieve.outcome not in (None, outcome):
            raise WrongBytesError("an outcome changed")
        retrieve.outcome = outcome
        if outcome is TransferStatus.OK:
            landed = len(retrieve.retrieve.slices)
        if outcome or not landed:
            return
        if retrieve.expected is None:
            raise WrongBytesError("something landed under a lease that was never given")
        end = retrieve.retrieve.slices[landed - 1].end_layer
        got, wanted = self._pages[:end, retrieve.blocks], retrieve.expected[:end]
        self._expect(got, wanted, "landed, but not its bytes")

    def _check_save(self, save: _Save) -> None:
        wanted = save.content if save.is_computed else POISON
        self._expect(self._pages[:, save.blocks], wanted, "a store wrote to its pages")

    # Pages.

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        self._random.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        self._expect(self._pages[:, taken], POISON, "a free page was written")
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        self._device.compute()  # the engine's next work on them comes after what it has enqueued
        self._pages[:, blocks] = POISON
        self._free += blocks

    def _write(self, blocks: list[int], content: Pages) -> None:
        self._pages[:, blocks] = content

    def _expect(self, got: Pages, wanted: Pages | int, otherwise: str) -> None:
        self.checked_bytes += got.nbytes
        if not (got == wanted).all():
            raise WrongBytesError(otherwise)


def _status_name(status: int) -> str:
    return TransferStatus(status).name.lower().replace("_", " ")
