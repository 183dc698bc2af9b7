"""What stands in two places: options and settings, wire and version, settings and documents."""

from __future__ import annotations

import ast
import hashlib
import inspect
from pathlib import Path
from typing import Any

import msgspec
import typer

from lamina import geometry, protocol
from lamina.board import TransferStatus
from lamina.cli.app import app, serve
from lamina.errors import ErrorCode
from lamina.settings import ServerSettings

ROOT = Path(__file__).parents[1]
LAYOUTS = {5: "05cfc4b0e739fb79", 6: "b2ff694b03a7a98a", 7: "dafb09cb9af50b2a"}
"""By protocol version, a digest of all messages' fields and types. One that has changed means
another `protocol.VERSION`, unless no release has had this one: then write the new digest here."""


def layout() -> str:
    """All that two sides must agree on to read each other's messages."""
    kinds = {
        kind
        for kind in [*vars(protocol).values(), *vars(geometry).values()]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    described: list[object] = [
        (kind.__name__, [(field.name, str(field.type)) for field in msgspec.structs.fields(kind)])
        for kind in sorted(kinds, key=lambda kind: kind.__name__)
    ]
    described += [(member.name, member.value) for member in [*TransferStatus, *ErrorCode]]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def test_other_messages_are_another_version() -> None:
    assert LAYOUTS.get(protocol.VERSION) == layout()


def test_the_options_of_serve_default_to_the_settings() -> None:
    defaults = ServerSettings()
    renamed = {"arena": "arena_bytes", "allow_uid": "allow_uids"}
    own = {"log_level", "log_json", "log_file"}
    for name, parameter in inspect.signature(serve).parameters.items():
        if name in own:
            continue
        default: Any = getattr(parameter.default, "value", parameter.default)
        expected = getattr(defaults, renamed.get(name, name))
        assert (default or expected) == expected, name
    named = {renamed.get(name, name) for name in inspect.signature(serve).parameters} - own
    assert named == set(ServerSettings.__struct_fields__), "every setting has its option"


def test_every_option_of_serve_says_where_it_comes_from() -> None:
    """Of the environment, but what a line of a unit file says anyway."""
    command = typer.main.get_command(app)
    options = command.commands["serve"].params  # type: ignore[attr-defined]
    without = {p.name for p in options if not p.envvar}
    assert without == {"log_json", "log_file"}


def test_every_setting_of_the_connector_is_documented() -> None:
    """Read from the source: vLLM is not installed where the core is tested."""
    source = (ROOT / "src/lamina/engines/vllm/config.py").read_text()
    page = (ROOT / "docs/vllm.md").read_text()
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings":
            names = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
    assert len(names) > 3
    for name in names:
        assert f"`lamina.{name}`" in page, name
