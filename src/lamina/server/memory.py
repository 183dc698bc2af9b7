"""How much memory this process may still take, and whether an arena fits into it.

Asked once, before anything is taken. Two things bound it: what the host has available, and the
limits of the cgroups around this process, of either version: a container has them. Read from /proc
and /sys below `root`, which tests replace.

`RLIMIT_MEMLOCK` does not bound it: NVIDIA's driver pins an arena without counting it there (on an
H200 it pinned 256 MiB for a user without capabilities and a limit of 64 KiB). Swap adds nothing: a
chunk that has to be read back from a disk is no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lamina.errors import SettingsError
from lamina.settings import MIN_ARENA_BYTES, Share, size_text

HEADROOM_BYTES = 64 << 20
"""What the server takes beside its arena once it serves: index, sessions, threads' stacks."""
_PAGE_TABLE_SHARE = 1 / 512
"""8 bytes for each page of 4 KiB, where no huge pages are to be had."""
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 says no limit with the largest number of pages."""


class Limit(NamedTuple):
    """What may be taken, by whom that is said, and what changes it."""

    available_bytes: int
    words: str
    remedy: str

    @property
    def arena_bytes(self) -> int:
        """The largest arena that leaves room for the rest of the server."""
        return max(0, int((self.available_bytes - HEADROOM_BYTES) * (1 - _PAGE_TABLE_SHARE)))


class _Version(NamedTuple):
    """Where a version of cgroups has its files, and what they are called."""

    mount: str
    limits: tuple[str, ...]
    used: str
    reclaimable: str


_V1 = _Version(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_V2 = _Version("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """The host's, and that of the tightest cgroup where there is one. Empty without /proc."""
    cgroups = sorted(_cgroups(root))
    return [*_host(root), *cgroups[:1]]


def arena_bytes(asked: int | Share, limits: Sequence[Limit]) -> int:
    """The size of the arena that was asked for.

    Raises `SettingsError` with the figures when it does not fit into the limits.
    """
    tightest = min(limits, default=None)
    if tightest is None:
        if isinstance(asked, Share):
            raise SettingsError(
                f"{asked} of the memory was asked for, which /proc does not tell",
                "Give --arena a size",
            )
        return asked
    most = tightest.arena_bytes
    nbytes = int(asked * most) if isinstance(asked, Share) else asked
    if MIN_ARENA_BYTES <= nbytes <= most:
        return nbytes
    said = ", ".join(limit.words for limit in limits)
    wanted = str(asked) if isinstance(asked, Share) else size_text(asked)
    raise SettingsError(
        f"an arena of {wanted} was asked for; {said}, and the server itself needs "
        f"{size_text(HEADROOM_BYTES)}",
        f"Use --arena {most >> 20}MiB or less, or 80%; or {tightest.remedy}"
        if most >> 20
        else tightest.remedy.capitalize(),
    )


def _host(root: Path) -> Iterator[Limit]:
    lines = (_read(root / "proc/meminfo") or "").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in kib:
        return
    of = size_text(kib["MemTotal"] << 10)
    if reserved := kib.get("Hugetlb", 0):
        of += (
            f", {size_text(reserved << 10)} of it in reserved huge pages, which an arena cannot use"
        )
    available = kib["MemAvailable"] << 10
    yield Limit(
        available, f"this host has {size_text(available)} available (of {of})", "free memory"
    )


def _cgroups(root: Path) -> Iterator[Limit]:
    """Those around this process that have a limit."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        group = PurePosixPath(path)
        # In a container the path may be the host's, and its own group what is mounted on top: then
        # only the last of these is there.
        for name in (group, *group.parents):
            yield from _cgroup(root / version.mount / str(name).lstrip("/"), name, version)


def _cgroup(directory: Path, name: PurePosixPath, version: _Version) -> Iterator[Limit]:
    stated = [_read(directory / file) for file in version.limits]
    limits = [int(text) for text in stated if text is not None and text.strip() != "max"]
    limit = min(limits, default=_UNLIMITED_BYTES)
    used = _read(directory / version.used)
    if limit >= _UNLIMITED_BYTES or used is None:
        return
    statistics = (line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
    cached = next((int(n) for key, n in statistics if key == version.reclaimable), 0)
    available = max(0, limit - max(0, int(used) - cached))
    yield Limit(
        available,
        f"the cgroup {name} allows {size_text(available)} more (of {size_text(limit)})",
        "raise the cgroup's limit",
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
