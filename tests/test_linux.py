"""Waits shorter than a millisecond."""

from __future__ import annotations

import signal
import socket
import statistics
import threading
import time

from lamina.linux import wait_readable

WAIT_S = 300e-6


def test_a_short_wait_is_not_rounded_up_to_milliseconds() -> None:
    silent, other = socket.socketpair()
    with silent, other:

        def took_s() -> float:
            start_s = time.perf_counter()
            assert not wait_readable(silent.fileno(), WAIT_S)
            return time.perf_counter() - start_s

        medians = [statistics.median(took_s() for _ in range(20)) for _ in range(5)]
    assert WAIT_S * 0.9 < min(medians) < 1e-3


def test_it_ends_when_something_arrives() -> None:
    mine, other = socket.socketpair()
    with mine, other:
        assert not wait_readable(mine.fileno(), 0.0)
        threading.Thread(target=other.send, args=(b"x",)).start()
        assert wait_readable(mine.fileno(), 60.0)
        mine.recv(1)
        other.close()
        assert wait_readable(mine.fileno(), 0.0), "it has ended"


def test_a_signal_does_not_end_it() -> None:
    """Its handler runs, and the wait goes on until what it waits for arrives."""
    mine, other = socket.socketpair()
    with mine, other:
        before = signal.signal(signal.SIGALRM, lambda *_: other.send(b"x"))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert wait_readable(mine.fileno(), 60.0)
        finally:
            signal.signal(signal.SIGALRM, before)
