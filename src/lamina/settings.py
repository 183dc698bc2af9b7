"""Every user setting, validated once, with the reason when one is refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec

from lamina.errors import SettingsError

Overlap: TypeAlias = int | Literal["auto"]
AUTO: Final = "auto"
"""Chosen by what is known: `layerwise_overlap` by a policy, `data_path` by the pages."""
DataPath: TypeAlias = Literal["auto", "direct", "ring"]
WHOLE: Final = 0
"""`layerwise_overlap` of a whole transfer: one slice of all layers."""

DEFAULT_CHUNK_TOKENS = 256
MAX_SOCKET_PATH_BYTES = 107
"""`sockaddr_un` holds 108 bytes with the closing zero (unix(7))."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT](?:i?B?)|B)?", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {
    letter + rest: 2 ** (10 * power)
    for power, letter in enumerate("KMGT", start=1)
    for rest in ("", "I", "IB")  # a letter alone is binary, as `free` and `docker --memory` have it
}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
MIN_ARENA_BYTES = 4096


_Settings = TypeVar("_Settings", bound="ClientSettings")


def default_socket() -> Path:
    """`$LAMINA_SOCKET`, or `/tmp/lamina-UID/lamina.sock`: the same in every session of a user, so
    that engines and servers find each other however they were started."""
    named = os.environ.get("LAMINA_SOCKET")
    return Path(named) if named else Path(f"/tmp/lamina-{os.geteuid()}/lamina.sock")


class Share(float):
    """A part of a whole: above 0, at most 1."""

    def __str__(self) -> str:
        return f"{100 * self:g}%"


def parse_bytes(text: str) -> int:
    """`"8GiB"`, `"8Gi"` or `"8G"` → 8 · 2³⁰, `"8GB"` → 8 · 10⁹. Raises `SettingsError`."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise SettingsError(
            f"{text!r} is not a size", "Use a number with a unit, such as 512MiB or 8GiB"
        )
    nbytes = float(match[1]) * _UNITS[(match[2] or "B").upper()]
    if nbytes >= 2**63:
        raise SettingsError(f"{text!r} is more than any memory", "Use a smaller size")
    return int(nbytes)


def parse_arena(text: str) -> int | Share:
    """`"64GiB"` in bytes, or `"80%"` as a share. Raises `SettingsError`."""
    if match := _PERCENT.fullmatch(text.strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise SettingsError(f"{text!r} is no part of the memory", "Use for example 80%")
        return Share(share)
    nbytes = parse_bytes(text)
    if nbytes < MIN_ARENA_BYTES:
        raise SettingsError(
            f"an arena of {nbytes} bytes holds nothing", f"Use at least {MIN_ARENA_BYTES}"
        )
    return nbytes


def size_text(nbytes: int) -> str:
    """`"21.3 GiB"`: a size for people."""
    units = [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    for unit, name in units:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{nbytes} bytes"


def parse_counts(text: str) -> tuple[int, ...]:
    """`"1,8,32"` → (1, 8, 32). Raises `SettingsError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise SettingsError(f"{text!r} is no list of counts", "Use for example 1,8,32")
    return tuple(int(part) for part in parts)


def parse_overlap(value: object) -> Overlap:
    """The `layerwise_overlap` setting as layers a slice, `WHOLE` for whole transfers, or `AUTO`.

    Accepts "auto", a bool, an int or a decimal string; anything else raises `SettingsError`.
    """
    text = value.strip().lower() if isinstance(value, str) else value
    if text in ("true", "false"):
        text = text == "true"
    if isinstance(text, str) and text.isdecimal() and len(text) < 10:
        text = int(text)
    if isinstance(text, int) and text >= 0:
        return int(text)  # True is one layer a slice, False is WHOLE
    if text == AUTO:
        return AUTO
    raise SettingsError(
        f"layerwise_overlap {value!r} is not understood",
        'Use "auto", true (one layer a slice), a number of layers, or false for whole transfers',
    )


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can set. Times in milliseconds."""

    socket: Path = msgspec.field(default_factory=default_socket)
    server_uid: int | None = None
    """A user besides the engine's own whose server is trusted. None: no other's."""
    layerwise_overlap: Overlap = AUTO
    """Layers a slice; `WHOLE` moves all at once, `AUTO` decides for each retrieve."""
    release_after_slices: int | None = None
    """How many slices must have landed before a request is released to compute, 0 for a
    synchronous retrieve. None: `AUTO` decides, and any other overlap releases after the first."""
    chunk_tokens: int | None = None
    """Refuse a server with another chunk size; None takes the server's."""
    connect_timeout_ms: int = 5_000
    lookup_timeout_ms: int = 100
    """A lookup that takes longer counts as a miss."""
    retrieve_timeout_ms: int = 10_000
    """A retrieve that takes longer counts as failed; its pages stay pinned until acknowledged."""
    store_timeout_ms: int = 10_000
    """A store that takes longer is given up: nothing of it is found, its pages are free at once."""
    suspect_after_ms: int = 50
    """A server whose heartbeat is older gets no new lookups; raise it on a busy small host."""
    reconnect_every_ms: int = 500
    data_path: DataPath = AUTO
    """How KV moves: `direct`, the server copies into the engine's pages; `ring`, it fills a ring in
    the engine's memory, whose device places its own pages. `AUTO` takes rings on a GPU with pages
    below 32 KiB in the mean, where it has room for them."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value: Any = getattr(self, field.name)
            if field.name == "layerwise_overlap":
                value = parse_overlap(value)
            else:
                try:  # as `parse` does
                    value = msgspec.convert(value, field.type, strict=False, dec_hook=_path)
                except msgspec.ValidationError as error:
                    raise SettingsError(
                        f"{field.name} is {value!r}: {error}", "Correct its type"
                    ) from error
            msgspec.structs.force_setattr(self, field.name, value)
        check_socket_path(self.socket)
        if self.server_uid is not None:
            _check_uid("server_uid", self.server_uid)
        for name in ("connect", "lookup", "retrieve", "store"):
            _at_least(f"{name}_timeout_ms", getattr(self, f"{name}_timeout_ms"), 1)
        _at_least("suspect_after_ms", self.suspect_after_ms, 1)
        _at_least("reconnect_every_ms", self.reconnect_every_ms, 1)
        if self.release_after_slices is not None:
            _at_least("release_after_slices", self.release_after_slices, 0)
        if self.chunk_tokens is not None:
            _at_least("chunk_tokens", self.chunk_tokens, 1)

    @classmethod
    def parse(
        cls: type[_Settings], values: Mapping[str, Any], prefix: str = "lamina."
    ) -> _Settings:
        """Read the `lamina.*` entries of an engine's own configuration; refuse unknown ones.

        What every client can set and is not there is read from the environment: `LAMINA_SOCKET`,
        `LAMINA_CHUNK_TOKENS`, ... Not what a subclass adds: what one model is called, say, must
        not become the name of each engine's.
        """
        known = {field: prefix + field for field in cls.__struct_fields__}
        found: dict[str, Any] = {}
        for key, value in values.items():
            if not key.startswith(prefix):
                continue
            name = key[len(prefix) :]
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = "Known: " + ", ".join(known.values())
                if close:
                    hint = f"Did you mean {known[close[0]]}?"
                raise SettingsError(f"there is no setting {key!r}", hint)
            found[name] = parse_overlap(value) if name == "layerwise_overlap" else value
        for name in ClientSettings.__struct_fields__:
            text = os.environ.get(f"LAMINA_{name.upper()}")
            if text is not None and name not in found:
                found[name] = parse_overlap(text) if name == "layerwise_overlap" else text
        try:
            return msgspec.convert(found, cls, strict=False, dec_hook=_path)
        except msgspec.ValidationError as error:
            raise SettingsError(f"a setting is malformed: {error}", "Correct its type") from error


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `lamina serve` can set."""

    socket: Path = msgspec.field(default_factory=default_socket)
    allow_uids: tuple[int, ...] = ()
    """Users besides the server's own whose engines may connect."""
    arena_bytes: int | Share = 4 * 2**30
    """Or this share of the memory that the server may take (`server/memory.py`)."""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    lease_ttl_s: float = 60.0
    """A lease that is not used for this long ends."""
    host_link_gbps: float | None = None
    """Throttle copies of the host device to this many GB/s in each direction; None: no limit."""
    http: str | None = None
    """`host:port` for metrics and status, `[::1]:port` with IPv6; None: no HTTP. Port 0 takes a
    free one."""

    def __post_init__(self) -> None:
        check_socket_path(self.socket)
        for uid in self.allow_uids:
            _check_uid("allow_uid", uid)
        _at_least("chunk_tokens", self.chunk_tokens, 1)
        if not isinstance(self.arena_bytes, Share):
            _at_least("arena_bytes", self.arena_bytes, MIN_ARENA_BYTES)
        _above("lease_ttl_s", self.lease_ttl_s)
        if self.host_link_gbps is not None:
            _above("host_link_gbps", self.host_link_gbps)
        if self.http is not None:
            parse_address(self.http)


def parse_data_path(text: str) -> DataPath:
    """A `data_path`. Raises `SettingsError`."""
    if text not in get_args(DataPath):
        raise SettingsError(f"there is no data path {text!r}", "Use auto, direct or ring")
    return cast(DataPath, text)


def parse_address(text: str) -> tuple[str, int]:
    """`"127.0.0.1:9090"` or `"[::1]:9090"` → host and port. Raises `SettingsError`."""
    host, colon, port = text.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_v6 else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    if not colon or not host or (":" in host) != is_v6 or not is_port:
        raise SettingsError(
            f"{text!r} is not host:port", "Use for example 127.0.0.1:9090 or [::1]:9090"
        )
    return host, int(port)


def check_socket_path(path: Path) -> None:
    """Raise `SettingsError` for a path that no Unix socket can have."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes",
            "Choose a shorter path, for example under /run or /tmp",
        )


def _check_uid(name: str, uid: int) -> None:
    if not 0 <= uid < 2**32 - 1:  # the last number is no user's (chown(2))
        raise SettingsError(f"{name} {uid} is no user's number", "Look it up with `id -u USER`")


def _path(wanted: type[Any], value: object) -> object:
    """Lets a path be given as text, as in JSON."""
    if wanted is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"a {type(value).__name__} is no {wanted.__name__}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise SettingsError(f"{name} is {value}", f"Use at least {least}")


def _above(name: str, value: float) -> None:
    if not value > 0:
        raise SettingsError(f"{name} is {value}", "Use a positive number")
