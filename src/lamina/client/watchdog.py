"""The watchdog: every wait on a retrieve ends, whatever happens to the server.

A thread that makes no device call and takes no lock that is held across one, so it works while the
launching thread is stuck in a device call behind the very wait that must be ended. It forces the
retrieves whose deadline has passed or whose server has died, and again as long as they are not
acknowledged, because a server that is merely late may still write a lower count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from lamina.board import TransferStatus
from lamina.client.retrieve import Retrieve

TICK_S = 0.005


class Watchdog:
    """`in_flight` lists the retrieves to watch; it is called on the watchdog's thread."""

    def __init__(
        self, in_flight: Callable[[], Iterable[Retrieve]], clock: Callable[[], float]
    ) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="lamina-watchdog", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """A retrieve has begun: be awake until none is in flight."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def tick(self) -> bool:
        """Force what must be; whether anything is in flight."""
        retrieves = list(self._in_flight())
        for retrieve in retrieves:
            if retrieve.is_server_dead():
                retrieve.force(TransferStatus.SERVER_DIED)
            elif self._clock() >= retrieve.deadline_s:
                retrieve.force(TransferStatus.TIMED_OUT)
        return bool(retrieves)

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._wake.wait()
            self._wake.clear()
            while self.tick() and not self._stopping:
                pause.wait(TICK_S)
            if self._stopping:
                return
