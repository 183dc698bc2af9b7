"""The queue of a lane: whose transfer goes next.

Workers take turns: the one served longest ago goes first, so that ten thousand transfers of one
make another wait for one of them. A worker's own go in order of arrival. A transfer whose ticket
the engine has not written yet holds nobody up, its own worker neither. Not thread-safe.
"""

from __future__ import annotations

from collections import deque

from lamina.devices.base import EngineMemory
from lamina.server.transfer import Transfer

_MAX_REMEMBERED = 256
"""Workers whose last turn is remembered; one that is forgotten counts as served long ago."""


class FairQueue:
    """Transfers that have not started."""

    def __init__(self) -> None:
        self._waiting: dict[EngineMemory, deque[Transfer]] = {}  # by worker, known by its memory
        self._last_turn: dict[EngineMemory, int] = {}  # in ascending order
        self._turn = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, transfer: Transfer) -> None:
        self._waiting.setdefault(transfer.memory, deque()).append(transfer)
        self._length += 1

    def take_ready(self) -> Transfer | None:
        """Remove and return the transfer to run now; None while none is ready."""
        for memory in sorted(self._waiting, key=lambda memory: self._last_turn.get(memory, 0)):
            transfers = self._waiting[memory]
            for index, transfer in enumerate(transfers):
                if transfer.is_ready():
                    del transfers[index]
                    self._length -= 1
                    if not transfers:
                        del self._waiting[memory]
                    self._note_turn(memory)
                    return transfer
        return None

    def _note_turn(self, memory: EngineMemory) -> None:
        self._turn += 1
        self._last_turn.pop(memory, None)
        self._last_turn[memory] = self._turn
        if len(self._last_turn) > _MAX_REMEMBERED:
            del self._last_turn[next(iter(self._last_turn))]
