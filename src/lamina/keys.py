"""What a chunk is called: namespaces and prefix-chained keys.

A chunk's key is `sha256(parent key ‖ its tokens ‖ its extras)`; the first parent is the namespace.
Equal keys therefore mean equal models, layouts, salts and prefixes. Keys never depend on the
process that computed them: no Python `hash`, no engine's own block hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from lamina.errors import LaminaError, UsageError

KEY_BYTES = 32
FORMAT = b"lamina namespace 2"

Tokens = Sequence[int] | npt.NDArray[np.integer]


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the tokens on which a chunk's bytes depend.

    `model` is the model's configuration with all overrides, or a digest of it; `weights` tells the
    weights by content; `scales` the KV scales as they were loaded; `geometry` is a
    `Geometry.digest`, `layout` how bytes lie in a page, `backend` the attention backend's family,
    `ranks` the parallel layout. `adapter` is a request's LoRA adapter by content, `salt` keeps
    tenants apart; `epoch` is another one after the weights changed or all was to be forgotten.
    """

    model: str
    weights: str
    dtype: str
    geometry: bytes
    layout: str = ""
    backend: str = ""
    ranks: str = ""
    scales: str = ""
    adapter: str = ""
    salt: str = ""
    epoch: str = ""

    @property
    def seed(self) -> bytes:
        """The parent of every first chunk, `KEY_BYTES` long. Raises `UsageError` for a field that
        has no bytes: text with lone surrogates, another type."""
        fields = _encoded("namespace", msgspec.structs.asdict(self))
        return hashlib.sha256(FORMAT + fields).digest()


class Extra(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Something besides its tokens that a chunk depends on: a multimodal item that overlaps it
    (`kind` "mm", its content identifier, its offset in tokens relative to the chunk)."""

    kind: str
    identifier: str
    offset: int = 0


class KeyChain:
    """The chunk keys of one token sequence, extended as tokens arrive."""

    def __init__(self, namespace: Namespace, chunk_tokens: int) -> None:
        self._seed = namespace.seed
        self._chunk_tokens = chunk_tokens
        self.keys: list[bytes] = []

    def extend(self, tokens: Tokens, extras: dict[int, list[Extra]] | None = None) -> list[bytes]:
        """Compute the keys of all full chunks of `tokens` (the sequence from its very start).

        Only chunks not yet in `keys` are hashed. `extras` maps a chunk's index to what else it
        depends on. Returns `keys`. Raises `LaminaError` for a token id outside [0, 2**32), and
        `UsageError` for extras that have no bytes.
        """
        done = len(self.keys)
        full = len(tokens) // self._chunk_tokens
        if full <= done:
            return self.keys
        new = _checked(tokens[done * self._chunk_tokens : full * self._chunk_tokens])
        chunks = new.reshape(full - done, self._chunk_tokens)
        for index, chunk in enumerate(chunks, start=done):
            parent = self.keys[-1] if self.keys else self._seed
            digest = hashlib.sha256(parent + chunk.tobytes())
            if extras and (found := extras.get(index)):
                digest.update(_encoded("chunk's extras", sorted(found)))
            self.keys.append(digest.digest())
        return self.keys


def _encoded(what: str, value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value, order="sorted")
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise UsageError(
            f"a {what} cannot be hashed: {error}", "Give valid Unicode text, without surrogates"
        ) from error


def _checked(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Token ids as they are hashed."""
    try:
        ids = np.asarray(tokens)
        if ids.dtype.kind in "iu" and int(ids.min()) >= 0 and int(ids.max()) < 2**32:
            return ids.astype("<u4")
    except (OverflowError, ValueError):
        pass  # too large even to look at, or no numbers at all
    raise LaminaError("a token id is outside [0, 2**32)", "Send token ids, not embeddings")


def chunk_keys(namespace: Namespace, chunk_tokens: int, tokens: Tokens) -> list[bytes]:
    """Keys of all full chunks of `tokens`, in order."""
    return KeyChain(namespace, chunk_tokens).extend(tokens)
