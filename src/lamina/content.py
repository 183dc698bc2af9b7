"""What files hold: SHA-256 of every byte of them, remembered from one start to the next.

A file of the Hugging Face cache is named by its digest already. Any other is read whole, once: what
was read is remembered in the user's cache directory by device, inode, size and times. Processes
that want the same file share one reading. Engine-neutral; any thread may call.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from lamina.errors import LaminaError

_READ_BYTES = 8 << 20
"""A read and its hashing release the interpreter for about 8 ms at this size; smaller ones would
ask an engine's thread for it more often."""
_MOST_THREADS = 8
_LOWEST_PRIORITY = 19
_READER_PATIENCE_S = 600.0
"""A file that another process has not read by then is read here too: it may be stopped."""
_LOOK_AGAIN_S = 0.1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RECENT_NS = 2_000_000_000
"""A file written so recently could be written again within the same tick of its clock: what it held
is not remembered (git calls such an entry racily clean). Network file systems tick in seconds."""
_CLOCK_REALTIME_COARSE = 5
CLOCK_SLACK_NS = int(time.clock_getres(_CLOCK_REALTIME_COARSE) * 1e9)
"""File times come from the kernel's tick, which lags the clock by up to one (1 to 10 ms)."""


def wall_clock_ns() -> int:
    """The clock by which files are dated, for comparing with their times and nothing else: it can
    be set. Where it is set back, a file that is written afterwards looks old."""
    return time.time_ns()


class FileChangedError(LaminaError):
    """A file was written after the engine may have read it: what the engine has is unknown."""


def default_memory() -> Path | None:
    """Where digests are remembered: `$XDG_CACHE_HOME/lamina/files`, or under `~/.cache`; None for a
    user without a home, as in a container."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "lamina" / "files"
    except RuntimeError:  # pathlib's, for a user whom the system does not know
        return None


def digests(
    files: Iterable[Path], unchanged_since_ns: int | None, memory: Path | None
) -> list[str]:
    """The SHA-256 of each file, in order, as hex digits. Reads on several threads, at the lowest
    priority; `memory` is a directory of `default_memory`'s kind, None to remember nothing.

    Raises `FileChangedError` when a file changes meanwhile, or has changed at or after
    `unchanged_since_ns` (nanoseconds of the wall clock), and `OSError` when one cannot be read.
    """
    wanted = list(files)
    usable = _usable(memory)
    found: dict[int, str] = {}
    errors: list[BaseException] = []
    left = iter(range(len(wanted)))  # shared: the next of a range iterator is atomic

    def read_some() -> None:
        _give_way()
        try:
            for number in left:
                if errors:
                    return
                found[number] = _digest(wanted[number], unchanged_since_ns, usable)
        except BaseException as error:  # told to the caller
            errors.append(error)

    count = min(_MOST_THREADS, os.cpu_count() or 1, len(wanted))
    # Daemons, so that an engine which ends need not wait for them.
    threads = [threading.Thread(target=read_some, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(wanted))]


def is_hub_snapshot(directory: Path) -> bool:
    """Whether a directory is a commit's in a Hugging Face cache, which is never written again."""
    return directory.parent.name == "snapshots" and bool(
        re.fullmatch(r"[0-9a-f]{40}", directory.name)
    )


def _digest(path: Path, unchanged_since_ns: int | None, memory: Path | None) -> str:
    in_snapshot = is_hub_snapshot(path.parent)
    if in_snapshot and (named := _hub_name(path)) is not None:
        return named
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        if unchanged_since_ns is not None and not in_snapshot:
            times = (before.st_ctime_ns, path.lstat().st_ctime_ns)
            if max(times) + CLOCK_SLACK_NS > unchanged_since_ns:
                raise FileChangedError(
                    f"{path} was written after the engine began to read it",
                    "Restart the engine, or name its weights by lamina.model_id",
                )
        found = _remembered(file.fileno(), before, memory)
        if signature(os.fstat(file.fileno())) != signature(before):
            raise FileChangedError(
                f"{path} was written while it was read", "Restart the engine when it is whole"
            )
    return found


def _hub_name(path: Path) -> str | None:
    """The digest by which the hub's cache names a large file; small ones have a git name."""
    target = path.resolve()
    is_named = target.parent.name == "blobs" and _SHA256.fullmatch(target.name)
    return target.name if is_named else None


def _remembered(descriptor: int, stat: os.stat_result, memory: Path | None) -> str:
    """The file's digest from memory, or read now. One process reads, others wait for it."""
    entry = _locked_entry(memory, stat) if memory is not None else None
    if entry is None:
        return _read(descriptor)
    try:
        known = os.pread(entry, 65, 0).decode("ascii", "replace")
        if _SHA256.fullmatch(known):
            return known
        digest = _read(descriptor)
        if stat.st_ctime_ns + _RECENT_NS < wall_clock_ns():
            with contextlib.suppress(OSError):  # a full disk: what is incomplete counts as nothing
                os.pwrite(entry, digest.encode(), 0)
        return digest
    finally:
        os.close(entry)


def _locked_entry(memory: Path, stat: os.stat_result) -> int | None:
    """The descriptor of the file's entry, once no other process reads the same file; None when that
    takes too long, or the disk is full or has no locks (some network file systems)."""
    name = hashlib.sha256(repr(signature(stat)).encode()).hexdigest()
    until_s = time.monotonic() + _READER_PATIENCE_S
    try:
        entry = os.open(memory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return entry
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until_s:
                os.close(entry)
                return None
            time.sleep(_LOOK_AGAIN_S)


def _read(descriptor: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(buffer[:count])
        offset += count
    return digest.hexdigest()


def signature(stat: os.stat_result) -> tuple[int, ...]:
    """Tells a file and its state from every other: device, inode, size, when it was written, and
    when the kernel last saw it change (nanoseconds), which nobody can set."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _usable(memory: Path | None) -> Path | None:
    """`memory`, if it can be written and nobody else could have written it."""
    if memory is None:
        return None
    try:
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = memory.stat()
    except OSError:
        return None
    is_ours = stat.st_uid == os.getuid() and not stat.st_mode & 0o022
    return memory if is_ours and os.access(memory, os.W_OK | os.X_OK) else None


def _give_way() -> None:
    """This thread runs when nobody else wants the core."""
    with contextlib.suppress(OSError):  # it then competes as others do
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
