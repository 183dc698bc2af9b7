"""What a peer may ask for, and how much at a time: nobody's flood takes another's room.

Sizes are checked here before anything is computed from them. What exceeds a size is refused; what
exceeds a peer's share of the server is dropped where that costs only a later hit (stores, leases),
and refused as busy where somebody waits (retrieves).
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina import protocol
from lamina.board import RING_SLOTS, Board
from lamina.errors import ErrorCode, GeometryError, refuse
from lamina.geometry import MAX_BYTES, Geometry
from lamina.keys import KEY_BYTES
from lamina.records import shapes
from lamina.server.sessions import Session, Worker
from lamina.server.turns import Turns, each_part
from lamina.shards import Shard

MAX_KEYS = 1 << 16
"""Of one request: 16 million tokens with the default chunk."""
MAX_NAME_CHARS = 1024
"""Of a request's name, which users may choose."""
MAX_REGIONS = 1024
"""Allocations that a worker registers."""
MAX_DESCRIPTION_BYTES = 4096
"""Of a worker, for its engine's other processes: those of all sessions fit into one frame."""
MAX_LEASES = 8192
"""Per session. More requests than that wait for their turn as misses."""
MAX_LEASED_CHUNKS = 1 << 20
"""Of all leases of a session, 8 MiB of references."""
MAX_RETRIEVES = 1024
"""In flight per session; the client's boards have as many slots."""
MAX_RETRIEVED_BLOCKS = 1 << 24
"""Of all retrieves in flight of a session, 128 MiB of block ids: 2,000 prompts of 128k tokens."""
MAX_STORES = 256
"""In flight per session; more are dropped, which costs an engine nothing but a later hit."""
TRANSFER_TTL_S = 300.0
"""How long a transfer may take to end, waiting for its ticket included. Clients give up earlier:
this is for those that do not, so that nothing stays pinned or reserved for ever."""


def check_hello(request: protocol.Hello) -> None:
    """The names of an engine. Label and model go into the log, so they must be fit to print."""
    most = protocol.MAX_LABEL_CHARS
    if not 1 <= len(request.engine) <= 128 or max(len(request.label), len(request.model)) > most:
        raise refuse(
            f"an engine's name has 1 to 128 characters, its label and model at most {most}",
            "Shorten them",
        )
    if not (request.label + request.model).isprintable():
        raise refuse(
            "an engine's label or model has characters that cannot be printed", "Leave them out"
        )


def check_name(name: str) -> None:
    """The name of a request."""
    if len(name) > MAX_NAME_CHARS:
        raise refuse(f"the name of a request has {len(name)} characters", "Use a shorter one")


def check_keys(keys: tuple[bytes, ...]) -> Turns[None]:
    """The keys of consecutive chunks."""
    if len(keys) > MAX_KEYS:
        raise refuse(f"a request has {len(keys)} keys; {MAX_KEYS} are allowed", "Send the first")
    lengths: set[int] = set()
    distinct: set[bytes] = set()

    def look_at(part: Sequence[bytes]) -> None:
        lengths.update(map(len, part))
        distinct.update(part)

    yield from each_part(keys, look_at)
    if lengths != {KEY_BYTES}:
        raise refuse(
            f"a request needs at least one key, each of {KEY_BYTES} bytes",
            "Compute keys with lamina.keys",
        )
    if len(distinct) != len(keys):
        raise refuse("a key is named twice", "Send the keys of one prompt, in order")


def check_regions(request: protocol.Register) -> None:
    """How many allocations a worker has."""
    if len(request.regions) > MAX_REGIONS:
        raise refuse(
            f"the KV lies in {len(request.regions)} regions; {MAX_REGIONS} are allowed",
            "Export whole allocations",
        )


def check_chunk(geometry: Geometry, chunk_tokens: int, arena_bytes: int) -> None:
    """Whether an engine's chunks are those of a server; raises `GeometryError`."""
    if geometry.chunk_tokens != chunk_tokens:
        raise GeometryError(
            f"the engine's chunks have {geometry.chunk_tokens} tokens, the server's {chunk_tokens}",
            "Set both to the same --chunk-tokens",
        )
    if geometry.chunk_bytes > arena_bytes:
        raise GeometryError(
            f"one chunk takes {geometry.chunk_bytes} bytes, but the arena has {arena_bytes}",
            f"Start the server with an --arena of several times {geometry.chunk_bytes} bytes",
        )


def check_shard(
    shard: Shard, geometry: Geometry, workers: Sequence[Worker], arena_bytes: int
) -> None:
    """Whether a worker fits to the others of its engine; raises `GeometryError`."""
    columns = {shard.number: geometry.chunk_bytes}
    for other in workers:
        theirs = other.shard
        if (shard.shards, shard.replicas) != (theirs.shards, theirs.replicas):
            raise GeometryError(
                f"the worker is of an engine of {shard.shards} shards in {shard.replicas} "
                f"replicas, the engine's others are of {theirs.shards} in {theirs.replicas}",
                "Tell all workers of an engine the same, and each engine its own name",
            )
        if shard.number == theirs.number and geometry.digest != other.geometry.digest:
            raise GeometryError(
                f"another worker keeps shard {shard.number} with another geometry",
                "Register what replicas keep alike",
            )
        if (geometry.chunk_tokens, geometry.groups) != (
            other.geometry.chunk_tokens,
            other.geometry.groups,
        ):
            raise GeometryError(
                f"shards {shard.number} and {theirs.number} have other groups or chunks",
                "Use the same blocks in all workers of an engine",
            )
        columns[theirs.number] = other.geometry.chunk_bytes
    nbytes = sum(columns.values())
    if nbytes > arena_bytes:
        raise GeometryError(
            f"{len(columns)} shards of a chunk take {nbytes} bytes, the arena has {arena_bytes}",
            f"Start the server with an --arena of several times {nbytes} bytes",
        )


def check_description(description: bytes) -> None:
    """What a worker says of itself to its engine's other processes."""
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise refuse(
            f"the worker's description has {len(description)} bytes; "
            f"{MAX_DESCRIPTION_BYTES} are allowed",
            "Send what it describes by another way",
        )


def check_number(session: Session, number: int) -> None:
    """The number by which a session names its next transfer."""
    if number < 0:
        raise refuse(f"the transfer number {number} is negative", "Use numbers from 0 on")
    if number in session.transfers:
        raise refuse(
            f"the transfer number {number} is in use", "Use it again once that transfer is answered"
        )


def check_rings(geometry: Geometry, board: Board, sizes: Sequence[int]) -> None:
    """The regions of a worker without a page map; raises `GeometryError`."""
    if len(sizes) != 2 or max(sizes) > MAX_BYTES:
        raise GeometryError(
            f"rings of {', '.join(map(str, sizes))} bytes", "Give a retrieve ring and a store ring"
        )
    for nbytes in sizes:
        shapes(geometry, geometry.slices(1), 1, nbytes)
    if board.slots <= max(RING_SLOTS):
        raise GeometryError(
            f"a board of {board.slots} slots has none for rings", "Make a larger one"
        )


def check_slot(session: Session, request: protocol.Retrieve) -> None:
    """Where a retrieve is to be announced."""
    if not 0 <= request.slot < session.board.slots or not 0 <= request.base < 2**32:
        raise refuse(
            f"slot {request.slot} with base {request.base} is not on the board",
            f"Use slots below {session.board.slots} and 32-bit counts",
        )
    if request.ring is not None and request.slot in RING_SLOTS:
        raise refuse(f"slot {request.slot} counts a ring's records", "Use another slot")
    if request.slot in session.slots:
        raise refuse(f"slot {request.slot} belongs to a transfer in flight", "Use a free slot")


def check_retrieves(session: Session, blocks: int) -> None:
    """Whether a session may have one more retrieve in flight."""
    retrieves = len(session.slots)
    if retrieves >= MAX_RETRIEVES or session.blocks + blocks > MAX_RETRIEVED_BLOCKS:
        raise refuse(
            f"{retrieves} retrieves of {session.blocks} blocks are in flight already",
            "Wait until some have ended, or recompute",
            ErrorCode.BUSY,
        )


class StoreBudget:
    """How much of the arena stores on their way may reserve, so that none waits on another's
    ticket; and what they have, each session's and all together.

    A session may reserve as much as it leaves for all others: half of it alone, a third each when
    two do their worst.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        """By all sessions, those included that have ended and whose stores have not."""

    def chunks_for(self, session: Session, chunk_bytes: int) -> int:
        """How many chunks the session's next store may reserve."""
        own_bytes = session.reserved_bytes
        share_bytes = (self.capacity_bytes - self.reserved_bytes + own_bytes) // 2
        return max((share_bytes - own_bytes) // chunk_bytes, 0 if session.stores else 1)

    def reserve(self, session: Session, nbytes: int) -> None:
        """Count what a session's store may take of the arena from now on."""
        session.reserved_bytes += nbytes
        self.reserved_bytes += nbytes

    def give_back(self, session: Session, nbytes: int) -> None:
        """Count what it does not need, or does not reserve any more."""
        self.reserve(session, -nbytes)
