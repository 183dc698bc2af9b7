"""What the commands' options share: how values are read, and what is tried before anything runs.

Parsers are for `typer.Option(parser=...)`: what they refuse is a usage error that names the option
as it was typed, or its environment variable. A default may be given as a value of the right type.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from lamina.errors import LaminaError, SettingsError
from lamina.settings import (
    Share,
    check_socket_path,
    parse_address,
    parse_arena,
    parse_bytes,
    parse_counts,
)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ArenaSize:
    """Bytes, or a share of what this process may take."""

    value: int | Share


class Sizes(tuple[int, ...]):
    """Bytes, comma-separated on the command line."""


class Counts(tuple[int, ...]):
    """Numbers above 0, comma-separated on the command line."""


def _option(parse: Callable[[str], _Value]) -> Callable[[Any], _Value]:
    def parser(value: Any) -> _Value:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # the option's default
        try:
            return parse(value)
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from error

    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"{text!r} is not a positive number", "Use for example 2.5")
    return value


def _address(text: str) -> str:
    parse_address(text)
    return text


def _socket(text: str) -> Path:
    check_socket_path(Path(text))
    return Path(text)


ADDRESS = _option(_address)
ARENA = _option(lambda text: ArenaSize(parse_arena(text)))
BYTES = _option(parse_bytes)
COUNTS = _option(lambda text: Counts(parse_counts(text)))
POSITIVE = _option(_positive)
SIZES = _option(lambda text: Sizes(map(parse_bytes, text.split(","))))
SOCKET = _option(_socket)


def check_writable(option: str, path: Path | None) -> None:
    """Raise `SettingsError` when `path`, given for `option`, cannot be written. Changes nothing."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingsError(
            f"{option}: {path} cannot be written: {error.strerror}", "Choose another path"
        ) from error


def check_installed(*packages: str, remedy: str) -> None:
    """Raise `LaminaError` when one of `packages` is missing; imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise LaminaError(f"{' and '.join(missing)} {are} not installed here", remedy)
