"""The server's log, which can hold up nobody.

Loggers put finished lines into a bounded queue and go on; one daemon thread writes them. Its writes
may block (a pipe that nobody reads) or fail (one whose reader is gone, a full disk): then lines are
dropped and counted (`Counters.log_lines_dropped`), and the next that gets through tells how many.
What repeats is held back (`Repeats`), so that a flood of one event does not push out the others.

Locks: a handler's lock is held while a line is made, then the writer's while it is queued; never
both by the writing thread, and neither while it writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lamina.errors import LaminaError, SettingsError
from lamina.server.counters import Counters
from lamina.server.log_lines import Format, json_line, plain_line, record_of
from lamina.server.log_repeats import Repeats

log = logging.getLogger(__name__)

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MAX_QUEUED_LINES = 1000
CLOSE_WITHIN_S = 0.5
"""So long an exit waits for what is queued to be written."""
_TICK_S = 1.0
_STDERR = 2


def check_level(name: str) -> None:
    """Raise `SettingsError` for a level that there is not."""
    if name.upper() not in LEVELS:
        raise SettingsError(f"there is no log level {name!r}", f"Use {', '.join(LEVELS)}")


def set_level(name: str) -> None:
    """What Lamina's own loggers say from now on. Any thread. Raises `SettingsError`."""
    check_level(name)
    logging.getLogger("lamina").setLevel(name.upper())


class LogFile:
    """Where lines end up: a file that is appended to, or standard error without a `path`.

    For one thread. Raises `OSError` when it cannot be opened, reopened or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._is_midline = False
        # A process that is started without a standard error may have opened anything as number 2.
        self._fd = _open(path or Path(os.devnull)) if path or not sys.__stderr__ else _STDERR

    def write(self, line: str) -> None:
        """Write a line, however long that takes."""
        start = "\n" if self._is_midline else ""  # a write before has failed half-way
        left = memoryview(f"{start}{line}\n".encode())
        while left:
            try:
                written = os.write(self._fd, left)
            except BlockingIOError:  # whoever shares a standard error may have made it so
                _wait_until_writable(self._fd)
                continue
            left = left[written:]
            self._is_midline = bool(left)

    def reopen(self) -> None:
        """Go on in a new file of the same name, where the former has been moved away."""
        if self._path is not None:
            former, self._fd, self._is_midline = self._fd, _open(self._path), False
            os.close(former)

    def close(self) -> None:
        if self._fd != _STDERR:
            os.close(self._fd)


class LogWriter:
    """The queue and the thread behind it. `put` and `reopen` are for any thread.

    `note` makes the line that tells how many were dropped; `tick` is called about once a second
    by the thread, when it has nothing to write.
    """

    def __init__(
        self,
        file: LogFile,
        note: Callable[[int], str],
        counters: Counters,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = file
        self._note = note
        self._counters = counters
        self._tick = tick
        self._lines: deque[tuple[int, str]] = deque()  # each with how many were dropped before it
        self._dropped = 0  # since the last line that was queued
        self._missed = 0  # before the line that is next to be written; the thread's own
        self._is_reopen_due = False
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lamina log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line, or drop it when the queue is full. Never blocks, never raises."""
        with self._changed:
            if len(self._lines) >= MAX_QUEUED_LINES:
                self._dropped += 1
                self._counters.log_lines_dropped += 1
                return
            self._lines.append((self._dropped, line))
            self._dropped = 0
            self._changed.notify()

    def reopen(self) -> None:
        """Have the file opened anew before the next line is written."""
        with self._changed:
            self._is_reopen_due = True
            self._changed.notify()

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Write what is queued for at most so long; what is left then is lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._lines or self._is_reopen_due or self._is_closing):
                    self._changed.wait(_TICK_S)
                is_reopen_due, self._is_reopen_due = self._is_reopen_due, False
                entry = self._lines.popleft() if self._lines else None
                is_done = entry is None and self._is_closing
            if is_reopen_due:
                self._reopen()
            if entry is not None:
                self._write(*entry)
            elif is_done:
                break
            else:
                self._tick()
        self._file.close()

    def _reopen(self) -> None:
        try:
            self._file.reopen()
        except OSError as error:
            log.error("the log goes on in the former file: %s", error)

    def _write(self, dropped: int, line: str) -> None:
        self._missed += dropped
        try:
            if self._missed:
                self._file.write(self._note(self._missed))
                self._missed = 0
            self._file.write(line)
        except OSError:
            self._missed += 1
            with self._changed:
                self._counters.log_lines_dropped += 1


class LogHandler(logging.Handler):
    """Turns records into lines for the writer. Any thread."""

    def __init__(
        self,
        file: LogFile,
        line_of: Format,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._line_of = line_of
        self._repeats = Repeats(clock)
        self.writer = LogWriter(file, self._note, counters, self._tell)

    def emit(self, record: logging.LogRecord) -> None:
        self._tell()
        try:
            if self._repeats.is_shown(record):
                self.writer.put(self._line_of(record))
        except Exception as error:  # not `handleError`, which writes to standard error
            failed = record_of(record.name, logging.ERROR, "%r in a log line", error)
            self.writer.put(self._line_of(failed))

    def finish(self) -> None:
        """Tell what is held back, and write what is queued for at most `CLOSE_WITHIN_S`."""
        self._tell(at_end=True)
        self.writer.close()

    def _tell(self, *, at_end: bool = False) -> None:
        assert self.lock is not None
        with self.lock:  # reentrant: `emit` has it
            for record in self._repeats.told(at_end=at_end):
                self.writer.put(self._line_of(record))

    def _note(self, dropped: int) -> str:
        return self._line_of(record_of(__name__, logging.WARNING, "%d log lines dropped", dropped))


@contextlib.contextmanager
def server_log(
    level: str, path: Path | None, as_json: bool, counters: Counters
) -> Iterator[LogWriter]:
    """All that this process has to say goes to the server's log within the block, for which this
    takes over the root logger, warnings, and what Python says of exceptions that nobody caught.

    Raises `SettingsError` for a level that there is not, or a file that cannot be opened.
    """
    check_level(level)
    try:
        file = LogFile(path)
    except OSError as error:
        raise SettingsError(
            f"the log file {path} cannot be opened: {error.strerror}", "Choose another --log-file"
        ) from error
    handler = LogHandler(file, json_line if as_json else plain_line, counters)
    former_level = logging.getLogger("lamina").level
    hooks = threading.excepthook, sys.unraisablehook
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = _log_uncaught
    sys.unraisablehook = _log_uncaught
    try:
        set_level(level)
        yield handler.writer
    except LaminaError:  # the command says it
        raise
    except Exception:  # as Python would on standard error, which may hold up the exit
        log.exception("the server ends")
        raise SystemExit(1) from None
    finally:
        logging.getLogger("lamina").setLevel(former_level)
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.finish()


def _log_uncaught(uncaught: Any) -> None:
    """Of a thread, or of a finalizer: their arguments have the same names."""
    exception = (uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback)
    log.error("an exception that nobody caught", exc_info=exception)


def _open(path: Path) -> int:
    """Without waiting: a pipe that nobody has open for reading is an error."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    return os.open(path, flags, 0o600)


def _wait_until_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
