"""The process of one engine of the soak.

Run as `python -m lamina_lab.soak.worker SOCKET SEED`. It reports once a second on standard output
and goes on until a line comes on standard input; then it ends all its requests, and says what is
left. Whatever may never happen ends it at once, with the reason as its last report.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

import msgspec

from lamina_lab.known.worker import WrongBytesError
from lamina_lab.soak.engine import SoakEngine

REPORT_EVERY_S = 1.0
PATIENCE_S = 60.0
_PAUSE_S = 0.004


class Progress(msgspec.Struct, kw_only=True):
    """Counts since the engine's start, and at its end what was wrong."""

    operations: dict[str, int]
    errors: dict[str, int]
    reconnected: int
    checked_bytes: int
    wrong: str = ""
    hang: str = ""
    leaks: list[str] = msgspec.field(default_factory=list)
    is_last: bool = False


def main() -> None:
    socket, seed = sys.argv[1:]
    engine = SoakEngine(Path(socket), int(seed))
    wrong, hang, leaks = "", "", list[str]()
    try:
        _work(engine)
        engine.end_all()
        hang = _wait_until_idle(engine)
        leaks = engine.leaks()
    except WrongBytesError as error:
        wrong = str(error)
    last = _progress(engine)
    last.wrong, last.hang, last.leaks, last.is_last = wrong, hang, leaks, True
    _report(last)
    if not wrong and not hang:
        engine.close()


def _work(engine: SoakEngine) -> None:
    """Operate until standard input says something, or ends because the driver has died."""
    report_at_s = time.monotonic()
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        engine.operate()
        if time.monotonic() >= report_at_s:
            report_at_s = time.monotonic() + REPORT_EVERY_S
            _report(_progress(engine))


def _wait_until_idle(engine: SoakEngine) -> str:
    """Step until every page is the engine's again; says what is missing when that never happens."""
    until_s = time.monotonic() + PATIENCE_S
    while not engine.is_idle or engine.client.transfers_in_flight:
        if time.monotonic() > until_s:
            return "its pages did not come back when it ended"
        engine.step()
        engine.end_all()
        time.sleep(_PAUSE_S)
    return ""


def _progress(engine: SoakEngine) -> Progress:
    return Progress(
        operations=dict(engine.operations),
        errors=dict(+engine.errors),
        reconnected=engine.reconnected,
        checked_bytes=engine.worker.checked_bytes,
    )


def _report(progress: Progress) -> None:
    sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
