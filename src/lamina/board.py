"""The board: a small shared memory in which "these bytes have landed" is one number.

One board per connection, made by the client as a sealed memfd and passed over the socket. It is an
array of 64-byte lines (a line is a cache line, so that two writers never share one):

    line 0   header     magic u64, version u32, slots u32              written once, by the client
    line 1   heartbeat  u64, nanoseconds of the server's monotonic     server
                        clock
    line 2   ticket     u32                                            engine's compute stream
    line 3   void       u32, stores of tickets before it are void      engine
    line 4+  slots      landed u32, status u32                         server (forced: watchdog)

A slot belongs to one transfer in flight. Its `landed` count starts at a base above every earlier
count of that slot and grows by one a slice; comparisons are cyclic, so it may wrap. `status` says
why a transfer failed and is written before the count is forced to its end. Counts are single
aligned 4-byte stores; `fence` orders them against the bytes they announce.

Of a worker that has rings, three slots belong to these instead: counts of records that its device
has placed and gathered, and of those that the server has drained (`records`).

A store only reads the engine's pages, so the engine can give it up without asking: it writes `void`
and has its pages back. The server reads that word when a store's copies are done, right before
anybody can find what was copied. Tickets are compared cyclically too.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import threading
from enum import IntEnum

from lamina.errors import BoardError

LINE_BYTES = 64
MAGIC = 0x44524F42414D414C  # "LAMABORD"
VERSION = 2
MAX_SLOTS = 65_536
PLACED, GATHERED, DRAINED = RING_SLOTS = range(3)
"""The slots of a worker's rings. `PLACED`: records of the retrieve ring that the engine's device is
done with, written by it alone and never forced. `GATHERED`: records that it has filled in the store
ring. `DRAINED`: those that the server has copied out of it."""
_HEADER = struct.Struct("<QII")
_HEARTBEAT_LINE, _TICKET_LINE, _VOID_LINE, _FIRST_SLOT_LINE = 1, 2, 3, 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()


class TransferStatus(IntEnum):
    """How a transfer ended. On the board and on the wire."""

    OK = 0
    CANCELLED = 1
    COPY_FAILED = 2
    STOPPED = 3
    TIMED_OUT = 4
    """Set by the client's watchdog, never by the server: the deadline passed."""
    SERVER_DIED = 5
    """Likewise: the server's process, or the connection to it, is gone."""
    REFUSED = 6
    """Likewise: the server answered with a typed error; nothing was written."""


def fence() -> None:
    """Order all memory accesses before this call before all that follow it.

    x86-64 never reorders stores with stores or loads with loads, so there is nothing to do.
    Elsewhere two passes through a lock are a full barrier: what precedes the first release stays
    before the second acquire.
    """
    if not _TOTAL_STORE_ORDER:
        for _ in range(2):
            with _fence_lock:
                pass


def reached(count: int, target: int) -> bool:
    """Whether `count` is at or past `target`, both modulo 2**32 (as `cuStreamWaitValue32` GEQ)."""
    return (count - target) & 0xFFFF_FFFF < 0x8000_0000


class Board:
    """One mapping of a board. Any thread may read; writers are as in the table above."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self.slots = slots
        self.nbytes = (_FIRST_SLOT_LINE + slots) * LINE_BYTES
        self._map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED)
        self._words = memoryview(self._map).cast("I")
        self._longs = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, slots: int) -> Board:
        """Make a board with `slots` slots, all zero, its size sealed."""
        if not 0 <= slots <= MAX_SLOTS:
            raise BoardError(f"a board of {slots} slots", f"Use 0 to {MAX_SLOTS} slots")
        fd = os.memfd_create("lamina-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, (_FIRST_SLOT_LINE + slots) * LINE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            board = cls(fd, slots)  # takes a second descriptor
        except OSError:
            os.close(fd)
            raise
        _HEADER.pack_into(board._map, 0, MAGIC, VERSION, slots)
        return board

    @classmethod
    def attach(cls, fd: int) -> Board:
        """Map a board that a peer sent, taking over `fd`. Trusts nothing that it has not checked.

        Raises `BoardError`; the size is sealed first, so that a peer cannot truncate it later and
        so kill the process that maps it.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BoardError("the board is not a memfd", "Make it with Board.create") from error
        if seals & _SEALS != _SEALS:
            raise BoardError("the board's size is not sealed", "Make it with Board.create")
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise BoardError(f"the board has only {size} bytes", "Make it with Board.create")
        magic, version, slots = _HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise BoardError(
                f"the board is of another kind or version ({version}, not {VERSION})",
                "Run the same Lamina version in the engine and in the server",
            )
        if slots > MAX_SLOTS or size != (_FIRST_SLOT_LINE + slots) * LINE_BYTES:
            raise BoardError(
                f"the board claims {slots} slots in {size} bytes", "Make it with Board.create"
            )
        try:
            return cls(fd, slots)
        except PermissionError as error:
            raise BoardError("the board cannot be written", "Make it with Board.create") from error

    def close(self) -> None:
        """Unmap the board and close its descriptor. Nothing may use it afterwards."""
        self._words.release()
        self._longs.release()
        self._map.close()
        os.close(self.fd)

    @property
    def address(self) -> int:
        """Where the board lies in this process, for devices that write its words themselves."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def mapped_bytes(self) -> int:
        """The size of the mapping: whole memory pages."""
        return -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def heartbeat_ns(self) -> int:
        return self._longs[_HEARTBEAT_LINE * LINE_BYTES // 8]

    @heartbeat_ns.setter
    def heartbeat_ns(self, value: int) -> None:
        self._longs[_HEARTBEAT_LINE * LINE_BYTES // 8] = value

    @property
    def ticket(self) -> int:
        value = self._words[_TICKET_LINE * LINE_BYTES // 4]
        fence()
        return value

    @ticket.setter
    def ticket(self, value: int) -> None:
        fence()
        self._words[_TICKET_LINE * LINE_BYTES // 4] = value & 0xFFFF_FFFF

    @property
    def void_before(self) -> int:
        """Stores whose ticket comes before this one are void."""
        return self._words[_VOID_LINE * LINE_BYTES // 4]

    def void_stores(self, ticket: int) -> None:
        """Void all stores up to `ticket`, for good: their pages may change once this returns.

        Engine's thread. Of every two tickets in use, one must be less than 2**31 after the other.
        """
        # Whoever copied a changed page must find the word written:
        #
        #     engine   write the word, fence, change the pages
        #     server   copy the pages until that is done, fence, read the word (`is_void`)
        #
        # x86 makes stores visible in order and loads in order; elsewhere the fences keep both
        # orders. GPUs keep them too: a kernel that changes pages is launched after the fence, and
        # a copy is seen to be done only after it has read.
        first_valid = (ticket + 1) & 0xFFFF_FFFF
        if not reached(self.void_before, first_valid):
            self._words[_VOID_LINE * LINE_BYTES // 4] = first_valid
        fence()

    def is_void(self, ticket: int) -> bool:
        """Whether the engine has given up the store of `ticket`: its pages may have changed.

        The server asks after the store's copies are done: a no is then a proof of their bytes.
        """
        fence()
        return not reached(ticket, self.void_before)

    def landed(self, slot: int) -> int:
        """The slot's count; everything it announces is visible once this returns."""
        value = self._words[self._word(slot)]
        fence()
        return value

    def announce(self, slot: int, count: int) -> None:
        """Set the slot's count, after everything written so far."""
        fence()
        self._words[self._word(slot)] = count & 0xFFFF_FFFF

    def status(self, slot: int) -> TransferStatus:
        """Why the slot's transfer failed. Read it after `landed`."""
        return TransferStatus(self._words[self._word(slot) + 1])

    def fail(self, slot: int, status: TransferStatus, final_count: int) -> None:
        """End a transfer early: its status first, then its final count, which ends every wait."""
        self._words[self._word(slot) + 1] = status
        self.announce(slot, final_count)

    def reset(self, slot: int) -> None:
        """Clear the slot's status before its next transfer. Only its owner, only when idle."""
        self._words[self._word(slot) + 1] = TransferStatus.OK

    def offset_bytes(self, slot: int) -> int:
        """Offset of the slot's count in the board."""
        return self._word(slot) * 4

    @property
    def ticket_offset_bytes(self) -> int:
        """Offset of the ticket in the board."""
        return _TICKET_LINE * LINE_BYTES

    def _word(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise BoardError(f"slot {slot} of {self.slots}", "Use a slot of this board")
        return (_FIRST_SLOT_LINE + slot) * LINE_BYTES // 4
