"""Every message between an engine and the server, and how messages are framed.

A connection is a Unix stream socket. The client first sends a *preface* (magic and protocol
version, `PREFACE_BYTES`) with its board's descriptor attached, then frames. A frame is a
little-endian u32 length and that many bytes of MessagePack. Every request carries an `id` that the
client chooses and gets exactly one reply with that id: the type that `REPLY_OF` names, or
`ErrorReply`. Replies may come in any order.

`PREFACE`, the frame header and `ErrorReply` never change, so that two versions can always tell
each other that they differ. Everything else may change with `VERSION`.
"""

from __future__ import annotations

import struct
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from lamina.errors import ErrorCode, LaminaError, UsageError
from lamina.geometry import BlockIds, Geometry, PageMap
from lamina.shards import ALONE, Shard

_Message = TypeVar("_Message")

VERSION = 7
MAGIC = b"LMNA"
_PREFACE = struct.Struct("<4sI")
_FRAME = struct.Struct("<I")
PREFACE_BYTES = _PREFACE.size
FRAME_HEADER_BYTES = _FRAME.size
MAX_FRAME_BYTES = 8 << 20
"""Bounds what a peer can make the other side allocate; a retrieve of 2 GiB takes 128 KiB."""
MAX_LABEL_CHARS = 256
"""Of what is for people only: an engine's label, its model's name."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: int


class Hello(Message, frozen=True):
    """Opens a connection. `engine` is a random name shared by one engine's connections; it is the
    engine's identity and kept secret. `label` and `model`, its model's name, are for people."""

    engine: str
    label: str
    model: str = ""


class Welcome(Message, frozen=True):
    """`lease_ttl_s` is how long an unused lease lasts; `server_clock_ns` the server's monotonic
    clock, which heartbeats are read against; `session` names this connection to `EndSession`."""

    server_version: str
    chunk_tokens: int
    lease_ttl_s: float
    server_clock_ns: int
    session: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One exported allocation. `handle` means something to the worker's device only."""

    handle: bytes
    nbytes: int


class Register(Message, frozen=True):
    """Makes the connection a worker's: its device, what its KV is and where it lies.

    Without a `page_map` the two `regions` are a ring for retrieves and one for stores (`records`),
    which is all that the server sees of the worker's memory; three slots of the board count their
    records then (`board.PLACED`, `GATHERED`, `DRAINED`). `description` is for the engine's other
    processes (`Workers`); the server does not look into it. Of an engine with several workers,
    each keeps a `shard` of every chunk; nothing moves before all shards have registered.
    """

    device: str
    geometry: Geometry
    page_map: PageMap | None
    regions: tuple[Region, ...]
    description: bytes = b""
    shard: Shard = ALONE


class Registered(Message, frozen=True):
    pass


class Workers(Message, frozen=True):
    """Asks which workers the engine has at this server."""


class WorkersKnown(Message, frozen=True):
    """The descriptions of all connections of the asking one's engine that have registered and
    stand, in order of registration."""

    descriptions: tuple[bytes, ...]


class Lookup(Message, frozen=True):
    """Asks for the longest run of `keys`, from the first, that the server has.

    A lease that the same request already has is replaced.
    """

    request: str
    keys: tuple[bytes, ...]


class Found(Message, frozen=True):
    """`chunks` chunks are pinned under `lease` (0 when nothing was found)."""

    lease: int
    chunks: int


class RingPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where in its ring a transfer of so many `tokens` begins: the number of its first record, and
    the position from which its records are laid out. Neither is below the end of the transfer
    before. How it is `cut` into records both sides compute; a fingerprint is told, so that they
    cannot differ unnoticed."""

    tokens: int
    number: int
    position: int
    cut: int


class Retrieve(Message, frozen=True):
    """Copies leased chunks into the worker's pages, slice by slice; or into its ring.

    `transfer` names it: an unsigned number that the engine chooses, and that no other retrieve or
    store of the connection has that is not answered yet. `start_tokens` counts from the first
    leased chunk. `block_ids` are packed arrays, one a group. Slice `i` (from 0) is announced as
    `base + i + 1` on `slot`. With a `ticket`, nothing is copied before the board's ticket reaches
    it. In a ring, whole chunks are filled and no block is named; what is announced are records, and
    one that takes over the bytes of others is filled once the worker has placed these.
    """

    transfer: int
    lease: int
    start_tokens: int
    block_ids: tuple[bytes, ...]
    slot: int
    base: int
    layers_per_slice: int
    ticket: int | None = None
    ring: RingPlace | None = None


class Retrieved(Message, frozen=True):
    """A retrieve's end: nothing more will be written, slot and pages are the engine's.

    `status` is a `board.TransferStatus`. Times are from the server's receipt of the request:
    `first_slice_us` until the first slice was enqueued on a GPU's stream, or had landed in host
    memory; `total_us` until the last copy had taken effect.
    """

    status: int
    nbytes: int
    first_slice_us: int
    total_us: int


class Store(Message, frozen=True):
    """Copies consecutive full chunks out of the worker's pages.

    `transfer` names it, as a retrieve's does. `parent` is the key of the chunk before the first,
    empty at the start of a prompt. `block_ids` cover the chunks of `keys` exactly. Nothing is
    copied before the board's ticket reaches `ticket`, and nothing is found of it once the board
    says that stores up to `ticket` are void. From a ring, a record is copied once the worker has
    gathered it, no block is named, and the ticket is there for voiding alone.
    """

    transfer: int
    parent: bytes
    keys: tuple[bytes, ...]
    block_ids: tuple[bytes, ...]
    ticket: int
    ring: RingPlace | None = None


class Stored(Message, frozen=True):
    """A store's end: the pages are the engine's. Chunks were `stored`, already `present`, or
    `dropped` (no room, or their parent is gone). `status` is a `board.TransferStatus`; of a store
    that the engine has voided it is `CANCELLED`, and nothing was stored."""

    status: int
    stored: int
    present: int
    dropped: int


class Cancel(Message, frozen=True):
    """Gives up the connection's transfer of that number; one that is over or unknown is fine."""

    transfer: int


class Cancelled(Message, frozen=True):
    """Nothing more of that transfer will be read or written. Its own reply frees its number."""


class EndLease(Message, frozen=True):
    """The lease is not needed; unknown leases are fine, they may have run out."""

    lease: int


class EndRequest(Message, frozen=True):
    """The request has ended: its leases end, its retrieves in flight are cancelled."""

    request: str


class EndSession(Message, frozen=True):
    """Ends a former connection of the same engine, which the engine has lost, and is answered once
    nothing of it will be read or written any more.

    Refused for a session that another server process gave out: this one knows nothing of it.
    """

    session: int


class Done(Message, frozen=True):
    pass


class Ping(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    pass


class GetStats(Message, frozen=True):
    pass


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """One connection. `device` is empty and `registered_bytes` 0 without KV memory: a scheduler.
    `model` is empty when the engine named none."""

    label: str
    model: str
    pid: int
    device: str
    registered_bytes: int


class Stats(Message, frozen=True):
    """Counts and current values by name, typed errors sent by code, and who is connected; whoever
    asks is not counted."""

    version: str
    values: dict[str, int | float]
    refused: dict[str, int]
    engines: tuple[EngineStats, ...]


class Clear(Message, frozen=True):
    """Forgets every chunk that is not pinned or on its way."""


class Cleared(Message, frozen=True):
    chunks: int


class SetLogLevel(Message, frozen=True):
    """Changes what the server logs from now on: `level` is DEBUG, INFO, WARNING or ERROR."""

    level: str


class ErrorReply(Message, frozen=True):
    """The request failed: why, and what to do about it. Its layout never changes."""

    code: ErrorCode
    cause: str
    remedy: str


Request: TypeAlias = (
    Hello | Register | Workers | Lookup | Retrieve | Store | Cancel | EndLease | EndRequest | Ping
    | GetStats | Clear | EndSession | SetLogLevel
)  # fmt: skip
Reply: TypeAlias = (
    Welcome | Registered | WorkersKnown | Found | Retrieved | Stored | Cancelled | Done | Pong
    | Stats | Cleared | ErrorReply
)  # fmt: skip

REPLY_OF: dict[type[Message], type[Message]] = {
    Hello: Welcome,
    Register: Registered,
    Workers: WorkersKnown,
    Lookup: Found,
    Retrieve: Retrieved,
    Store: Stored,
    Cancel: Cancelled,
    EndLease: Done,
    EndRequest: Done,
    EndSession: Done,
    Ping: Pong,
    GetStats: Stats,
    Clear: Cleared,
    SetLogLevel: Done,
}

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class MalformedError(Exception):
    """Bytes that are no message. The connection they came on cannot be used any more."""


def preface() -> bytes:
    """The first bytes of a connection."""
    return _PREFACE.pack(MAGIC, VERSION)


def preface_version(data: bytes) -> int:
    """The protocol version in a preface; raises `MalformedError` when it is none."""
    if len(data) != PREFACE_BYTES or not data.startswith(MAGIC):
        raise MalformedError("these are not the first bytes of a Lamina connection")
    version: int = _PREFACE.unpack(data)[1]
    return version


def encode(message: Message) -> bytes:
    """One frame. Raises `UsageError` for what cannot be sent: text with lone surrogates, numbers
    beyond 64 bits, other types than the fields', and more than fits into a frame."""
    kind = type(message).__name__
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise UsageError(f"a {kind} cannot be sent: {error}", "Correct what it names") from error
    if len(body) > MAX_FRAME_BYTES:
        raise UsageError(
            f"a {kind} has {len(body)} bytes; {MAX_FRAME_BYTES} are allowed",
            "Send less at a time",
        )
    return _FRAME.pack(len(body)) + body


def check(request: Message) -> None:
    """Raise `UsageError` for a request that cannot be sent, or not be read at the other end."""
    try:
        decode_request(encode(request)[FRAME_HEADER_BYTES:])
    except MalformedError as error:
        kind = type(request).__name__
        raise UsageError(f"a {kind} cannot be read: {error}", "Correct what it names") from error


def decode_request(body: bytes | memoryview) -> Request:
    """Raises `MalformedError` for anything that is not a request; never anything else."""
    return _decode(_request_decoder, body)


def decode_reply(body: bytes | memoryview) -> Reply:
    """Raises `MalformedError` for anything that is not a reply; never anything else."""
    return _decode(_reply_decoder, body)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes | memoryview) -> _Message:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LaminaError) as error:
        raise MalformedError(str(error)) from error


def pack_block_ids(ids: BlockIds) -> bytes:
    """Block ids as they travel: little-endian int32."""
    return ids.astype("<i4", copy=False).tobytes()


def unpack_block_ids(packed: bytes) -> BlockIds:
    """The inverse; raises `MalformedError` for a length that is no multiple of four."""
    if len(packed) % 4:
        raise MalformedError(f"block ids in {len(packed)} bytes, not a multiple of 4")
    return np.frombuffer(packed, "<i4").astype(np.int32, copy=False)
