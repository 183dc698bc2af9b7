"""Whatever an engine, an operator or a stranger sends: one clear error, and nobody else notices.

Every test that has a server has a bystander too: another engine with chunks in the cache, which is
served after it as before. A server that had to say "internal" or that logged an error has a fault
of its own, whatever it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import lamina
from lamina import protocol
from lamina.board import Board, TransferStatus
from lamina.cli import main
from lamina.client import MISS, Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ErrorCode, GeometryError, RequestRefusedError, SettingsError
from lamina.geometry import Geometry, Group, PageMap, PlanePages
from lamina.linux import Peer, peer_of
from lamina.server.main import Server
from lamina.settings import ClientSettings
from tests.support.server import ServerProcess, ServerThread, connected_client
from tests.support.wait import PATIENCE_S, eventually
from tests.support.worker import PageWorker, ids, random_keys, small_geometry

SLOTS = 8
BLOCKS = 16
GEOMETRY = small_geometry(layers=4)


class Stranger:
    """A connection without a client: any bytes, any descriptors, any message."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(os.fspath(path))
        self.board = Board.create(SLOTS)
        self._frames = protocol.FrameBuffer()
        self._received: list[protocol.Reply] = []

    def greet(self, preface: bytes | None = None, fds: Sequence[int] | None = None) -> None:
        data = protocol.preface() if preface is None else preface
        socket.send_fds(self.socket, [data], [self.board.fd] if fds is None else list(fds))

    def send(self, *messages: protocol.Message) -> None:
        self.send_bytes(b"".join(protocol.encode(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Send it all, or as much as the server took before it closed the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def receive(self) -> protocol.Reply | None:
        """The next reply; None when the server has closed the connection."""
        while not self._received:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += map(protocol.decode_reply, self._frames.feed(data))
        return self._received.pop(0)

    def ask(self, message: protocol.Message) -> protocol.Reply:
        self.send(message)
        reply = self.receive()
        assert reply is not None, "the server closed the connection instead of answering"
        assert reply.id == message.id
        return reply

    def is_closed(self) -> bool:
        """Whether the server closes the connection, after whatever else it says."""
        while self.receive() is not None:
            pass
        return True

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.socket.close()
            self.board.close()


class Bystander:
    """An engine that has done nothing wrong, with two chunks in the cache."""

    def __init__(self, server: ServerThread) -> None:
        self.server = server
        self.worker = PageWorker(server.settings.socket, GEOMETRY, BLOCKS)
        self.keys = random_keys(2)
        self.worker.fill(range(8), seed=1)
        self.expected = self.worker.read(range(8))
        self.worker.save(self.keys, range(8))

    def check(self) -> None:
        """It is served, its chunks are there, and nobody left anything pinned."""
        target = list(range(8, 16))
        self.worker.poison(target)
        retrieve = self.worker.load("bystander", self.keys, target)
        self.worker.wait(lambda: retrieve.is_acknowledged)
        assert retrieve.outcome is TransferStatus.OK
        for got, wanted in zip(self.worker.read(target), self.expected, strict=True):
            assert np.array_equal(got, wanted)


@pytest.fixture
def server(socket_path: Path) -> Iterator[ServerThread]:
    thread = ServerThread(socket_path, arena_bytes=1 << 20)
    yield thread
    thread.stop()


@pytest.fixture
def bystander(server: ServerThread, caplog: pytest.LogCaptureFixture) -> Iterator[Bystander]:
    """Served before and after the test; the server must not have had a fault of its own."""
    bystander = Bystander(server)
    yield bystander
    bystander.check()
    eventually(lambda: server.gauges()["pins"] == server.gauges()["leases"] == 0)
    bystander.worker.close()
    assert server.on_loop(lambda: server.server.counters.refused[ErrorCode.INTERNAL.value]) == 0
    faults = [r for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert not faults, faults


@pytest.fixture
def connect(socket_path: Path, bystander: Bystander) -> Iterator[Callable[[], Stranger]]:
    """Makes strangers' connections, closed at the end; the server must forget them."""
    strangers: list[Stranger] = []

    def make() -> Stranger:
        strangers.append(Stranger(socket_path))
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.close()
    eventually(lambda: bystander.server.gauges()["sessions"] == 1)


@pytest.fixture
def stranger(connect: Callable[[], Stranger]) -> Stranger:
    """Connected, no more."""
    return connect()


@pytest.fixture
def guest(stranger: Stranger) -> Stranger:
    """Greeted, and has said hello."""
    stranger.greet()
    assert isinstance(stranger.ask(protocol.Hello(1, "guest", "guest")), protocol.Welcome)
    return stranger


class Pages:
    """KV memory that a stranger registers."""

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        page_bytes = geometry.layers[0].page_bytes
        self.memory = np.zeros((len(geometry.layers), BLOCKS, page_bytes), np.uint8)
        self.geometry = geometry
        self.page_map = PageMap(
            (BLOCKS,),
            tuple(
                (PlanePages(0, layer * BLOCKS * page_bytes, page_bytes),)
                for layer in range(len(geometry.layers))
            ),
        )
        self.regions = (HostWorkerDevice().export(self.memory.ctypes.data, self.memory.nbytes),)

    def register(self, number: int) -> protocol.Register:
        return protocol.Register(number, "host", self.geometry, self.page_map, self.regions)


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def worker_guest(guest: Stranger, pages: Pages) -> Stranger:
    """A guest that has registered its KV memory."""
    assert isinstance(guest.ask(pages.register(2)), protocol.Registered)
    return guest


def assert_refused(reply: object, code: ErrorCode, *words: str) -> None:
    """One typed error whose two sentences name the cause and what to do."""
    assert isinstance(reply, protocol.ErrorReply)
    assert reply.code is code, reply
    for word in words:
        assert word in f"{reply.cause}. {reply.remedy}", reply
    assert reply.cause
    assert reply.remedy


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# The greeting.


@pytest.mark.parametrize(
    ("preface", "code", "words"),
    [
        (protocol.MAGIC + struct.pack("<I", 2), ErrorCode.VERSION, ["protocol 2", "same Lamina"]),
        (protocol.MAGIC + struct.pack("<I", 0), ErrorCode.VERSION, ["protocol 0", "same Lamina"]),
        (b"GET / HT", ErrorCode.MALFORMED, ["first bytes", "Lamina client"]),
        (protocol.MAGIC, ErrorCode.MALFORMED, ["first bytes", "Lamina client"]),
        (b"\0" * 8, ErrorCode.MALFORMED, ["first bytes", "Lamina client"]),
    ],
    ids=["newer", "older", "http", "short", "zeros"],
)
def test_another_version_or_another_protocol_is_turned_away(
    stranger: Stranger, preface: bytes, code: ErrorCode, words: list[str]
) -> None:
    stranger.greet(preface)
    assert_refused(stranger.receive(), code, *words)
    assert stranger.is_closed()


def test_a_client_says_why_the_server_turned_it_away(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lamina.client.connection.protocol.preface", lambda: protocol.MAGIC + b"\x09\0\0\0"
    )
    client = Client(
        ClientSettings(socket=bystander.server.settings.socket), HostWorkerDevice(), "newer"
    )
    with pytest.raises(RequestRefusedError, match="speaks protocol 9, the server 1") as refusal:
        client.connect()
    assert refusal.value.code is ErrorCode.VERSION
    client.close()


def _memfd(nbytes: int, seals: int, header: bytes = b"") -> int:
    fd = os.memfd_create("board", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, header, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GOOD = Board.create(SLOTS)
_GOOD_BYTES, _GOOD_HEADER = _GOOD.nbytes, os.pread(_GOOD.fd, 16, 0)
_GOOD.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _memfd(_GOOD_BYTES, 0, _GOOD_HEADER), ["not sealed", "Board.create"]),
        (lambda: _memfd(_GOOD_BYTES, fcntl.F_SEAL_SHRINK, _GOOD_HEADER), ["not sealed"]),
        (lambda: os.open("/dev/null", os.O_RDWR), ["not a memfd", "Board.create"]),
        (lambda: os.open("/", os.O_RDONLY), ["not a memfd"]),
        (lambda: os.open(__file__, os.O_RDONLY), ["not a memfd"]),
        (lambda: _memfd(0, _SIZE), ["only 0 bytes"]),
        (lambda: _memfd(4096, _SIZE), ["another kind or version"]),
        (lambda: _memfd(_GOOD_BYTES, _SIZE, b"x" * 16), ["another kind or version"]),
        (lambda: _memfd(_GOOD_BYTES - 64, _SIZE, _GOOD_HEADER), [f"claims {SLOTS} slots"]),
        (lambda: _memfd(_GOOD_BYTES, _SIZE | fcntl.F_SEAL_WRITE, _GOOD_HEADER), ["written"]),
    ],
    ids=[
        "unsealed",
        "half-sealed",
        "device",
        "directory",
        "file",
        "empty",
        "zeros",
        "bad-magic",
        "too-small",
        "read-only",
    ],
)
def test_a_board_that_could_harm_the_server_is_refused(
    stranger: Stranger, make: Callable[[], int], words: list[str]
) -> None:
    fd = make()
    stranger.greet(fds=[fd])
    assert_refused(stranger.receive(), ErrorCode.BAD_BOARD, *words)
    assert stranger.is_closed()
    os.close(fd)


@pytest.mark.parametrize("count", [0, 2, 3, 20])
def test_a_preface_comes_with_exactly_one_descriptor(
    bystander: Bystander, connect: Callable[[], Stranger], count: int
) -> None:
    before = open_fds()
    stranger = connect()
    stranger.greet(fds=[stranger.board.fd] * count)
    assert_refused(stranger.receive(), ErrorCode.BAD_BOARD, "boards came", "Send one")
    assert stranger.is_closed()
    stranger.close()
    eventually(lambda: open_fds() == before)


def test_a_connection_that_says_nothing_is_closed_and_holds_nobody_up(
    bystander: Bystander, connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    silent = [connect() for _ in range(50)]
    bystander.check()  # all of them are still waiting to be greeted
    monkeypatch.setattr("lamina.server.listener.GREETING_TIMEOUT_S", 0.01)
    silent += [connect() for _ in range(50)]
    for stranger in silent[50:]:
        assert stranger.is_closed()
    for stranger in silent:
        stranger.close()
    eventually(lambda: open_fds() == before)


def test_a_server_stops_while_somebody_says_nothing(socket_path: Path) -> None:
    server = ServerThread(socket_path, arena_bytes=1 << 20)
    before = open_fds()
    stranger = Stranger(socket_path)
    try:
        server.after_reading(lambda: None)
        server.stop()
        assert stranger.is_closed()
    finally:
        stranger.close()
    eventually(lambda: open_fds() <= before)


# Bytes that are no messages.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", ["a frame of 4294967295 bytes"]),
        (struct.pack("<I", protocol.MAX_FRAME_BYTES + 1), ["a frame of"]),
        (frame(b""), []),
        (frame(b"garbage"), []),
        (frame(msgspec.msgpack.encode(["Nonsense", 1])), []),
        (frame(msgspec.msgpack.encode(["Pong", 1])), []),
        (frame(msgspec.msgpack.encode({"type": "Ping", "id": 1})), []),
        (frame(msgspec.msgpack.encode(["Ping"])), []),
        (frame(msgspec.msgpack.encode(["Ping", "one"])), []),
        (frame(b"\x91" * 100_000), []),
        (frame(b"\xd9\x04\xff\xff\xff\xff"), []),
        (frame(msgspec.msgpack.encode(["Hello", 1, "x"])), []),
    ],
    ids=[
        "giant",
        "too-long",
        "empty",
        "garbage",
        "unknown",
        "a-reply",
        "map",
        "no-id",
        "bad-id",
        "deep",
        "not-utf8",
        "short",
    ],
)
def test_bytes_that_are_no_message_end_the_connection_with_one_error(
    guest: Stranger, data: bytes, words: list[str]
) -> None:
    guest.send_bytes(data)
    assert_refused(guest.receive(), ErrorCode.MALFORMED, "reconnect", *words)
    assert guest.receive() is None


def test_a_truncated_frame_is_waited_for_and_then_forgotten(
    bystander: Bystander, guest: Stranger
) -> None:
    whole = protocol.encode(protocol.Ping(7))
    for byte in whole[:-1]:
        guest.send_bytes(bytes([byte]))
        bystander.server.after_reading(lambda: None)
    bystander.check()
    guest.send_bytes(whole[-1:])
    assert guest.receive() == protocol.Pong(7)
    guest.send_bytes(whole[:5])
    guest.socket.shutdown(socket.SHUT_WR)
    assert guest.receive() is None


def test_random_bytes_instead_of_a_greeting(
    bystander: Bystander, connect: Callable[[], Stranger]
) -> None:
    rng = random.Random(1)
    for _ in range(100):
        stranger = connect()
        preface = rng.randbytes(rng.randint(1, 12))
        stranger.greet(preface, fds=[stranger.board.fd] * rng.randint(0, 3))
        stranger.socket.shutdown(socket.SHUT_WR)
        assert stranger.is_closed()
        stranger.close()


def test_random_bytes_after_the_greeting(
    bystander: Bystander, connect: Callable[[], Stranger]
) -> None:
    """Random frames, and real ones with some bytes changed, cut off or put in between."""
    rng, memory = random.Random(2), Pages()
    conversation = [
        protocol.Hello(1, "fuzz", "fuzz"),
        memory.register(2),
        protocol.Lookup(3, "r", tuple(bystander.keys)),
        protocol.Retrieve(4, 1, 0, (protocol.pack_block_ids(ids(range(8))),), 0, 0, 1),
        protocol.Store(5, b"", (b"k" * 32,), (protocol.pack_block_ids(ids(range(4))),), 0),
        protocol.EndRequest(6, "r"),
        protocol.GetStats(7),
    ]
    for _ in range(150):
        stranger = connect()
        stranger.greet()
        data = bytearray(b"".join(map(protocol.encode, conversation)))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 40)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 40))
                case 3:
                    data[at:at] = frame(rng.randbytes(rng.randint(0, 60)))
        stranger.send_bytes(bytes(data))
        stranger.socket.shutdown(socket.SHUT_WR)
        assert stranger.is_closed()
        stranger.close()


def test_random_values_in_well_formed_messages(
    bystander: Bystander, connect: Callable[[], Stranger]
) -> None:
    """Every field of every request, with values that its type allows and nobody expects."""
    rng, memory = random.Random(3), Pages()
    numbers = [0, 1, -1, 2, 3, 15, 16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]

    def number() -> int:
        return rng.choice(numbers)

    def block_ids() -> bytes:
        return rng.choice(
            [
                b"",
                b"abc",
                protocol.pack_block_ids(ids([rng.randint(-2, BLOCKS + 1) for _ in range(4)])),
                protocol.pack_block_ids(ids(rng.sample(range(BLOCKS), 4))),
            ]
        )

    def keys() -> tuple[bytes, ...]:
        return tuple(rng.choice([*bystander.keys, b"", b"short", rng.randbytes(32)]) for _ in "ab")

    def lists(length: int, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(rng.choice([length, length, rng.randint(0, 3)]))]

    def geometry() -> list[Any]:
        groups = lists(1, lambda: [rng.choice([16, 16, number()])])
        layers = lists(1, lambda: ["l", rng.choice([0, number()]), 1, rng.choice([512, number()])])
        return [rng.choice([64, 64, number()]), groups, layers]

    def page_map() -> list[Any]:
        plane = [0, rng.choice([0, number()]), rng.choice([512, number()])]
        return [lists(1, lambda: rng.choice([BLOCKS, number()])), lists(1, lambda: [plane])]

    def region() -> list[Any]:
        return [rng.choice([memory.regions[0].handle, rng.randbytes(8), b""]), abs(number())]

    makers: list[Callable[[], list[Any]]] = [
        lambda: ["Hello", number(), "e" * rng.choice([0, 1, 200]), "l" * rng.choice([0, 300])],
        lambda: [
            "Register",
            number(),
            rng.choice(["host", ""]),
            geometry(),
            page_map(),
            lists(1, region),
        ],
        lambda: ["Lookup", number(), "r", keys()],
        lambda: [
            "Retrieve",
            number(),
            number(),
            number(),
            lists(1, block_ids),
            number(),
            number(),
            number(),
            rng.choice([None, number()]),
        ],
        lambda: ["Store", number(), rng.choice(keys()), keys(), lists(1, block_ids), number()],
        lambda: ["Cancel", number(), number()],
        lambda: ["EndLease", number(), number()],
        lambda: ["EndRequest", number(), rng.choice(["", "r", "bystander"])],
    ]
    for turn in range(150):
        stranger = connect()
        stranger.greet()
        stranger.send(protocol.Hello(1, f"fuzz {turn}", "fuzz"))
        if turn % 2:
            stranger.send(memory.register(2))
        for _ in range(12):
            stranger.send_bytes(frame(msgspec.msgpack.encode(rng.choice(makers)())))
        stranger.socket.shutdown(socket.SHUT_WR)
        assert stranger.is_closed()
        stranger.close()


# Messages at the wrong time.


@pytest.mark.parametrize(
    "message",
    [
        protocol.Lookup(5, "r", (b"k" * 32,)),
        protocol.EndLease(5, 1),
        protocol.EndRequest(5, "r"),
        protocol.Clear(5),
        Pages().register(5),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_request_before_hello(stranger: Stranger, message: protocol.Message) -> None:
    stranger.greet()
    assert_refused(stranger.ask(message), ErrorCode.BAD_REQUEST, "not said hello", "Send Hello")
    assert isinstance(stranger.ask(protocol.Hello(6, "late", "late")), protocol.Welcome)


def test_hello_is_said_once(guest: Stranger) -> None:
    reply = guest.ask(protocol.Hello(5, "other", "other"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "said hello before")


@pytest.mark.parametrize("name", ["", "e" * 129])
def test_an_engine_has_a_name_of_reasonable_length(stranger: Stranger, name: str) -> None:
    stranger.greet()
    reply = stranger.ask(protocol.Hello(5, name, "label"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "1 to 128 characters")


@pytest.mark.parametrize(
    "message",
    [
        protocol.Retrieve(5, 1, 0, (protocol.pack_block_ids(ids([0])),), 0, 0, 1),
        protocol.Store(5, b"", (b"k" * 32,), (protocol.pack_block_ids(ids(range(4))),), 0),
    ],
    ids=["retrieve", "store"],
)
def test_a_transfer_before_register(guest: Stranger, message: protocol.Message) -> None:
    assert_refused(guest.ask(message), ErrorCode.NOT_REGISTERED, "no KV memory", "Register")


def test_a_worker_registers_once(worker_guest: Stranger, pages: Pages) -> None:
    reply = worker_guest.ask(pages.register(5))
    assert_refused(reply, ErrorCode.ALREADY_REGISTERED, "before", "Register once")
    assert isinstance(worker_guest.ask(protocol.Ping(6)), protocol.Pong)


# KV memory that cannot be served.


def test_an_arena_smaller_than_one_chunk(guest: Stranger) -> None:
    pages = Pages(small_geometry(layers=2, page_bytes=256 << 10))
    reply = guest.ask(pages.register(5))
    assert_refused(reply, ErrorCode.BAD_GEOMETRY, "one chunk takes 2097152 bytes", "--arena")


def test_a_client_is_told_that_the_arena_is_smaller_than_one_chunk(
    bystander: Bystander, socket_path: Path
) -> None:
    with pytest.raises(RequestRefusedError, match=r"the arena has 1048576.*--arena"):
        PageWorker(socket_path, small_geometry(layers=2, page_bytes=256 << 10))


def test_another_chunk_size_than_the_servers(guest: Stranger) -> None:
    geometry = Geometry(128, GEOMETRY.groups, GEOMETRY.layers)
    reply = guest.ask(Pages(geometry).register(5))
    assert_refused(reply, ErrorCode.BAD_GEOMETRY, "have 128 tokens", "64", "--chunk-tokens")


def test_a_block_size_that_does_not_divide_the_chunk(guest: Stranger) -> None:
    with pytest.raises(GeometryError, match="block size 24 of group 0 does not divide the chunk"):
        Geometry(64, (Group(24),), GEOMETRY.layers)
    layers = [["l", 0, 1, 512]]
    register = ["Register", 5, "host", [64, [[24]], layers], [[16], [[[0, 0, 512]]]], []]
    guest.send_bytes(frame(msgspec.msgpack.encode(register)))
    reply = guest.receive()
    assert_refused(reply, ErrorCode.MALFORMED, "block size 24", "does not divide", "multiple")


def test_pages_outside_their_region_or_over_each_other(guest: Stranger, pages: Pages) -> None:
    planes = list(pages.page_map.planes)
    beyond = PageMap((BLOCKS,), (*planes[:-1], (PlanePages(0, pages.memory.nbytes - 512, 512),)))
    twice = PageMap((BLOCKS,), (*planes[:-1], planes[0]))
    nowhere = PageMap((BLOCKS,), (*planes[:-1], (PlanePages(7, 0, 512),)))
    for number, (page_map, word) in enumerate(
        [(beyond, "ends at byte"), (twice, "overlap"), (nowhere, "region 7 of 1")]
    ):
        register = protocol.Register(5 + number, "host", GEOMETRY, page_map, pages.regions)
        assert_refused(guest.ask(register), ErrorCode.BAD_GEOMETRY, word)
    assert isinstance(guest.ask(pages.register(9)), protocol.Registered)


def test_a_device_that_the_server_does_not_have(guest: Stranger, pages: Pages) -> None:
    register = protocol.Register(5, "abacus", GEOMETRY, pages.page_map, pages.regions)
    assert_refused(guest.ask(register), ErrorCode.BAD_REQUEST, "'abacus'", "host")


@pytest.mark.parametrize(
    ("handle", "word"),
    [(b"", "no host address"), (b"\0" * 8, "must keep"), (b"\xff" * 8, "address")],
    ids=["none", "unmapped", "beyond"],
)
def test_memory_that_is_not_there(guest: Stranger, pages: Pages, handle: bytes, word: str) -> None:
    regions = (protocol.Region(handle, pages.memory.nbytes),)
    register = protocol.Register(5, "host", GEOMETRY, pages.page_map, regions)
    assert_refused(guest.ask(register), ErrorCode.BAD_REQUEST, word)
    assert isinstance(guest.ask(pages.register(6)), protocol.Registered)


# Transfers that cannot be.


def retrieve(lease: int, blocks: Sequence[int] = range(8), **fields: Any) -> protocol.Retrieve:
    """A retrieve of the bystander's two chunks that would work but for `fields`."""
    packed = (protocol.pack_block_ids(ids(blocks)),)
    message = protocol.Retrieve(20, lease, 0, packed, slot=3, base=0, layers_per_slice=1)
    return msgspec.structs.replace(message, **fields)


def lease_of(guest: Stranger, bystander: Bystander) -> int:
    found = guest.ask(protocol.Lookup(10, "r", tuple(bystander.keys)))
    assert isinstance(found, protocol.Found)
    assert found.chunks == 2
    return found.lease


@pytest.mark.parametrize(
    ("blocks", "fields", "word"),
    [
        ([0, 1, 2, 3, 4, 5, 6, BLOCKS], {}, "outside [0, 16)"),
        ([0, 1, 2, 3, 4, 5, 6, -1], {}, "outside [0, 16)"),
        ([0, 1, 2, 3, 4, 5, 6, 6], {}, "named twice"),
        (range(9), {}, "does not fit the 128 tokens"),
        ([], {}, "does not fit"),
        (range(8), {"start_tokens": 16}, "does not fit"),
        (range(4), {"start_tokens": 8}, "does not lie on blocks"),
        (range(4), {"start_tokens": -16}, "does not lie on blocks"),
        (range(8), {"block_ids": ()}, "0 groups"),
        (range(8), {"block_ids": (b"", b"")}, "2 groups"),
        (range(8), {"block_ids": (b"abc",)}, "multiple of 4"),
        (range(8), {"layers_per_slice": 0}, "0 layers a slice"),
        (range(8), {"layers_per_slice": 5}, "5 layers a slice does not fit 4 layers"),
        (range(8), {"slot": SLOTS}, "slot 8"),
        (range(8), {"slot": -1}, "slot -1"),
        (range(8), {"base": 2**32}, "32-bit"),
        (range(8), {"base": -1}, "32-bit"),
    ],
    ids=str,
)
def test_a_retrieve_that_cannot_be_is_refused_before_a_byte_is_written(
    bystander: Bystander,
    worker_guest: Stranger,
    pages: Pages,
    blocks: Sequence[int],
    fields: dict[str, Any],
    word: str,
) -> None:
    lease = lease_of(worker_guest, bystander)
    reply = worker_guest.ask(retrieve(lease, blocks, **fields))
    assert_refused(reply, ErrorCode.BAD_REQUEST, word)
    assert not pages.memory.any(), "it wrote all the same"
    done = worker_guest.ask(retrieve(lease))
    assert isinstance(done, protocol.Retrieved), "the lease is unharmed"
    assert done.status == 0
    assert pages.memory.any()


def test_an_unknown_lease_an_ended_one_and_somebody_elses(
    bystander: Bystander, worker_guest: Stranger, connect: Callable[[], Stranger]
) -> None:
    reply = worker_guest.ask(retrieve(12345))
    assert_refused(reply, ErrorCode.UNKNOWN_LEASE, "no lease 12345", "look the prompt up again")
    other = connect()
    other.greet()
    other.ask(protocol.Hello(1, "other engine", "other"))
    theirs = lease_of(other, bystander)
    assert_refused(worker_guest.ask(retrieve(theirs)), ErrorCode.UNKNOWN_LEASE, f"{theirs}")
    assert isinstance(worker_guest.ask(protocol.EndLease(30, theirs)), protocol.Done)
    assert bystander.server.gauges()["leases"] == 1, "it ended somebody else's lease"
    ours = lease_of(worker_guest, bystander)
    worker_guest.ask(protocol.EndLease(31, ours))
    assert_refused(worker_guest.ask(retrieve(ours)), ErrorCode.UNKNOWN_LEASE, f"{ours}")


def test_a_slot_or_a_request_id_that_is_in_use(
    bystander: Bystander, worker_guest: Stranger, pages: Pages
) -> None:
    lease = lease_of(worker_guest, bystander)
    bystander.server.device.loads.close()
    first = retrieve(lease, id=20, slot=3)
    worker_guest.send(first)
    bystander.server.device.loads.wait_until_held()
    reply = worker_guest.ask(retrieve(lease, id=21, slot=3))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "slot 3 belongs to a transfer in flight")
    reply = worker_guest.ask(retrieve(lease, id=20, slot=4))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "request id 20 is in use")
    store = protocol.Store(20, b"", (b"k" * 32,), (protocol.pack_block_ids(ids(range(4))),), 0)
    reply = worker_guest.ask(store)
    assert_refused(reply, ErrorCode.BAD_REQUEST, "request id 20 is in use")
    bystander.server.device.loads.open()
    done = worker_guest.receive()
    assert isinstance(done, protocol.Retrieved)
    assert (done.id, done.status) == (20, 0)
    assert worker_guest.board.landed(3) == 4


@pytest.mark.parametrize(
    ("keys", "blocks", "word"),
    [
        ((), range(4), "at least one key"),
        ((b"short",), range(4), "each of 32 bytes"),
        ((b"k" * 32, b"k" * 32), range(8), "named twice"),
        ((b"k" * 32,), range(3), "48 tokens"),
        ((b"k" * 32,), range(8), "does not fit the 64 tokens"),
        ((b"k" * 32,), [0, 1, 2, BLOCKS], "outside [0, 16)"),
        ((b"k" * 32,), [0, 1, 2, 2], "named twice"),
    ],
    ids=str,
)
def test_a_store_that_cannot_be(
    bystander: Bystander,
    worker_guest: Stranger,
    keys: tuple[bytes, ...],
    blocks: Sequence[int],
    word: str,
) -> None:
    packed = (protocol.pack_block_ids(ids(blocks)),)
    reply = worker_guest.ask(protocol.Store(20, b"", keys, packed, 0))
    assert_refused(reply, ErrorCode.BAD_REQUEST, word)
    assert bystander.server.gauges()["chunks"] == 2


@pytest.mark.parametrize("keys", [(), (b"",), (b"k" * 31,), (b"k" * 32,) * 2], ids=str)
def test_a_lookup_that_cannot_be(guest: Stranger, keys: tuple[bytes, ...]) -> None:
    assert_refused(guest.ask(protocol.Lookup(20, "r", keys)), ErrorCode.BAD_REQUEST, "key")


def test_chunks_of_another_geometry_are_not_loaded(bystander: Bystander, guest: Stranger) -> None:
    """Equal keys for different layouts are an engine's mistake; bytes do not fit."""
    pages = Pages(small_geometry(layers=2))
    guest.ask(pages.register(2))
    reply = guest.ask(retrieve(lease_of(guest, bystander)))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "another geometry", "namespace")
    assert not pages.memory.any()


def test_a_client_refuses_a_width_above_the_layer_count_and_loses_no_slot(
    bystander: Bystander,
) -> None:
    worker = bystander.worker
    with pytest.raises(SettingsError, match=r"is 5, but the model has 4 layers\. Use 1 to 4"):
        PageWorker(bystander.server.settings.socket, GEOMETRY, layerwise_overlap=5)
    result = worker.client.lookup("r", bystander.keys).wait(20)
    assert result is not None
    for width in (0, 5):
        with pytest.raises(GeometryError, match=f"width of {width} layers"):
            worker.client.retrieve("r", result.lease, 0, [ids(range(8, 16))], width)
    worker.client.end_request("r")
    assert worker.client._link is not None
    assert worker.client._link.transfers is not None
    assert len(worker.client._link.transfers._free_slots) == worker.client._link.board.slots


# Clients that do not read.


def test_a_client_that_never_reads_its_replies_costs_the_server_little_and_others_nothing(
    bystander: Bystander, guest: Stranger
) -> None:
    transports = bystander.server.server._transports
    (transport,) = (t for session, t in transports.items() if session.label == "guest")
    assert isinstance(transport, asyncio.Transport)
    requests = b"".join(protocol.encode(protocol.GetStats(number)) for number in range(1000))
    guest.socket.setblocking(False)

    def is_read_no_more() -> bool:
        with contextlib.suppress(BlockingIOError):
            guest.socket.send(requests)
        return not bystander.server.after_reading(transport.is_reading)

    eventually(is_read_no_more)
    bystander.check()
    assert transport.get_write_buffer_size() < 16 << 20
    guest.socket.setblocking(True)
    for _ in range(1000):
        assert isinstance(guest.receive(), protocol.Stats)
    eventually(lambda: bystander.server.on_loop(transport.is_reading))


def test_a_server_stops_while_somebody_does_not_read(socket_path: Path) -> None:
    server = ServerThread(socket_path, arena_bytes=1 << 20)
    stranger = Stranger(socket_path)
    try:
        stranger.greet()
        stranger.socket.settimeout(0.2)
        requests = b"".join(protocol.encode(protocol.GetStats(number)) for number in range(1000))
        with contextlib.suppress(TimeoutError):
            while True:
                stranger.socket.sendall(requests)
        server.stop()
    finally:
        stranger.close()


# No permission.


def forbid_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_between(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("lamina.devices.host.copy_between", copy_between)


def test_a_worker_whose_memory_may_not_be_copied_is_told_why_and_what_to_do(
    bystander: Bystander, guest: Stranger, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        forbid_copies(patch)
        reply = guest.ask(pages.register(2))
    assert_refused(reply, ErrorCode.COPY_DENIED, "forbids", "ptrace_scope", "CAP_SYS_PTRACE")
    assert isinstance(guest.ask(pages.register(3)), protocol.Registered)


def test_copies_that_become_forbidden_fail_their_transfers_alone(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, keys = bystander.worker, random_keys(1)
    with monkeypatch.context() as patch:
        forbid_copies(patch)
        retrieve = worker.load("r", bystander.keys, range(8, 16))
        worker.wait(lambda: retrieve.is_acknowledged)
        store = worker.save(keys, range(4))
    assert retrieve.outcome is TransferStatus.COPY_FAILED
    assert store.ended is not None
    assert (store.ended.status, store.ended.stored) == (TransferStatus.COPY_FAILED, 0)
    assert worker.client.lookup("s", keys).wait(20) == MISS


def test_the_kernels_own_refusal_is_explained(socket_path: Path) -> None:
    """A server without CAP_SYS_PTRACE, and an engine that is not dumpable: root or not, EPERM."""
    servers: list[ServerProcess] = []

    def start_without_capability() -> None:
        _prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)  # of this thread, so of its children only
        servers.append(ServerProcess(socket_path, "--arena", "1MiB", "--chunk-tokens", "64"))

    thread = threading.Thread(target=start_without_capability)
    thread.start()
    thread.join()
    servers[0].wait_until_serving()
    _prctl(_PR_SET_DUMPABLE, 0)
    try:
        with pytest.raises(RequestRefusedError, match=r"forbids copies.*ptrace_scope") as refusal:
            PageWorker(socket_path, GEOMETRY, BLOCKS)
        assert refusal.value.code is ErrorCode.COPY_DENIED
        connected_client(socket_path).close()  # lookups and commands need no permission
    finally:
        _prctl(_PR_SET_DUMPABLE, 1)
        servers[0].stop()


_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _CAP_SYS_PTRACE = 4, 24, 19


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def test_a_peer_of_another_user_is_turned_away(
    connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory keeps others out already; this is the second lock."""

    def peer_of_another(sock: socket.socket) -> Peer:
        return peer_of(sock)._replace(uid=os.geteuid() + 1)

    with monkeypatch.context() as patch:
        patch.setattr("lamina.server.listener.peer_of", peer_of_another)
        stranger = connect()
        stranger.greet()
        assert_refused(stranger.receive(), ErrorCode.FORBIDDEN, "user", "same user")
        assert stranger.is_closed()


# Settings.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lamina.layerwise_overlaps": 1}, ["lamina.layerwise_overlap?"]),
        ({"lamina.nonsense": 1}, ["no setting 'lamina.nonsense'"]),
        ({"lamina.layerwise_overlap": "many"}, ["'many'", "number of layers"]),
        ({"lamina.layerwise_overlap": -1}, ["-1", "number of layers"]),
        ({"lamina.layerwise_overlap": 1.5}, ["1.5", "number of layers"]),
        ({"lamina.layerwise_overlap": None}, ["None", "number of layers"]),
        ({"lamina.retrieve_timeout_ms": "soon"}, ["retrieve_timeout_ms"]),
        ({"lamina.retrieve_timeout_ms": 0}, ["retrieve_timeout_ms is 0", "at least 1"]),
        ({"lamina.suspect_after_ms": -5}, ["suspect_after_ms is -5", "at least 1"]),
        ({"lamina.chunk_tokens": 0}, ["chunk_tokens is 0", "at least 1"]),
        ({"lamina.socket": "/" + "s" * 200}, ["longer than 107 bytes", "shorter path"]),
        ({"lamina.socket": 7}, ["socket"]),
    ],
    ids=str,
)
def test_an_engines_settings_are_refused_with_the_reason(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as refusal:
        ClientSettings.parse({"other.setting": 1, **values})
    for word in words:
        assert word in str(refusal.value)
    assert refusal.value.remedy


# The command line.


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def assert_one_line_error(self, *words: str) -> None:
        assert self.code == 1, self
        assert self.out == ""
        assert self.err.startswith("lamina: ")
        assert self.err.count("\n") == 1, "an error is one line"
        for word in words:
            assert word in self.err, self


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a `lamina` command in this process; a server that starts all the same stops at once."""

    def run_and_stop(server: Server, ready: Callable[[], None] | None = None) -> Awaitable[None]:
        return serve(server, lambda: server.stop())

    serve = Server.run
    monkeypatch.setattr(Server, "run", run_and_stop)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["lamina", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert code is None or isinstance(code, int)
        return Said(code or 0, *capsys.readouterr())

    return run


def test_version(cli: Cli) -> None:
    assert cli("--version") == Said(0, f"{lamina.__version__}\n", "")


def test_status_and_clear(server: ServerThread, socket_path: Path, cli: Cli) -> None:
    worker = PageWorker(socket_path, GEOMETRY, BLOCKS)
    worker.save(random_keys(3), range(12))
    said = cli("status", "--socket", str(socket_path))
    assert said.code == 0
    assert "chunks" in said.out
    values = json.loads(cli("status", "--socket", str(socket_path), "--json").out)
    assert (values["chunks"], values["stores"], values["sessions"]) == (3, 1, 2)
    assert cli("clear", "--socket", str(socket_path)) == Said(0, "forgot 3 chunks\n", "")
    assert cli("clear", "--socket", str(socket_path)) == Said(0, "forgot 0 chunks\n", "")
    worker.close()


@pytest.mark.parametrize("command", ["status", "clear"])
@pytest.mark.parametrize("name", ["s", "[red]s", "[/red]"], ids=["plain", "markup", "end-markup"])
def test_commands_without_a_server_say_how_to_start_one(
    socket_path: Path, cli: Cli, command: str, name: str
) -> None:
    path = str(socket_path.parent / name)
    said = cli(command, "--socket", path)
    said.assert_one_line_error("no Lamina server answers", path, "`lamina serve`")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arena", "lots"], ["'lots' is not a size", "512MiB"]),
        (["--arena", "1KiB"], ["arena_bytes is 1024", "at least 4096"]),
        (["--arena", "999999TiB"], ["cannot be reserved", "smaller --arena"]),
        (["--chunk-tokens", "0"], ["chunk_tokens is 0"]),
        (["--lease-ttl-s", "-1"], ["lease_ttl_s is -1", "positive"]),
        (["--lease-ttl-s", "nan"], ["lease_ttl_s is nan", "positive"]),
        (["--host-link-gbps", "0"], ["host_link_gbps is 0", "positive"]),
        (["--http", "everywhere"], ["'everywhere' is not host:port"]),
        (["--http", "127.0.0.1:99999"], ["is not host:port"]),
        (["--http", "no.such.host.invalid:80"], ["no.such.host.invalid", "--http"]),
        (["--log-level", "loud"], ["'loud'", "INFO"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_a_malformed_server_setting_is_one_line(
    socket_path: Path, cli: Cli, options: list[str], words: list[str]
) -> None:
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB", *options)
    said.assert_one_line_error(*words)
    assert not socket_path.exists()


def test_a_socket_path_that_is_too_long(tmp_path: Path, cli: Cli) -> None:
    said = cli("serve", "--socket", str(tmp_path / ("s" * 108)))
    said.assert_one_line_error("longer than 107 bytes", "shorter path")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--arenas", "1MiB"], "--arena"),
        (["--chunk-tokens", "many"], "--chunk-tokens"),
        (["--lease-ttl-s", "long"], "--lease-ttl-s"),
    ],
    ids=str,
)
def test_an_unknown_option_is_a_usage_error(cli: Cli, options: list[str], word: str) -> None:
    said = cli("serve", *options)
    assert said.code == 2
    assert word in said.err


def test_a_second_server_on_the_same_socket_names_the_first(
    bystander: Bystander, socket_path: Path, cli: Cli
) -> None:
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error(f"(pid {os.getpid()})", str(socket_path), "another --socket")
    assert socket_path.exists(), "it took the socket away"


def test_a_runtime_directory_that_others_can_read(socket_path: Path, cli: Cli) -> None:
    socket_path.parent.mkdir(mode=0o755)
    socket_path.parent.chmod(0o755)
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error("not private", f"chmod 700 {socket_path.parent}")
    assert not socket_path.exists()


def test_a_runtime_directory_that_is_a_file(socket_path: Path, cli: Cli) -> None:
    socket_path.parent.write_text("not a directory")
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error("cannot be used", "another --socket")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_socket_is_not_taken_away(socket_path: Path, cli: Cli, kind: str) -> None:
    socket_path.parent.mkdir(mode=0o700)
    if kind == "file":
        socket_path.write_text("precious")
    else:
        socket_path.mkdir()
    said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB")
    said.assert_one_line_error(str(socket_path), "another --socket")
    assert socket_path.is_dir() or socket_path.read_text() == "precious"


def test_an_http_port_that_is_taken(socket_path: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = cli("serve", "--socket", str(socket_path), "--arena", "1MiB", "--http", address)
    said.assert_one_line_error(f"{address} cannot be served", "another --http")
    assert not socket_path.exists()


def test_errors_of_the_real_command_are_one_line_too(
    server: ServerThread, socket_path: Path
) -> None:
    command = [sys.executable, "-m", "lamina.cli", "serve", "--socket", str(socket_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = Said(ended.returncode, ended.stdout, ended.stderr)
    said.assert_one_line_error(f"(pid {os.getpid()})", "another --socket")


# The HTTP port.


@pytest.fixture
def url(socket_path: Path) -> Iterator[str]:
    server = ServerThread(socket_path, arena_bytes=1 << 20, http="127.0.0.1:0")
    assert server.server.http_address is not None
    host, port = server.server.http_address
    yield f"http://{host}:{port}"
    server.stop()


def get(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_status_and_health(url: str, socket_path: Path) -> None:
    worker = PageWorker(socket_path, GEOMETRY, BLOCKS)
    worker.save(random_keys(3), range(12))
    stranger = Stranger(socket_path)
    stranger.greet()
    stranger.ask(protocol.Clear(1))
    assert get(f"{url}/healthz") == (200, "ok\n")
    code, text = get(f"{url}/metrics")
    assert code == 200
    lines = text.splitlines()
    for line in (
        "lamina_chunks 3.0",
        "lamina_stores_total 1.0",
        'lamina_refused_total{code="bad_request"} 1.0',
    ):
        assert line in lines
    code, text = get(f"{url}/status")
    values = json.loads(text)
    assert (code, values["version"], values["chunks"]) == (200, lamina.__version__, 3)
    assert values["refused"] == {"bad_request": 1}
    stranger.close()
    worker.close()


def test_nonsense_on_the_http_port(url: str, socket_path: Path) -> None:
    assert get(f"{url}/nonsense")[0] == 404
    assert get(f"{url}/metrics", "POST")[0] == 405
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(random.Random(4).randbytes(1000) + b"\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    with socket.create_connection((host, int(port))):
        assert get(f"{url}/healthz") == (200, "ok\n")
        connected_client(socket_path).close()
