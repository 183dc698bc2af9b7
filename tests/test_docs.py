"""What the documents name is there: links, headings, files, `make` targets, and names in the code.

Not whether what they say is true: but a name that has gone is where they begin to be wrong.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "tests", "benchmarks", "scripts", "docs", ".ci")
TOP = ("Makefile", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
DOCUMENTS = [
    *sorted(path for path in ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks/README.md",
]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
OTHER_NAMES = {"engine/": "lab/reference/"}  # docs/reliability.md says so
OF_VLLM = {"requires_piecewise_for_cudagraph"}
"""Names that vLLM has and our code does not."""
NAMES_OF_OTHERS = {"identity.md", "CHANGELOG.md"}
"""vLLM's fields, which tests/vllm/test_fields.py holds against vLLM; and names that have gone."""
HEADINGS = ("## Context", "## Decision", "## Rejected", "## Consequences")

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@cache
def files() -> list[str]:
    """All files of the repository, relative to its root."""
    found = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in found] + list(TOP)


@cache
def words() -> set[str]:
    """Of the code."""
    code = [name for name in files() if name.endswith((".py", ".sh", ".toml", "Makefile"))]
    code.remove("tests/test_docs.py")
    return {word for name in code for word in re.findall(r"\w+", (ROOT / name).read_text())}


def fenced(text: str) -> list[str]:
    """The blocks of commands and code."""
    return re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def quoted(text: str) -> list[str]:
    """What stands between backticks in running text."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", outside)]


def anchors(document: Path) -> set[str]:
    """The headings of a document, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (document.parent / target).resolve() if target else document
        is_there = path.is_relative_to(ROOT) and path.exists()
        if not is_there or (anchor and anchor not in anchors(path)):
            dead.append(link)
    assert not dead


@each_document
def test_files_that_are_named_exist(document: Path) -> None:
    """By their path, or the end of it: `server/lane.py`, `test_keys.py`, `cuda*.py`."""
    text = document.read_text()
    named = re.findall(
        r"[\w./*-]*[\w*]\.(?:py|sh|md|toml)\b", " ".join([*quoted(text), *fenced(text)])
    )
    missing = []
    for name in set(named):
        for short, long in OTHER_NAMES.items():
            name = re.sub(rf"^{short}", long, name)
        pattern = re.escape(name.removeprefix("../")).replace(r"\*", "[^/]*")
        if not any(re.search(rf"(^|/){pattern}$", path) for path in files()):
            missing.append(name)
    assert not missing


@each_document
def test_targets_of_make_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"\bmake ([a-z][\w-]*)", "\n".join([*quoted(text), *fenced(text)]))
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(named) <= targets


@each_document
def test_names_of_the_code_are_in_it(document: Path) -> None:
    """`Index.commit`, `stores_void`, `lamina.socket`: each part of such a name."""
    if document.name in NAMES_OF_OTHERS:
        return
    names = [n for n in quoted(document.read_text()) if re.fullmatch(r"\w+([._]\w+)+(\(\))?", n)]
    parts = {
        part: name
        for name in names
        if not re.search(r"NAME|\.(py|sh|md|json|toml|png)$", name)
        for part in name.rstrip("()").split(".")
    }
    assert not {name for part, name in parts.items() if not is_in_the_code(part)}


def is_in_the_code(word: str) -> bool:
    """As it is, or as what is made of it: a test, a metric, a variable of the environment."""
    made_of = [word, f"test_{word}", word.removeprefix("lamina_")]
    if word.startswith("LAMINA_"):
        made_of.append(word.removeprefix("LAMINA_").lower())
    return word in OF_VLLM or any(one.isdecimal() or one in words() for one in made_of)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_date_and_parts_and_is_in_the_index(page: Path) -> None:
    text = page.read_text()
    title = text.splitlines()[0].removeprefix("# ")
    assert re.search(r"^\d{4}-\d{2}-\d{2}", text.splitlines()[2]), "its date stands below its title"
    assert [line for line in text.splitlines() if line.startswith("## ")] == list(HEADINGS)
    assert len(text.splitlines()) <= 45
    assert f"[{title}]({page.name})" in (page.parent / "README.md").read_text()
