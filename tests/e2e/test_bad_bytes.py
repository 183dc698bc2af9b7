"""Greetings that are none, bytes that are no messages, clients that do not read: one clear error
where there is somebody to tell, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import protocol
from lamina.board import Board
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ErrorCode, RequestRefusedError
from lamina.settings import ClientSettings
from lamina_lab.known.content import ids
from tests.e2e.strangers import (
    BLOCKS,
    SLOTS,
    Bystander,
    Pages,
    Stranger,
    assert_refused,
    frame,
    open_fds,
)
from tests.support.server import ServerThread
from tests.support.wait import eventually

# The greeting.


@pytest.mark.parametrize(
    ("preface", "code", "words"),
    [
        (
            protocol.MAGIC + struct.pack("<I", protocol.VERSION + 1),
            ErrorCode.VERSION,
            [f"protocol {protocol.VERSION + 1}", "same Lamina"],
        ),
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
    with pytest.raises(RequestRefusedError, match="speaks protocol 9") as refusal:
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
        protocol.Retrieve(4, 8, 1, 0, (protocol.pack_block_ids(ids(range(8))),), 0, 0, 1),
        protocol.Store(5, 9, b"", (b"k" * 32,), (protocol.pack_block_ids(ids(range(4))),), 0),
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
