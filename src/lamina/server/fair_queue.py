"""The queue of a lane: transfers that have not started, and whose goes next.

Lanes ask every half millisecond, so the answer must not cost more the more stores a hung engine has
queued. Tickets of one worker are written in order, and voided in order: while the first of those
that wait for one is not ready, none behind it is, and its words on the board are all that is read.
Who is cancelled need not wait for a ticket any more, wherever it stands: it says so itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Set

from lamina.board import reached
from lamina.devices.base import EngineMemory
from lamina.server.transfer import Transfer

_MAX_REMEMBERED = 256
"""Workers whose last turn is remembered; one that is forgotten counts as served long ago."""


class FairQueue:
    """Transfers that have not started: whose goes next. Not thread-safe, but for their `cancel`.

    Workers take turns: the one served longest ago goes first, so that ten thousand transfers of one
    make another wait for one of them. A worker's own go in order of arrival. A transfer whose
    ticket the engine has not written yet makes nobody wait but those with a later ticket.
    """

    def __init__(self) -> None:
        self._waiting: dict[EngineMemory, _Line] = {}  # by worker, known by its memory
        self._last_turn: dict[EngineMemory, int] = {}  # in ascending order
        self._turn = 0
        self._arrivals = 0
        self._length = 0
        self._cancelled: deque[Transfer] = deque()
        """Told by any thread, for `take_ready`; perhaps of transfers that have been taken."""

    def __len__(self) -> int:
        return self._length

    def append(self, transfer: Transfer) -> None:
        transfer.tell_cancelled(self._cancelled.append)
        self._arrivals += 1
        self._waiting.setdefault(transfer.memory, _Line()).append(self._arrivals, transfer)
        self._length += 1

    def take_ready(self, besides: Container[EngineMemory] = ()) -> Transfer | None:
        """Remove and return the transfer to run now, of no worker in `besides`; None while none is
        ready.

        Reads a ticket and a void word for each worker that waits, however much it has queued.
        """
        if self._cancelled:
            self._free_cancelled()
        for memory in sorted(self._waiting, key=lambda memory: self._last_turn.get(memory, 0)):
            if memory in besides:
                continue
            line = self._waiting[memory]
            if (ready := line.take_ready()) is not None:
                self._length -= 1
                if not line:
                    del self._waiting[memory]
                self._note_turn(memory)
                return ready
        return None

    def _free_cancelled(self) -> None:
        cancelled = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        for memory in {transfer.memory for transfer in cancelled} & self._waiting.keys():
            self._waiting[memory].free(cancelled)

    def _note_turn(self, memory: EngineMemory) -> None:
        self._turn += 1
        self._last_turn.pop(memory, None)
        self._last_turn[memory] = self._turn
        if len(self._last_turn) > _MAX_REMEMBERED:
            del self._last_turn[next(iter(self._last_turn))]


class _Line:
    """Transfers of one worker, with the numbers of their arrival."""

    def __init__(self) -> None:
        self._free: deque[tuple[int, Transfer]] = deque()
        """Those that wait for no ticket: cancelled ones, then the others in order of arrival. Their
        first may wait for room in its ring, and those behind it too: a ring has one order."""
        self._ticketed: deque[tuple[int, int, Transfer]] = deque()
        """The others, each after its ticket, in order of tickets and then of arrival."""

    def __len__(self) -> int:
        return len(self._free) + len(self._ticketed)

    def append(self, arrival: int, transfer: Transfer) -> None:
        if (ticket := transfer.ticket) is None:
            self._free.append((arrival, transfer))
            return
        place = len(self._ticketed)  # engines submit in order of tickets, nearly always
        while place and not reached(ticket, self._ticketed[place - 1][0]):
            place -= 1
        self._ticketed.insert(place, (ticket, arrival, transfer))

    def free(self, cancelled: Set[Transfer]) -> None:
        """These wait for nothing any more, as far as they are here. They go first: it costs the
        others nothing."""
        waiting = [each[-1] for each in self._free] + [each[-1] for each in self._ticketed]
        freed = [transfer for transfer in waiting if transfer in cancelled]
        if freed:
            self._free = deque(each for each in self._free if each[1] not in cancelled)
            self._ticketed = deque(each for each in self._ticketed if each[2] not in cancelled)
            self._free.extendleft((0, transfer) for transfer in reversed(freed))

    def take_ready(self) -> Transfer | None:
        """Remove and return the first that came of those that are ready."""
        if self._ticketed and self._ticketed[0][2].is_ready():
            _, arrival, transfer = self._ticketed[0]
            if not self._free or arrival < self._free[0][0] or not self._free[0][1].is_ready():
                self._ticketed.popleft()
                return transfer
        if self._free and self._free[0][1].is_ready():
            return self._free.popleft()[1]
        return None
