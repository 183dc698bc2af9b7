"""What an engine's calls may carry, looked at before anything is sent: a mistake ends the call that
makes it, and neither the connection nor another request.

They run in every call: a few microseconds at 1,000 blocks. What takes longer to find (a block that
is out of range or named twice), and what only the server knows, it refuses: see `Retrieve.refusal`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from lamina.errors import GeometryError, UsageError
from lamina.geometry import BlockIds, Geometry, PageMap, check_block_ids
from lamina.keys import KEY_BYTES

_INT32 = np.dtype(np.int32)


def check_name(what: str, name: str) -> None:
    """Raise `UsageError` unless `name` is text that can be sent."""
    if not isinstance(name, str):
        raise UsageError(
            f"{what} {name!r:.80} is of type {type(name).__name__}", "Give it as a str"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} {name!r:.80} is no valid Unicode text", "Leave lone surrogates out"
        ) from error


def checked_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys of chunks. Raises `UsageError` for anything else."""
    checked = tuple(keys)
    try:
        nbytes = len(b"".join(checked))  # much faster than to look at each
    except TypeError:
        nbytes = -1
    if nbytes != KEY_BYTES * len(checked):
        raise UsageError(
            f"the keys {keys!r:.80} are not all bytes of length {KEY_BYTES}",
            "Compute them with lamina.client.KeyChain",
        )
    return checked


def check_parent(parent: bytes) -> None:
    """Raise `UsageError` unless `parent` is a key, or empty as at the start of a prompt."""
    if not isinstance(parent, bytes) or len(parent) not in (0, KEY_BYTES):
        raise UsageError(
            f"the parent {parent!r:.80} is no key",
            'Give the key of the chunk before the first one, or b"" at the start of a prompt',
        )


def checked_number(what: str, number: int) -> int:
    """`number` as Python's int. Raises `UsageError` for what is no integer."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise UsageError(
            f"{what} {number!r:.80} is of type {type(number).__name__}", "Give it as an int"
        ) from error


def checked_blocks(block_ids: Sequence[BlockIds], groups: int) -> list[BlockIds]:
    """Block ids as int32 arrays, one a group; other integers are converted.

    Raises `GeometryError` for another number of groups, for what is no one-dimensional array of
    integers, and for a number beyond 32 bits.
    """
    arrays = [_int32(ids) for ids in block_ids]
    if len(arrays) != groups:
        raise GeometryError(
            f"block ids for {len(arrays)} groups, but the geometry has {groups}",
            "Give a list with one array of block ids per group",
        )
    return arrays


def check_placed_blocks(
    geometry: Geometry,
    page_map: PageMap,
    start_tokens: int,
    block_ids: Sequence[BlockIds],
    chunks: int | None = None,
) -> None:
    """What the server looks at where it copies into pages, for an engine that places them itself:
    a retrieve's blocks, or a store's of so many chunks. Raises `GeometryError`."""
    tokens = len(block_ids[0]) * geometry.groups[0].block_tokens
    covered = start_tokens + tokens if chunks is None else chunks * geometry.chunk_tokens
    check_block_ids(geometry, page_map, start_tokens, covered, block_ids)
    if chunks is not None and tokens != covered:
        raise GeometryError(
            f"blocks for {tokens} tokens, but {chunks} chunks have {covered}", "Store full chunks"
        )


def _int32(ids: BlockIds) -> BlockIds:
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise GeometryError(
            f"the block ids {ids!r:.80} of a group are no one-dimensional array of integers",
            "Give a list with one array of block ids per group",
        )
    if given.dtype == _INT32:
        return given
    narrow = given.astype(np.int32)
    if (narrow != given).any():
        raise GeometryError("a block id does not fit into 32 bits", "Give those of the KV memory")
    return narrow
