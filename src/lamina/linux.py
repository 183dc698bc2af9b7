"""The few Linux calls that Python does not wrap: cross-process copies, pidfds, short waits."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IOV_MAX = 1024
"""Pieces that one `process_vm_*` call takes (`UIO_MAXIOV`)."""

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
_PR_SET_PTRACER = 0x59616D61
_SO_PEERPIDFD = 77  # Linux 6.5
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""This process has no file descriptor left, or the host has none."""
_UCRED = struct.Struct("iII")

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _call = getattr(_libc, _name)
    _call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _call.restype = ctypes.c_ssize_t
_libc.ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

IoVec = npt.NDArray[np.uint64]
"""Shape (n, 2): an address and a length per row, as `struct iovec`."""


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Peer(NamedTuple):
    """The process at the other end of a Unix socket. `pidfd` is readable once it has died."""

    pid: int
    uid: int
    pidfd: int

    def is_dead(self) -> bool:
        """Whether every thread of the process has ended. Safe from any thread."""
        return wait_readable(self.pidfd, 0.0)

    def close(self) -> None:
        os.close(self.pidfd)


def peer_of(sock: socket.socket) -> Peer:
    """Identify the peer of a connected Unix socket; the kernel vouches for it.

    Raises `ProcessLookupError` when it has died already, `OSError` without a free descriptor.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        if error.errno != errno.ENOPROTOOPT:
            raise ProcessLookupError(errno.ESRCH, "the peer has died") from error
        # An older kernel. The number may have been reused if the peer has died since, but then
        # nobody else holds its end of the socket and it reads as hung up.
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        if poll.poll(0):
            os.close(pidfd)
            raise ProcessLookupError(errno.ESRCH, "the peer has died") from error
    return Peer(pid, uid, pidfd)


def wait_readable(fd: int, timeout_s: float, or_writable: bool = False) -> bool:
    """Wait at most `timeout_s` until `fd` is readable, or else writable if that is asked for;
    whether it is.

    Python's own `poll` waits for whole milliseconds.
    """
    until_s = time.monotonic() + timeout_s
    asked = _PollFd(fd, select.POLLIN | (select.POLLOUT if or_writable else 0))
    while True:
        left_ns = max(0, int((until_s - time.monotonic()) * 1e9))
        left = _TimeSpec(*divmod(left_ns, 10**9))
        ready = _libc.ppoll(ctypes.byref(asked), 1, ctypes.byref(left), None)
        if ready >= 0:
            return bool(ready)
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


def copy_between(pid: int, local: IoVec, remote: IoVec, *, into_remote: bool) -> None:
    """Copy all of `local` to `remote` of process `pid`, or back; the GIL is free meanwhile.

    Both have the same rows of lengths. Calls are cut at `IOV_MAX` and resumed after a partial
    copy. Raises `OSError`: EPERM (not allowed), ESRCH (no such process), EFAULT (no such memory).
    """
    call = _libc.process_vm_writev if into_remote else _libc.process_vm_readv
    for start in range(0, len(local), IOV_MAX):
        mine = np.ascontiguousarray(local[start : start + IOV_MAX])
        theirs = np.ascontiguousarray(remote[start : start + IOV_MAX])
        while len(mine):
            done = call(pid, mine.ctypes.data, len(mine), theirs.ctypes.data, len(theirs), 0)
            if done < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            mine, theirs = _after(mine, done), _after(theirs, done)


def _after(pieces: IoVec, nbytes: int) -> IoVec:
    """What is left of `pieces` once their first `nbytes` are done."""
    ends = np.cumsum(pieces[:, 1])
    if nbytes == int(ends[-1]):
        return pieces[:0]
    index = int(np.searchsorted(ends, nbytes, side="right"))
    left = pieces[index:].copy()
    skipped = nbytes - (int(ends[index - 1]) if index else 0)
    left[0] += np.array([skipped, -skipped]).astype(np.uint64)
    return left


def allow_copies_by(pid: int) -> None:
    """Let process `pid` read and write this process's memory where Yama restricts it.

    Without Yama the call does not exist and is not needed.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def madvise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice. The GIL is free meanwhile."""
    return bool(_libc.madvise(address, nbytes, advice) == 0)
