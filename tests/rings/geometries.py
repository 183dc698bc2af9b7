"""Random geometries: several groups, planes, page and block sizes."""

from __future__ import annotations

from hypothesis import strategies as st

from lamina.geometry import Geometry, Group, Layer


@st.composite
def geometries(draw: st.DrawFn, max_layers: int = 10) -> Geometry:
    """Chunks of 8 tokens in blocks of 1 to 8; layers of any group in any order."""
    groups = tuple(
        Group(draw(st.sampled_from([1, 2, 4, 8]))) for _ in range(draw(st.integers(1, 3)))
    )
    layers = tuple(
        Layer(
            str(number),
            draw(st.integers(0, len(groups) - 1)),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 80)),
        )
        for number in range(draw(st.integers(1, max_layers)))
    )
    return Geometry(8, groups, layers)


def least_ring(geometry: Geometry) -> int:
    """The smallest ring that has room for a layer of a chunk in every record."""
    offsets = geometry.layer_offsets
    return 4 * int((offsets[1:] - offsets[:-1]).max())
