"""A toy model and a client whose transfers move only when told, with the server behind it.

A token's KV is one number that stands for all tokens up to it; what the model says next follows
from that number. So wrong KV is seen wherever it is read, and what lies in a chunk tells which key
it must have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import MISS, LookupResult
from lamina.client.checks import check_name
from lamina.geometry import Slice
from lamina.keys import Namespace, chunk_keys
from lamina.shards import Shard

BLOCK, CHUNK, LAYERS = 16, 32, 3
_FIRST_WORD = 2
_WORDS = 30_000
_MANY_LOOKS = 1_000


class ToyModel:
    """Says what follows a prompt, and which tokens a KV stands for."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}

    def kv(self, before: int, token: int) -> int:
        """The KV of `token` after the KV `before` (0 at the start); never 0."""
        state = hash((before, token)) or 1
        self._before[state] = (before, token)
        return state

    def next_token(self, state: int) -> int:
        return _FIRST_WORD + state % _WORDS

    def tokens_of(self, state: int) -> list[int]:
        """All tokens that a KV stands for; fails for garbage."""
        tokens = []
        while state:
            assert state in self._before, "this is nobody's KV"
            state, token = self._before[state]
            tokens.append(token)
        return tokens[::-1]


class Text:
    """A prompt and what the model says after it, with its KV."""

    def __init__(self, model: ToyModel, prompt: Sequence[int]) -> None:
        self._model = model
        self.prompt = len(prompt)
        self._tokens = list(prompt)
        self._kv: list[int] = []

    def tokens(self, count: int) -> list[int]:
        while len(self._tokens) < count:
            self._tokens.append(self._model.next_token(self.kv(len(self._tokens))[-1]))
        return self._tokens[:count]

    def kv(self, count: int) -> list[int]:
        """The KV of the first `count` tokens."""
        while len(self._kv) < count:
            token = self.tokens(len(self._kv) + 1)[-1]
            self._kv.append(self._model.kv(self._kv[-1] if self._kv else 0, token))
        return self._kv[:count]


class ScriptedRetrieve:
    """Stands in for `client.Retrieve`, and for the server's copying."""

    base = 0
    board = ended = None

    def __init__(
        self,
        client: ScriptedClient,
        slot: int,
        request: str,
        lease: int,
        blocks: list[int],
        kv: list[int],
        width: int,
    ) -> None:
        self._client = client
        self.slot = slot
        self.request = request
        self.lease = lease
        self.blocks = blocks
        self._kv = kv
        self._width = width
        layers = len(client.layers)
        firsts = range(0, layers, width)
        self.slices = [Slice(n, i, min(i + width, layers)) for n, i in enumerate(firsts)]
        self.landed_slices = 0
        self.is_over = False
        self._outcome: TransferStatus | None = None
        self._looks = 0

    def awaited(self, slices: int) -> tuple[int, int]:
        return self.slot, self.base + slices

    def slice_of(self, layer: int) -> int:
        return layer // self._width

    @property
    def is_acknowledged(self) -> bool:
        return self.is_over

    @property
    def outcome(self) -> TransferStatus | None:
        self._looks = 0 if self._outcome is not None else self._looks + 1
        assert self._looks < _MANY_LOOKS, "a step would wait forever"
        return self._outcome

    @property
    def twins(self) -> list[ScriptedRetrieve]:
        """The same retrieve on other ranks, where those do as this one."""
        mirrors = self._client.peers[1:] if self._client.leads else ()
        return [m.retrieves[self.slot] for m in mirrors if len(m.retrieves) > self.slot]

    def land(self, slices: int | None = None) -> None:
        """Let this many slices in all, or all, have landed."""
        for twin in self.twins:
            twin.land(slices)
        wanted = len(self.slices) if slices is None else slices
        slots = slots_of(self.blocks)
        while self._outcome is None and self.landed_slices < wanted:
            landing = self.slices[self.landed_slices]
            layers = self._client.layers[landing.first_layer : landing.end_layer]
            self._client.memory[layers.start : layers.stop, slots] = self._kv
            self.landed_slices += 1
        if self._outcome is None and self.landed_slices == len(self.slices):
            self._outcome = TransferStatus.OK
            self.end()

    def fail(
        self, is_over: bool = True, status: TransferStatus = TransferStatus.COPY_FAILED
    ) -> None:
        """Fail, unless it has landed; the pages may be written until it `is_over`."""
        for twin in self.twins:
            twin.fail(is_over, status)
        if self._outcome is None:
            self._outcome = status
            if is_over:
                self.end()

    def end(self) -> None:
        """The server will not write again."""
        for twin in self.twins:
            twin.end()
        if not self.is_over:
            self.is_over = True
            self._client.end_use(self.lease)


class ScriptedStore:
    """Stands in for `client.Store`."""

    def __init__(self, client: ScriptedClient, parent: bytes, keys: list[bytes], blocks: list[int]):
        self._client = client
        self.parent = parent
        self.keys = keys
        self.blocks = blocks
        self.is_over = False
        self.slot = len(client.stores)
        self.check()

    def check(self) -> None:
        """What is stored must be what its keys say, in all layers."""
        memory = self._client.own_memory[:, slots_of(self.blocks)]
        assert (memory == memory[0]).all(), "a chunk is stored of which some layers lack"
        tokens = self._client.model.tokens_of(int(memory[0, -1]))
        kv = Text(self._client.model, tokens).kv(len(tokens))
        assert list(memory[0]) == kv[-len(memory[0]) :], "what is stored is no prefix's KV"
        before = len(tokens) // CHUNK - len(self.keys)
        chains = [chunk_keys(space, CHUNK, tokens) for space in self._client.namespaces]
        parents = [chain[before - 1] if before else b"" for chain in chains]
        assert (self.parent, self.keys) in [
            (parent, chain[before:]) for parent, chain in zip(parents, chains, strict=True)
        ], "what is stored has not the key of its tokens"

    def end(self) -> None:
        """The server has copied, or dropped it."""
        for mirror in self._client.peers[1:] if self._client.leads else ():
            if len(mirror.stores) > self.slot:
                mirror.stores[self.slot].end()
        if not self.is_over:
            self.check()
            self.is_over = True
            for index, key in enumerate(self.keys):
                per_chunk = CHUNK // BLOCK
                blocks = self.blocks[index * per_chunk : (index + 1) * per_chunk]
                kv = self._client.own_memory[0, slots_of(blocks)]
                self._client.chunks.setdefault(key, [int(value) for value in kv])


class ScriptedLookup:
    """Stands in for `client.Lookup`: granted at once, told when the client `answers`."""

    def __init__(self, client: ScriptedClient, granted: LookupResult) -> None:
        self._client = client
        self._granted = granted
        self._server = client.server if client.is_usable else None

    @property
    def is_lost(self) -> bool:
        return self._server != self._client.server

    @property
    def result(self) -> LookupResult | None:
        return self._granted if self._client.answers else None

    def wait(self, timeout_s: float) -> LookupResult | None:
        return self.result


class ScriptedClient:
    """The client of both sides; also the device whose waits make a retrieve's slices land.

    `check_target` is asked about the blocks of each new retrieve. Of several ranks each has one, in
    `peers`; the server behind them is one. Where the first `leads`, the others' transfers do as its
    own, so that a test need not know how many ranks there are.
    """

    name = "host"
    lease_ttl_s = 60.0

    def __init__(
        self,
        model: ToyModel,
        memory: npt.NDArray[np.int64],
        check_target: Callable[[str, list[int]], None],
        first: ScriptedClient | None = None,
        layers: range = range(LAYERS),
    ) -> None:
        self.layers = layers
        """Those of its rank."""
        self.peers: list[ScriptedClient] = [*first.peers, self] if first else [self]
        for peer in self.peers:
            peer.peers = self.peers
        self.leads = first is None
        self.model = model
        self.memory = memory
        self._check_target = check_target
        self.namespaces: list[Namespace] = first.namespaces if first else []
        self.chunks: dict[bytes, list[int]] = first.chunks if first else {}
        self.leases: dict[int, tuple[str, list[bytes]]] = first.leases if first else {}
        self._uses: Counter[int] = first._uses if first else Counter()
        self.retrieves: list[ScriptedRetrieve] = []
        self.deadlines_s: list[float | None] = []
        """Of the retrieves that were begun."""
        self.stores: list[ScriptedStore] = []
        self.written: set[int] = set()
        """Blocks that steps under way write."""
        self.is_usable = True
        self.takes_retrieves = True
        """Whether the worker's side reaches the server too, and it has room."""
        self.server = 0
        """Which server it is."""
        self.answers = True
        """Whether lookups are answered."""
        self.acknowledges = True
        """Whether a cancelled retrieve is over at once."""
        self.is_swift = False
        """Whether transfers end by themselves between steps."""
        self.doomed: dict[str, bool] = {}
        """Requests whose retrieves fail when a forward waits for them; whether they are then
        over."""
        self._numbers = 0
        self._transfers: set[int] = set()
        self._description = b""

    @property
    def own_memory(self) -> npt.NDArray[np.int64]:
        """That of its rank's layers."""
        return self.memory[self.layers.start : self.layers.stop]

    def hold(self, namespace: Any, prompt: list[int], chunks: int | None = None) -> None:
        text = Text(self.model, prompt)
        keys = chunk_keys(namespace, CHUNK, prompt)[:chunks]
        for index, key in enumerate(keys):
            self.chunks[key] = text.kv((index + 1) * CHUNK)[index * CHUNK :]

    def lose_server(self) -> None:
        """It dies, and what it held; with `is_usable` another one is there, which is empty."""
        for peer in self.peers:
            peer.is_usable = False
            peer.server += 1
        self.chunks.clear()
        self.leases.clear()

    def advance(self) -> None:
        """The time between two steps."""
        if self.is_swift:
            for retrieve in self.retrieves:
                retrieve.land()
                if not retrieve.is_over:
                    retrieve.end()
            for store in self.stores:
                store.end()

    def busy(self) -> dict[int, str]:
        """Blocks that a transfer reads or writes, and what for."""
        retrieves = {
            b: f"still retrieved by {x.request}" for x in self.open_retrieves for b in x.blocks
        }
        return retrieves | {
            b: "still stored" for x in self.stores if not x.is_over for b in x.blocks
        }

    @property
    def open_retrieves(self) -> list[ScriptedRetrieve]:
        return [retrieve for retrieve in self.retrieves if not retrieve.is_over]

    # As `client.Client`

    def register(
        self, geometry: Any, page_map: Any, allocations: Any, description: bytes, shard: Shard
    ) -> None:
        self._description = description

    def workers(self, count: int) -> tuple[bytes, ...] | None:
        told = tuple(peer._description for peer in self.peers if peer._description)
        return told if len(told) >= count else None

    def note_trouble(self, trouble: str) -> None:
        self.trouble = trouble

    def wait_for_workers(self, count: int, timeout_s: float) -> tuple[bytes, ...] | None:
        return self.workers(count)

    def ask(self, request: object, timeout_s: float) -> protocol.Stats:
        return protocol.Stats(
            0, "", {"arena_capacity_bytes": 0, "chunks": len(self.chunks)}, {}, ()
        )

    def give_up_stores(self) -> None:
        for store in self.stores:
            store.is_over = True

    def try_connect(self) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...

    def lookup(self, request: str, keys: Sequence[bytes]) -> ScriptedLookup:
        check_name("the request's name", request)
        held = 0
        while self.is_usable and held < len(keys) and keys[held] in self.chunks:
            held += 1
        if not held:
            return ScriptedLookup(self, MISS)
        self._end_leases(request)
        self._numbers += 1
        self.leases[self._numbers] = (request, list(keys[:held]))
        return ScriptedLookup(self, LookupResult(held, self._numbers))

    def retrieve(
        self,
        request: str,
        lease: int,
        start_tokens: int,
        block_ids: Sequence[Iterable[int]],
        layers_per_slice: int,
        ticket: int | None = None,
        number: int | None = None,
        deadline_s: float | None = None,
    ) -> ScriptedRetrieve | None:
        self._take_number(number)
        self.deadlines_s.append(deadline_s)
        assert 0 < layers_per_slice <= len(self.layers), "the real client refuses such a width"
        blocks = [int(block) for block in block_ids[0]]
        if not (self.is_usable and self.takes_retrieves and lease in self.leases):
            self.leases.pop(lease, None)  # it runs out
            return None
        self._check_target(request, blocks)
        leased = [value for key in self.leases[lease][1] for value in self.chunks[key]]
        kv = leased[start_tokens : start_tokens + len(blocks) * BLOCK]
        slot = len(self.retrieves)
        retrieve = ScriptedRetrieve(self, slot, request, lease, blocks, kv, layers_per_slice)
        self.retrieves.append(retrieve)
        return retrieve

    def cancel(self, retrieve: ScriptedRetrieve) -> None:
        retrieve.fail(self.acknowledges, TransferStatus.CANCELLED)

    def store(
        self,
        parent: bytes,
        keys: list[bytes],
        block_ids: Sequence[Iterable[int]],
        ticket: int,
        number: int | None = None,
    ) -> ScriptedStore | None:
        self._take_number(number)
        if not self.is_usable:
            return None
        store = ScriptedStore(self, parent, keys, [int(block) for block in block_ids[0]])
        self.stores.append(store)
        return store

    def _take_number(self, number: int | None) -> None:
        """One names a transfer on both sides, a retrieve or a store."""
        assert number is not None
        assert number not in self._transfers, "two transfers with one number"
        self._transfers.add(number)

    def write_ticket(self, stream: Any = None) -> int:
        return 0

    def end_request(self, request: str) -> None:
        check_name("the request's name", request)
        self._end_leases(request)
        for peer in self.peers:
            for retrieve in peer.open_retrieves:
                if retrieve.request == request:
                    peer.cancel(retrieve)

    def end_lease(self, lease: int) -> None:
        self.leases.pop(lease, None)

    def end_use(self, lease: int) -> None:
        """A rank's retrieve has ended: with the last one's the lease does."""
        self._uses[lease] += 1
        if self._uses[lease] >= len(self.peers):
            self.leases.pop(lease, None)

    # As `devices.WorkerDevice`

    def wait_landed(self, board: Any, slot: int, count: int, stream: Any = None) -> None:
        retrieve = self.retrieves[slot]
        if retrieve.request in self.doomed:
            retrieve.fail(self.doomed[retrieve.request])
        retrieve.land(count)

    def _end_leases(self, request: str) -> None:
        for lease in [n for n, (owner, _) in self.leases.items() if owner == request]:
            del self.leases[lease]


def slots_of(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where the tokens of `blocks` lie in a layer's memory."""
    return (np.array(blocks, np.int64)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
