"""Random conversations with the real server, right and wrong, with any number of engines at once.

Each request gets one answer, typed; no engine's board or pages change but by its own retrieves; and
once all have left, nothing is pinned, leased, reserved, queued or in flight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lamina import protocol
from lamina.errors import ErrorCode
from lamina.server.turns import at_once
from lamina_lab.known.content import chain, ids
from tests.e2e.strangers import BLOCKS, SLOTS, Pages, Stranger
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import BLOCKS_PER_CHUNK

LAST_TICKET = 3
CHAINS = [chain("a", "b", "c"), chain("a", "b", "d"), chain("e", "f")]
any_numbers = st.integers(-(2**63), 2**63 - 1)
FIELDS = ["number", "another's lease", "lease", "blocks", "slot", "base", "width", "ticket"]
odd_blocks = st.lists(st.integers(-1, BLOCKS), max_size=12)


class Engine:
    """A connection, what it may have written to, and what it waits for."""

    def __init__(self, path: Path, name: str, mark: int) -> None:
        self.stranger = Stranger(path)
        self.stranger.greet()
        self.pages = Pages()
        self.pages.pages[:] = self.mark = mark
        self.number = 0
        self.transfers = 0
        self.waiting: dict[int, type[protocol.Message]] = {}
        self.written: set[int] = set()
        self.slots: set[int] = set()
        self.leases: list[int] = []
        self.ask(protocol.Hello, name, name)
        self.ask(protocol.Register, "host", self.pages.geometry, self.pages.page_map,
                 self.pages.regions)  # fmt: skip

    def ask(self, kind: type[protocol.Message], *fields: Any) -> None:
        """Send a request, and a ping to see all that is answered at once."""
        self.number += 2
        self.waiting[self.number] = kind
        self.stranger.send(kind(self.number, *fields), protocol.Ping(self.number + 1))
        while (reply := self.receive()).id != self.number + 1:
            pass
        assert isinstance(reply, protocol.Pong)

    def transfer(self, kind: type[protocol.Message], *fields: Any) -> None:
        """Ask for a retrieve or a store, under the next number."""
        self.transfers += 1
        self.ask(kind, self.transfers, *fields)

    def receive(self) -> protocol.Reply:
        reply = self.stranger.receive()
        assert reply is not None, "the server hung up"
        if isinstance(reply, protocol.ErrorReply):
            assert reply.code is not ErrorCode.INTERNAL, reply
        if not isinstance(reply, protocol.Pong):
            kind = self.waiting.pop(reply.id)  # a second answer has nobody waiting
            assert isinstance(reply, (protocol.REPLY_OF[kind], protocol.ErrorReply))
        if isinstance(reply, protocol.Found) and reply.lease:
            self.leases.append(reply.lease)
        return reply

    def wait(self) -> None:
        """Read every answer that is owed."""
        while self.waiting:
            self.receive()

    def finish(self) -> None:
        """With all tickets there, get every answer; then check what changed."""
        self.stranger.board.ticket = LAST_TICKET
        self.wait()
        board = self.stranger.board
        for slot in set(range(SLOTS)) - self.slots:
            assert (board.landed(slot), board.status(slot)) == (0, 0), "another's announcement"
        untouched = sorted(set(range(BLOCKS)) - self.written)
        assert (self.pages.pages[:, :, untouched] == self.mark).all(), "another's bytes"


class Conversations(RuleBasedStateMachine):
    server: ServerThread

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[Engine] = []
        self.marks = 0

    @initialize()
    def begin(self) -> None:
        self.connect("one")
        self.connect("two")
        for keys in CHAINS:
            blocks = (protocol.pack_block_ids(ids(range(len(keys) * BLOCKS_PER_CHUNK))),)
            self.engines[0].transfer(protocol.Store, b"", tuple(keys), blocks, 0)
        self.engines[0].wait()

    @precondition(lambda self: len(self.engines) < 5)
    @rule(name=st.sampled_from(["one", "two"]))
    def connect(self, name: str) -> None:
        self.marks += 1
        self.engines.append(Engine(self.server.settings.socket, name, self.marks))

    def engine(self, data: st.DataObject) -> Engine:
        return data.draw(st.sampled_from(self.engines))

    def keys(self, data: st.DataObject) -> tuple[bytes, tuple[bytes, ...]]:
        """A parent and the keys after it."""
        keys = data.draw(st.sampled_from(CHAINS))
        first = data.draw(st.integers(0, 1))
        end = data.draw(st.integers(first + 1, len(keys)))
        return keys[first - 1] if first else b"", tuple(keys[first:end])

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def lookup(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(["r", "s", "t"]))
        self.engine(data).ask(protocol.Lookup, request, self.keys(data)[1])

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        parent, keys = self.keys(data)
        blocks: Sequence[int] = range(len(keys) * BLOCKS_PER_CHUNK)
        blocks = data.draw(st.one_of(st.just(blocks), st.just(blocks), odd_blocks))
        ticket = data.draw(st.sampled_from([0, 0, 1, LAST_TICKET]))
        packed = (protocol.pack_block_ids(ids(blocks)),)
        self.engine(data).transfer(protocol.Store, parent, keys, packed, ticket)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), right=st.booleans())
    def retrieve(self, data: st.DataObject, right: bool) -> None:
        """As it should be, or with one thing that may be wrong."""
        engine = self.engine(data)
        engine.ask(protocol.Lookup, "r", (data.draw(st.sampled_from(CHAINS))[0],))
        lease = engine.leases[-1] if engine.leases else 0
        engine.transfers += 1
        number = engine.transfers
        slot, base, width, ticket = len(engine.slots) % SLOTS, 0, 1, None
        blocks = data.draw(st.permutations(range(BLOCKS)))[:BLOCKS_PER_CHUNK]
        match None if right else data.draw(st.sampled_from(FIELDS)):
            case "number":  # a negative one, or mostly one that may be in use
                number = data.draw(st.integers(-1, number))
            case "another's lease":
                # What is drawn must not depend on how far the server is.
                which = data.draw(st.integers(0, 9))
                theirs = [lease for other in self.engines for lease in other.leases[-2:]]
                lease = theirs[which % len(theirs)] if theirs else 0
            case "lease":
                lease = data.draw(any_numbers)
            case "blocks":
                blocks = data.draw(odd_blocks)
            case "slot":
                slot = data.draw(st.one_of(st.integers(0, SLOTS), any_numbers))
            case "base":
                base = data.draw(any_numbers)
            case "width":
                width = data.draw(st.one_of(st.integers(0, 5), any_numbers))
            case "ticket":
                ticket = data.draw(st.one_of(st.integers(0, LAST_TICKET)))
        engine.written |= set(blocks)
        engine.slots.add(slot)
        packed = (protocol.pack_block_ids(ids(blocks)),)
        engine.ask(protocol.Retrieve, number, lease, 0, packed, slot, base, width, ticket)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def end_something(self, data: st.DataObject) -> None:
        engine = self.engine(data)
        numbers = st.one_of(st.integers(0, 40), any_numbers)
        kinds: list[type[protocol.Message]] = [
            protocol.Cancel,
            protocol.EndLease,
            protocol.EndRequest,
        ]
        kind = data.draw(st.sampled_from(kinds))
        if kind is protocol.EndRequest:
            engine.ask(kind, data.draw(st.sampled_from(["r", "s", "t", ""])))
        else:
            engine.ask(kind, data.draw(numbers))

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def say_something_else(self, data: st.DataObject) -> None:
        engine = self.engine(data)
        said = data.draw(st.sampled_from([protocol.Clear(0), protocol.GetStats(0),
                                          protocol.Hello(0, "three", ""), protocol.Workers(0),
                                          engine.pages.register(0)]))  # fmt: skip
        engine.ask(type(said), *list(msgspec.structs.astuple(said))[1:])

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), ticket=st.integers(1, LAST_TICKET))
    def compute(self, data: st.DataObject, ticket: int) -> None:
        board = self.engine(data).stranger.board
        board.ticket = max(board.ticket, ticket)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), name=st.sampled_from("ghi"), ticket=st.integers(1, LAST_TICKET))
    def give_up_stores(self, data: st.DataObject, name: str, ticket: int) -> None:
        """One of a chunk that is seldom there, and all up to it."""
        engine = self.engine(data)
        packed = (protocol.pack_block_ids(ids(range(BLOCKS_PER_CHUNK))),)
        engine.transfer(protocol.Store, b"", tuple(chain(name)), packed, ticket)
        engine.stranger.board.void_stores(ticket)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        engine = self.engine(data)
        self.engines.remove(engine)
        engine.stranger.close()

    def teardown(self) -> None:
        for engine in self.engines:
            engine.finish()
            engine.stranger.close()
        left = ("sessions", "pins", "leases", "queued_transfers", "arena_reserved_bytes")
        eventually(lambda: not any(self.server.gauges()[name] for name in left))

        def clear() -> float:
            at_once(self.server.server.index.clear())
            return self.server.server.arena.free_bytes

        assert self.server.on_loop(clear) == self.server.server.arena.capacity_bytes


def test_random_conversations() -> None:
    with tempfile.TemporaryDirectory(prefix="lamina-") as directory:
        server = ServerThread(Path(directory) / "run" / "s", arena_bytes=6 * 8192)
        try:
            Conversations.server = server
            machine = Conversations.TestCase
            machine.settings = settings(
                derandomize=True,
                deadline=None,
                max_examples=40,
                stateful_step_count=30,
                suppress_health_check=list(HealthCheck),
            )
            machine("runTest").runTest()
            totals = server.totals()
            assert totals["retrieves"] - totals["retrieves_failed"] > 5, "hardly a conversation"
            assert totals["stored_chunks"] > 20
            assert totals["stores_void"] > 5
        finally:
            server.stop()
