"""The wire: every message there and back, frames in any pieces, garbage refused as such."""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina import protocol
from lamina.errors import ErrorCode, UsageError
from lamina.frames import FrameBuffer
from lamina.geometry import Geometry, Group, Layer, PageMap, PlanePages
from lamina.protocol import (
    MAX_FRAME_BYTES,
    REPLY_OF,
    MalformedError,
    Message,
    decode_reply,
    decode_request,
    encode,
)
from lamina.shards import Shard

REQUESTS: tuple[type[Message], ...] = typing.get_args(protocol.Request)
REPLIES: tuple[type[Message], ...] = typing.get_args(protocol.Reply)
HEADER_BYTES = protocol.FRAME_HEADER_BYTES

integers = st.integers(-(2**63), 2**64 - 1)
geometries = st.builds(
    Geometry,
    st.just(24),
    st.tuples(st.builds(Group, st.sampled_from([1, 2, 3, 24]))),
    st.lists(
        st.builds(Layer, st.text(max_size=5), st.just(0), st.integers(1, 2), st.integers(1, 2**40)),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
planes = st.lists(st.builds(PlanePages, integers, integers, integers), max_size=2).map(tuple)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: integers,
    float: st.floats(allow_nan=False),
    int | None: st.none() | integers,
    protocol.RingPlace | None: st.none()
    | st.builds(protocol.RingPlace, integers, integers, integers, integers),
    Shard: st.builds(
        lambda numbers, replicas: Shard(min(numbers), max(numbers) + 1, 0, replicas),
        st.lists(st.integers(0, 30), min_size=1, max_size=3),
        st.integers(1, 30),
    ),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    tuple[bytes, ...]: st.lists(st.binary(max_size=40), max_size=4).map(tuple),
    dict[str, int | float]: st.dictionaries(
        st.text(max_size=8), integers | st.floats(allow_nan=False), max_size=4
    ),
    dict[str, int]: st.dictionaries(st.text(max_size=8), integers, max_size=4),
    tuple[protocol.EngineStats, ...]: st.lists(
        st.builds(
            protocol.EngineStats,
            st.text(max_size=8),
            st.text(max_size=8),
            integers,
            st.text(max_size=8),
            integers,
        ),
        max_size=3,
    ).map(tuple),
    ErrorCode: st.sampled_from(ErrorCode),
    Geometry: geometries,
    PageMap | None: st.none()
    | st.builds(
        PageMap, st.lists(integers, max_size=2).map(tuple), st.lists(planes, max_size=3).map(tuple)
    ),
    tuple[protocol.Region, ...]: st.lists(
        st.builds(protocol.Region, st.binary(max_size=70), integers), max_size=3
    ).map(tuple),
}
"""A strategy for the type of every field on the wire."""


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: VALUES[hints[name]] for name in kind.__struct_fields__})


requests = st.one_of([messages(kind) for kind in REQUESTS])
replies = st.one_of([messages(kind) for kind in REPLIES])


def body_of(message: Message) -> bytes:
    return encode(message)[HEADER_BYTES:]


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_every_request_is_decoded_as_it_was_encoded(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages(kind))
    assert decode_request(body_of(message)) == message
    assert decode_request(memoryview(body_of(message))) == message


@pytest.mark.parametrize("kind", REPLIES, ids=lambda kind: kind.__name__)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_every_reply_is_decoded_as_it_was_encoded(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode_reply(body_of(message)) == message


def test_every_request_has_one_kind_of_reply() -> None:
    assert set(REPLY_OF) == set(REQUESTS)
    assert set(REPLY_OF.values()) | {protocol.ErrorReply} == set(REPLIES)
    assert not set(REQUESTS) & set(REPLIES)


def test_a_reply_is_no_request_and_a_request_no_reply() -> None:
    with pytest.raises(MalformedError):
        decode_request(body_of(protocol.Pong(1)))
    with pytest.raises(MalformedError):
        decode_reply(body_of(protocol.Ping(1)))


def test_the_bytes_of_an_error_reply_never_change() -> None:
    golden = b"(\0\0\0\x95\xaaErrorReply\x07\xabbad_request\xa3why\xaawhat to do"
    message = protocol.ErrorReply(7, ErrorCode.BAD_REQUEST, "why", "what to do")
    assert encode(message) == golden
    assert decode_reply(golden[HEADER_BYTES:]) == message


def test_the_names_of_error_codes_on_the_wire_never_change() -> None:
    assert {code.value for code in ErrorCode} >= {
        "version",
        "malformed",
        "forbidden",
        "not_registered",
        "already_registered",
        "bad_geometry",
        "bad_board",
        "unknown_lease",
        "bad_request",
        "copy_denied",
        "stopping",
        "internal",
    }


def test_the_preface_is_magic_and_a_little_endian_version_for_ever() -> None:
    assert protocol.PREFACE_BYTES == 8
    assert protocol.preface() == b"LMNA" + struct.pack("<I", protocol.VERSION)
    assert protocol.preface_version(b"LMNA\x01\x00\x00\x00") == 1
    assert protocol.preface_version(b"LMNA\x04\x03\x02\x01") == 0x01020304


@pytest.mark.parametrize("data", [b"", b"LMNA", b"LMNA\1\0\0", b"LMNA\1\0\0\0\0", b"lmna\1\0\0\0"])
def test_other_first_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError, match="not the first bytes of a Lamina connection"):
        protocol.preface_version(data)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 300), max_size=12))
def test_frames_come_out_whole_and_in_order_however_the_bytes_arrive(
    bodies: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    frames = FrameBuffer()
    out, start = [], 0
    for cut in [*sorted(cuts), len(stream)]:
        out += frames.feed(stream[start:cut])
        start = max(start, cut)
    assert out == bodies
    assert frames.feed(struct.pack("<I", 1)) == []
    assert frames.feed(b"x") == [b"x"], "bytes were left behind"


def test_frames_that_arrive_byte_by_byte_come_out_with_their_last_byte() -> None:
    frames = FrameBuffer()
    stream = encode(protocol.Ping(1)) + encode(protocol.Ping(2))
    ends = [len(frames.feed(stream[i : i + 1])) for i in range(len(stream))]
    assert [i + 1 for i, count in enumerate(ends) if count] == [len(stream) // 2, len(stream)]


@pytest.mark.parametrize("nbytes", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_giant_frame_is_refused_at_its_header_before_any_of_it_is_kept(nbytes: int) -> None:
    with pytest.raises(MalformedError, match=f"a frame of {nbytes} bytes"):
        FrameBuffer().feed(struct.pack("<I", nbytes))


def test_the_largest_frame_is_taken() -> None:
    body = bytes(MAX_FRAME_BYTES)
    assert FrameBuffer().feed(struct.pack("<I", len(body)) + body) == [body]


def test_a_message_too_large_for_a_frame_is_refused_and_the_largest_is_not() -> None:
    fixed = len(body_of(protocol.Lookup(1, "r", (bytes(MAX_FRAME_BYTES // 2),)))) - (
        MAX_FRAME_BYTES // 2
    )
    largest = protocol.Lookup(1, "r", (bytes(MAX_FRAME_BYTES - fixed),))
    assert len(encode(largest)) == HEADER_BYTES + MAX_FRAME_BYTES
    with pytest.raises(UsageError, match=f"{MAX_FRAME_BYTES} are allowed"):
        encode(protocol.Lookup(1, "r", (bytes(MAX_FRAME_BYTES - fixed + 1),)))


def only_malformed(body: bytes) -> None:
    """Both decoders give a message or `MalformedError`."""
    for decode in (decode_request, decode_reply):
        try:
            message = decode(body)
        except MalformedError:
            continue
        assert isinstance(message, Message)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.binary(max_size=60))
def test_random_bytes_are_malformed_at_worst(body: bytes) -> None:
    only_malformed(body)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.one_of(requests, replies),
    st.lists(
        st.tuples(st.sampled_from("rdi"), st.integers(0, 200), st.integers(0, 255)),
        min_size=1,
        max_size=4,
    ),
)
def test_a_mutated_message_is_malformed_at_worst(
    message: Message, mutations: list[tuple[str, int, int]]
) -> None:
    body = bytearray(body_of(message))
    for how, where, byte in mutations:
        where %= len(body) + 1
        if how == "r":
            body[where : where + 1] = bytes([byte])
        elif how == "d":
            del body[where : where + 1 + byte % 3]
        else:
            body[where:where] = bytes([byte])
    only_malformed(bytes(body))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.one_of(requests, replies), st.integers(0, 300))
def test_a_truncated_message_is_malformed(message: Message, kept: int) -> None:
    body = body_of(message)
    for decode in (decode_request, decode_reply):
        with pytest.raises(MalformedError):
            decode(body[: min(kept, len(body) - 1)])


values = st.recursive(
    st.none()
    | st.booleans()
    | integers
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.just(msgspec.msgpack.Ext(1, b"x")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.one_of(integers, st.text(max_size=3)), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(st.sampled_from([*REQUESTS, *REPLIES]), st.lists(values, max_size=7))
def test_fields_of_any_type_are_malformed_at_worst(kind: type[Message], fields: list[Any]) -> None:
    only_malformed(msgspec.msgpack.encode([kind.__name__, *fields]))


@pytest.mark.parametrize(
    "geometry",
    [
        [64, [], []],
        [64, [[48]], [["l", 0, 1, 8]]],
        [64, [[0]], [["l", 0, 1, 8]]],
        [64, [[16]], [["l", 7, 1, 8]]],
        [2**64 - 1, [[2**64 - 1]], [["l", 0, 0, 0]]],
    ],
)
def test_a_geometry_that_does_not_add_up_is_malformed(geometry: list[Any]) -> None:
    register = ["Register", 1, "host", geometry, [[1], []], []]
    with pytest.raises(MalformedError):
        decode_request(msgspec.msgpack.encode(register))


@pytest.mark.parametrize("make", [lambda n: b"\x91" * n, lambda n: b"\x81\xa1k" * n])
def test_endless_nesting_is_malformed(make: Callable[[int], bytes]) -> None:
    only_malformed(make(100_000))
    only_malformed(b"\x93\xa5Stats\x01" + make(100_000))
    only_malformed(b"\x93\xa4Ping\x01" + make(100_000))  # one more field than there is


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_length_that_promises_more_than_there_is_allocates_nothing(head: bytes) -> None:
    """Were it believed, the array of 2**32 items would be 32 GiB."""
    for body in (head, b"\x94\xa6Lookup\x01\xa1r" + head, b"\x93\xa5Stats\x01" + head):
        with pytest.raises(MalformedError):
            decode_request(body)
        with pytest.raises(MalformedError):
            decode_reply(body)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_block_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    packed = protocol.pack_block_ids(np.array(ids, np.int32))
    assert packed == struct.pack(f"<{len(ids)}i", *ids)
    unpacked = protocol.unpack_block_ids(packed)
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == ids


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5])
def test_block_ids_that_end_inside_a_number_are_malformed(nbytes: int) -> None:
    with pytest.raises(MalformedError, match="not a multiple of 4"):
        protocol.unpack_block_ids(bytes(nbytes))
