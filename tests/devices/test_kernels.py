"""The kernels that are shipped are those of their source, and there is one for every GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lamina.devices import kernels

ROOM = Path(kernels.__file__).parent
NAMES = {f"{way}_{width}" for way in ("place", "gather") for width in (1, 2, 4, 8, 16)}
RELEASE = "release 13.0"
"""Of the compiler that has built what is shipped."""


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 1)])
def test_gpus_that_engines_run_on_have_code_of_their_own(capability: tuple[int, int]) -> None:
    assert kernels.image_for(*capability).startswith(b"\x7fELF")


@pytest.mark.parametrize("capability", [(11, 0), (13, 0)])
def test_others_have_ptx_that_old_drivers_compile(capability: tuple[int, int]) -> None:
    image = kernels.image_for(*capability)
    assert image.endswith(b"\0")
    assert b".version 7.0" in image
    assert b".target sm_80" in image


def test_every_image_has_every_kernel() -> None:
    for image in ROOM.glob("pages.*"):
        if image.suffix != ".cu":
            assert all(name.encode() in image.read_bytes() for name in NAMES | {"fetch_ids"}), image


def test_what_is_shipped_is_what_the_source_says(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no CUDA compiler")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    built = tmp_path / "pages.ptx"
    command = [nvcc, "-ptx", "-arch=compute_80", "-o", str(built), str(ROOM / "pages.cu")]
    subprocess.run(command, check=True)
    entries = re.findall(r"\.entry (\w+)", built.read_text())
    assert set(entries) == NAMES | {"fetch_ids"}
    if RELEASE in version:
        text = re.sub(r"^\.version .*", ".version 7.0", built.read_text(), flags=re.M)
        text = "".join(line for line in text.splitlines(True) if not line.startswith("//"))
        assert text == (ROOM / "pages.ptx").read_text()
