"""The kernels that move records between a ring and pages, ready to load: no compiler is needed.

`pages.cu` is their source; `scripts/kernels.sh` builds the files beside it.
"""

from __future__ import annotations

from importlib.resources import files

_BUILT_FOR = {8: 80, 9: 90, 10: 100, 12: 120}
"""A GPU runs code that was built for its major number, and its own minor or a smaller one."""


def image_for(major: int, minor: int) -> bytes:
    """What the driver loads on a GPU of this compute capability: its own code, or else PTX, which
    the driver compiles. Ends with a zero byte, as the driver wants of text."""
    built = _BUILT_FOR.get(major)
    name = f"pages.sm_{built}.cubin" if built is not None else "pages.ptx"
    return files(__package__).joinpath(name).read_bytes() + b"\0"
