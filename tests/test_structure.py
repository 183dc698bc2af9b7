"""How the source hangs together: what imports what, what an engine needs, how long files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MOST_LINES = 400

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
LAMINA = [name for name in MODULES if name.split(".")[0] == "lamina"]

MAY_NOT_IMPORT = {
    "lamina": ["lamina_lab"],
    "lamina.server": ["lamina.client", "lamina.engines", "lamina.cli"],
    "lamina.client": ["lamina.server", "lamina.engines", "lamina.cli"],
    "lamina.engines": ["lamina.server", "lamina.cli"],
    "lamina.devices": ["lamina.server", "lamina.client", "lamina.engines", "lamina.cli"],
}
SHARED = [name for name in LAMINA if name.count(".") == 1 and MODULES[name].name != "__init__.py"]
"""geometry, keys, board, protocol and so on: they know of no side."""


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(), name)


def imports_of(name: str) -> Iterator[tuple[str, bool]]:
    """The modules of ours that `name` imports, and whether it does so as soon as it is imported."""
    for node, is_at_once in _imports(tree_of(name), True):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{name} has a relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [one if one in MODULES else str(node.module) for one in below]
        yield from ((one, is_at_once) for one in found if one in MODULES)


def _imports(node: ast.AST, is_at_once: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_at_once
        in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from _imports(child, is_at_once and not in_function and not for_types)


def packages_of(name: str) -> Iterator[str]:
    """Those that are imported before `name` is."""
    parts = name.split(".")
    yield from (one for n in range(1, len(parts)) if (one := ".".join(parts[:n])) in MODULES)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", MAY_NOT_IMPORT)
def test_what_a_package_may_not_import(package: str) -> None:
    """Not even in a function: server and engines meet in the modules that they share."""
    forbidden = [
        f"{name} imports {imported}"
        for name in MODULES
        if is_in(name, package)
        for imported, _ in imports_of(name)
        if any(is_in(imported, other) for other in MAY_NOT_IMPORT[package])
    ]
    assert not forbidden


def test_what_is_shared_knows_of_no_side() -> None:
    sides = [f"lamina.{side}" for side in ("server", "client", "engines", "devices", "cli")]
    assert {"lamina.protocol", "lamina.board", "lamina.geometry"} <= set(SHARED)
    knowing = [
        f"{name} imports {imported}"
        for name in SHARED
        for imported, _ in imports_of(name)
        if any(is_in(imported, side) for side in sides)
    ]
    assert not knowing


def test_nothing_is_imported_in_a_circle() -> None:
    order: dict[str, None] = {}
    way: list[str] = []

    def visit(name: str) -> None:
        assert name not in way, "a circle: " + " imports ".join([*way[way.index(name) :], name])
        if name in order:
            return
        way.append(name)
        for imported in (found for found, is_at_once in imports_of(name) if is_at_once):
            for run in (*packages_of(imported), imported):
                if run == imported or not is_in(name, run):  # its own packages are begun already
                    visit(run)
        order[way.pop()] = None

    for name in MODULES:
        visit(name)
    assert set(order) == set(MODULES)


def test_no_file_of_the_product_is_too_long_to_have_one_idea() -> None:
    lines = {name: len(MODULES[name].read_text().splitlines()) for name in LAMINA}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


ENGINES_SIDE = """
import sys

class Refuse:
    '''Of what is not Python's own only NumPy, msgspec and what NumPy brings may be imported.'''

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {"lamina", "numpy", "msgspec"}:
            raise ImportError(f"{name} is not what an engine needs")
        return None

sys.meta_path.insert(0, Refuse())
import lamina.client, lamina.devices.host, lamina.devices.cuda
third = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(name for name in third if name in {"lamina", "numpy", "msgspec", "lamina_lab"}))
"""


def test_an_engine_needs_numpy_and_msgspec_and_nothing_else() -> None:
    command = [sys.executable, "-c", ENGINES_SIDE]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["lamina", "msgspec", "numpy"]
