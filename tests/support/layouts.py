"""Layouts of chunks for tests of the index, which asks for nothing but sizes."""

from __future__ import annotations

import mmap

from lamina.geometry import Geometry, Group, Layer
from lamina.shards import ChunkLayout


def pages_of(pages: int, name: str = "0") -> Geometry:
    """A geometry whose chunks take so many pages of memory."""
    return Geometry(16, (Group(16),), (Layer(name, 0, 1, pages * mmap.PAGESIZE),))


def layout_of(*pages: int) -> ChunkLayout:
    """A column for each, of so many pages of memory; of one column of one page where none is."""
    return ChunkLayout([pages_of(count) for count in pages or (1,)])
