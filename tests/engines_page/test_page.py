"""The page has every call, every state and every name, and no more lines of code than it says."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from lamina import client as lamina
from lamina.client import TransferStatus
from tests.engines_page.toy import CODE, PAGE, SECTIONS

MOST_LINES = 90


def named_in(section: str) -> set[str]:
    """All names that stand in backticks there."""
    spans = re.findall(r"`([^`\n]+)`", SECTIONS[section])
    return {name for span in spans for name in re.findall(r"\w+", span)}


def test_the_engine_fits_a_screen_and_imports_lamina_client_alone() -> None:
    assert len(CODE.splitlines()) <= MOST_LINES
    tree = ast.parse(CODE)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == [
        "import time",
        "import numpy as np",
        "from lamina import client as lamina",
    ]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lamina"
    }
    assert used <= set(lamina.__all__)


@pytest.mark.parametrize(
    "kind", [lamina.Client, lamina.Prefixes, lamina.Prefix, lamina.Gate, lamina.StepGates]
)
def test_every_call_has_its_place(kind: type) -> None:
    calls = {name for name in dir(kind) if not name.startswith("_")}
    assert calls - named_in("The calls") == set()


def test_every_status_has_its_place() -> None:
    statuses = {status.name for status in TransferStatus}
    assert statuses - named_in("States") == set()


def test_every_field_that_identifies_kv_has_its_place() -> None:
    fields = set(lamina.Namespace.__struct_fields__)
    assert fields - named_in("What identifies KV") == set()


def test_every_name_is_on_the_page() -> None:
    named = set[str]().union(*map(named_in, SECTIONS.keys() - {"A whole engine"}))
    assert set(lamina.__all__) - named == set()


def test_the_page_names_nothing_that_is_not_there() -> None:
    """Of a class, as `Prefix.end`."""
    named = re.findall(r"`(\w+)\.(\w+)", PAGE)
    kinds = [(getattr(lamina, kind), name) for kind, name in named if kind in lamina.__all__]
    assert kinds
    for kind, name in kinds:
        is_set = re.search(rf"self\.{name}\b", inspect.getsource(kind))
        assert hasattr(kind, name) or is_set, f"{kind.__name__}.{name}"
