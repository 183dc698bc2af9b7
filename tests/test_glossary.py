"""One word for one thing: the glossary of docs/architecture.md and the names of the code."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lamina"
GLOSSARY = (ROOT / "docs" / "architecture.md").read_text().split("## Words")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (?!word|---)(.+?) \| (.+) \| (.+?) \|$", GLOSSARY, re.MULTILINE)

OTHER_WORDS = {"load": "retrieve", "loading": "retrieve", "save": "store", "saved": "store"}
"""Segments of names that say another word for one of ours, and ours."""
ALLOWED = {
    # What vLLM calls and reads is named by vLLM.
    "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
    "get_block_ids_with_load_errors", "has_sync_kv_loads", "kv_load_failure_policy",
    "load_config", "load_format", "load_inplace",
}  # fmt: skip
HELD = {"HeldBlocks", "HeldRetrieve", "held", "held_blocks_share", "most_held"}
"""All public names with that word: of blocks."""


def public_names() -> Iterator[tuple[str, str]]:
    """Every public class, function, argument, attribute and constant, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(node.name)
            elif isinstance(node, ast.arg):
                names.append(node.arg)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        names.append(target.id)
                    elif isinstance(target, ast.Attribute):
                        names.append(target.attr)
            line = getattr(node, "lineno", 0)
            for name in names:
                if not name.startswith("_"):
                    yield name, f"{path.relative_to(ROOT)}:{line}"


def segments(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def resolves(name: str) -> bool:
    """Whether `module.Class.attribute` of the package is there; attributes that only instances
    have count if the class's source assigns them."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["lamina", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for index, part in enumerate(parts[cut:], start=cut):
            if not hasattr(found, part):
                module = getattr(found, "__module__", "")
                is_last = index == len(parts) - 1
                source = Path(importlib.import_module(module).__file__ or "").read_text()
                return is_last and f"self.{part}" in source
            found = getattr(found, part)
        return True
    return False


def test_the_glossary_has_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize(("word", "names"), [(row[0], row[2]) for row in ROWS], ids=str)
def test_every_name_of_the_glossary_exists(word: str, names: str) -> None:
    for name in re.findall(r"`([\w.]+)`", names):
        full = name if name.split(".")[0] != "Geometry" else f"geometry.{name}"
        assert resolves(full), f"{word}: there is no lamina.{full}"


def test_no_public_name_says_another_word() -> None:
    wrong = [
        f"{place}: {name} (say {OTHER_WORDS[part]})"
        for name, place in public_names()
        if name not in ALLOWED
        for part in segments(name) & OTHER_WORDS.keys()
    ]
    assert not wrong, "\n".join(wrong)


def test_only_blocks_are_held() -> None:
    wrong = {
        f"{place}: {name}"
        for name, place in public_names()
        if segments(name) & {"held"} and name not in HELD
    }
    assert not wrong, "\n".join(sorted(wrong))
