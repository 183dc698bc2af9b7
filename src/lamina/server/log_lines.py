"""What one event looks like in the log: exactly one line, plain or JSON.

    2026-03-01T12:00:00.123+00:00 INFO lamina.server.sessions vLLM worker (pid 7) joined model=… …

A plain line is time, level, logger and message with blanks between, then pairs `key=value`: the
record's `fields` (`log.info(…, extra={"fields": {…}})`) and, of an exception, `traceback`. What
cannot be printed is escaped as in a Python string, a line break as `\\n`, so that nothing that an
event quotes can begin a line of its own; a value with blanks is quoted as in JSON. A JSON line is
an object with the same names: `time`, `level`, `logger`, `message`, and the pairs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

Format: TypeAlias = Callable[[logging.LogRecord], str]

MAX_CHARS = 8000
"""Of a message or a traceback; more is cut off. With the length of the queue it bounds memory."""

_traceback_of = logging.Formatter().formatException


def plain_line(record: logging.LogRecord) -> str:
    """For people. Any thread."""
    head = f"{_time_of(record)} {record.levelname} {record.name} {_printable(message_of(record))}"
    pairs = [f"{key}={_value(value)}" for key, value in _pairs_of(record).items()]
    return " ".join([head, *pairs])


def json_line(record: logging.LogRecord) -> str:
    """For programs. Any thread."""
    event = {
        "time": _time_of(record),
        "level": record.levelname,
        "logger": record.name,
        "message": message_of(record),
        **_pairs_of(record),
    }
    return json.dumps(event, default=str)


def message_of(record: logging.LogRecord) -> str:
    """What the event says, as it was said; whatever its arguments are. Any thread."""
    try:
        return _cut(record.getMessage())
    except Exception as error:  # a fault of whoever logs must not end what it was doing
        return _cut(f"{record.msg} (its arguments do not fit: {error})")


def record_of(logger: str, level: int, message: str, *args: object) -> logging.LogRecord:
    """An event that the log itself tells of. Any thread."""
    return logging.LogRecord(logger, level, __file__, 0, message, args, None)


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _pairs_of(record: logging.LogRecord) -> dict[str, Any]:
    pairs: dict[str, Any] = dict(getattr(record, "fields", {}))
    if record.exc_info and record.exc_info[0] is not None:
        pairs["traceback"] = _cut(_traceback_of(record.exc_info))
    return pairs


def _value(value: Any) -> str:
    text = str(value)
    if text and text.isprintable() and not set(text) & set(' "='):
        return text
    return _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
