"""What a terminal of 80 columns shows."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def shown(view: RenderableType) -> str:
    """The text of a view; fails where a line is wider, or something of it is cut."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return text
