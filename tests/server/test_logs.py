"""The log: one event one line, and nobody waits for whoever reads it."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import SettingsError
from lamina.server import log_repeats, logs
from lamina.server.counters import Counters
from lamina.server.log_lines import MAX_CHARS, json_line, plain_line
from lamina.server.log_repeats import Repeats
from lamina.server.logs import LogFile, LogHandler, LogWriter, server_log
from tests.support.full_pipe import FullPipe
from tests.support.wait import PATIENCE_S, eventually


class HeldFile(LogFile):
    """A file that keeps what is written, when `open` lets it; and fails when told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.is_reached = threading.Event()
        self.fails = False
        self.lines: list[str] = []
        self.is_closed = False
        super().__init__(Path(os.devnull))

    def write(self, line: str) -> None:
        self.is_reached.set()
        assert self.open.wait(PATIENCE_S)
        if self.fails:
            raise BrokenPipeError
        self.lines.append(line)

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.fixture
def file() -> Iterator[HeldFile]:
    held = HeldFile()
    yield held
    held.open.set()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def writer(file: HeldFile, counters: Counters) -> Iterator[LogWriter]:
    """With one line in the file's hands, so that the queue is empty and nothing leaves it."""
    made = LogWriter(file, lambda dropped: f"{dropped} dropped", counters)
    made.put("first")
    assert file.is_reached.wait(PATIENCE_S)
    yield made
    file.open.set()
    made.close(PATIENCE_S)


@pytest.fixture
def restored() -> Iterator[None]:
    """pytest's own handlers stay out of it."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    yield
    root.handlers = handlers


def record(message: Any = "it happened", *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("lamina.x", logging.INFO, __file__, 1, message, args, None)
    made.created = 1_800_000_000.1236
    if fields:
        made.fields = fields
    return made


def failed(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except Exception:
        return logging.LogRecord("x", logging.ERROR, __file__, 1, "bad", (), sys.exc_info())


# One event, one line.


def test_a_plain_line_has_time_level_logger_message_and_pairs() -> None:
    line = plain_line(record("%s joined", "engine", model="a b", device="host", kv_bytes=12))
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"2027-01-1\dT\d\d:\d\d:\d\d\.123[+-]\d\d:\d\d", time)
    assert rest == 'INFO lamina.x engine joined model="a b" device=host kv_bytes=12'


@pytest.mark.parametrize("text", ["a\nb", "a\r\x1b[2Jb", "a\u2028b\x85c", "a\x00\ud800b"], ids=repr)
def test_whatever_an_event_quotes_it_stays_one_line(text: str) -> None:
    for line in (plain_line(record("%s", text, value=text)), json_line(record(text, value=text))):
        assert line.isprintable()
        line.encode()
    assert json.loads(json_line(record(text, value=text)))["message"] == text


def test_a_value_that_could_be_taken_for_a_pair_is_quoted() -> None:
    assert plain_line(record(label='x" level=ERROR', none="")).endswith(
        'label="x\\" level=ERROR" none=""'
    )


def test_a_traceback_is_part_of_its_line() -> None:
    error = ValueError("two\nlines")
    plain, parsed = plain_line(failed(error)), json.loads(json_line(failed(error)))
    assert plain.isprintable()
    assert 'bad traceback="Traceback (most recent call last):\\n  File' in plain
    assert parsed["traceback"].endswith("ValueError: two\nlines")


def test_a_json_line_has_the_same_fields() -> None:
    event = json.loads(json_line(record("%d…", 7, kv_bytes=12, path=Path("/x"))))
    assert list(event) == ["time", "level", "logger", "message", "kv_bytes", "path"]
    assert event["time"].startswith("2027-01-1")
    assert (event["message"], event["kv_bytes"], event["path"]) == ("7…", 12, "/x")


@pytest.mark.parametrize("line_of", [plain_line, json_line])
def test_a_giant_is_cut(line_of: Callable[[logging.LogRecord], str]) -> None:
    giant = failed(ValueError("t" * 100_000))
    giant.msg = "m" * 100_000
    assert len(line_of(giant)) < 3 * MAX_CHARS


def test_arguments_that_do_not_fit_are_told() -> None:
    line = plain_line(record("%d lines", "many"))
    assert "%d lines (its arguments do not fit: %d format" in line


# Repeats.


def test_what_repeats_is_held_back_and_told() -> None:
    now_s = 0.0
    repeats = Repeats(lambda: now_s)
    shown = [repeats.is_shown(record("turned away: %s", n)) for n in range(79)]
    assert shown == [True] * 5 + [False] * 74
    assert repeats.is_shown(record("another event"))
    now_s = 9.9
    assert not repeats.told()
    assert not repeats.is_shown(record("turned away: %s", 80))
    now_s = 10.0
    (told,) = repeats.told()
    assert told.getMessage() == "75 more like it: turned away: 0"
    assert (told.name, told.levelno) == ("lamina.x", logging.INFO)
    assert repeats.is_shown(record("turned away: %s", 81)), "a new window"
    assert not repeats.told(at_end=True)


def test_what_is_held_back_at_the_end_is_told() -> None:
    repeats = Repeats(lambda: 0.0)
    for _ in range(log_repeats.SHOWN + 2):
        repeats.is_shown(record())
    assert [told.getMessage() for told in repeats.told(at_end=True)] == [
        "2 more like it: it happened"
    ]


def test_what_is_held_back_is_told_without_another_line(
    file: HeldFile, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_TICK_S", 0.001)
    now_s = 0.0
    file.open.set()
    handler = LogHandler(file, plain_line, counters, lambda: now_s)
    for _ in range(7):
        handler.handle(record())
    eventually(lambda: len(file.lines) == 5)
    now_s = 10.0
    eventually(lambda: len(file.lines) == 6)
    assert "2 more like it: it happened" in file.lines[-1]
    handler.finish()


def test_the_end_of_the_log_tells_what_is_held_back(file: HeldFile, counters: Counters) -> None:
    file.open.set()
    handler = LogHandler(file, plain_line, counters, lambda: 0.0)
    for _ in range(7):
        handler.handle(record())
    handler.finish()
    assert "2 more like it: it happened" in file.lines[-1]


# The queue.


def test_a_full_queue_drops_and_tells_how_many(
    writer: LogWriter, file: HeldFile, counters: Counters
) -> None:
    for number in range(logs.MAX_QUEUED_LINES + 3):
        writer.put(f"line {number}")
    assert counters.log_lines_dropped == 3
    file.open.set()
    eventually(lambda: len(file.lines) == 1 + logs.MAX_QUEUED_LINES)
    assert file.lines[-1] == f"line {logs.MAX_QUEUED_LINES - 1}"
    writer.put("afterwards")
    writer.put("and on")
    eventually(lambda: file.lines[-3:] == ["3 dropped", "afterwards", "and on"])


def test_lines_that_cannot_be_written_are_counted(
    writer: LogWriter, file: HeldFile, counters: Counters
) -> None:
    file.fails = True
    file.open.set()
    writer.put("second")
    eventually(lambda: counters.log_lines_dropped == 2)
    file.fails = False
    writer.put("third")
    eventually(lambda: file.lines == ["2 dropped", "third"])


def test_closing_writes_what_is_queued(writer: LogWriter, file: HeldFile) -> None:
    writer.put("second")
    file.open.set()
    writer.close(PATIENCE_S)
    assert file.lines == ["first", "second"]
    assert file.is_closed


def test_closing_does_not_wait_for_a_reader(writer: LogWriter, file: HeldFile) -> None:
    writer.put("second")
    writer.close(0.001)  # returns, or the test would not end
    assert not file.lines


def test_a_failure_to_log_ends_nothing(file: HeldFile, counters: Counters) -> None:
    class Unsayable:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    handler = LogHandler(file, plain_line, counters)
    file.open.set()
    handler.handle(record("fine", value=Unsayable()))
    handler.handle(record(Unsayable()))
    handler.finish()
    assert "RuntimeError('no words') in a log line" in file.lines[0]
    assert len(file.lines) == 2


# The file.


def test_a_log_file_is_private_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for line in ("one", "two"):
        file = LogFile(path)
        file.write(line)
        file.close()
    assert path.read_text() == "one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_reopening_goes_on_in_a_new_file(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "log")
    file.write("one")
    (tmp_path / "log").rename(tmp_path / "log.1")
    file.write("two")
    file.reopen()
    file.write("three")
    file.close()
    assert (tmp_path / "log.1").read_text() == "one\ntwo\n"
    assert (tmp_path / "log").read_text() == "three\n"


def test_a_file_that_cannot_be_reopened_is_gone_on_with(
    tmp_path: Path, counters: Counters, restored: None
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    with server_log("info", directory / "log", False, counters) as writer:
        directory.rename(tmp_path / "moved")
        writer.reopen()
        eventually(lambda: "the log goes on in the former file" in
                   (tmp_path / "moved" / "log").read_text())  # fmt: skip


def test_a_line_that_was_cut_off_does_not_swallow_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write = LogFile(tmp_path / "log"), os.write
    room = 3

    def full_disk(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "no space left")
        written = write(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="no space"):
        file.write("first")
    monkeypatch.undo()
    file.write("second")
    file.close()
    assert (tmp_path / "log").read_text() == "fir\nsecond\n"


def test_a_pipe_that_others_made_non_blocking_is_waited_for(counters: Counters) -> None:
    pipe = FullPipe()
    file = LogFile(Path(f"/proc/self/fd/{pipe.writer}"))  # opened non-blocking
    writer = LogWriter(file, str, counters)
    writer.put("the line")
    assert pipe.read_line() == "the line\n"
    assert counters.log_lines_dropped == 0
    writer.close(PATIENCE_S)
    pipe.close()


@pytest.mark.parametrize("kind", ["directory", "missing", "pipe"])
def test_a_log_file_that_cannot_be_opened_is_refused(
    tmp_path: Path, counters: Counters, restored: None, kind: str
) -> None:
    path = tmp_path / "missing" / "log" if kind == "missing" else tmp_path
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with (
        pytest.raises(SettingsError, match=f"{path} cannot be opened.*--log-file"),
        server_log("info", path, False, counters),
    ):
        pass


def test_without_a_standard_error_nothing_is_written_to_its_number(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    file = LogFile()
    file.write("line")
    file.close()
    assert capfd.readouterr().err == ""


# All that the process says.


def test_everything_goes_to_the_log_and_nothing_to_standard_error(
    tmp_path: Path,
    counters: Counters,
    restored: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "log"
    former = logging.getLogger("lamina").level
    with warnings.catch_warnings(), server_log("info", path, True, counters):
        warnings.simplefilter("always")
        logging.getLogger("asyncio").error("a task failed")
        logging.getLogger("lamina.server").info("joined")
        logging.getLogger("lamina.server").debug("a detail")
        logs.set_level("debug")
        logging.getLogger("lamina.server").debug("another detail")
        warnings.warn("old habit", stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["message"][:14] for event in said[:3]] == [
        "a task failed", "joined", "another detail"
    ]  # fmt: skip
    assert "old habit" in said[3]["message"]
    assert "ZeroDivisionError" in said[4]["traceback"]
    assert capfd.readouterr().err == ""
    assert logging.getLogger("lamina").level == former


def test_a_server_that_breaks_says_so_in_its_log(
    tmp_path: Path, counters: Counters, restored: None
) -> None:
    with pytest.raises(SystemExit) as end, server_log("info", tmp_path / "log", False, counters):
        raise RuntimeError("broken")
    assert end.value.code == 1
    assert "RuntimeError: broken" in (tmp_path / "log").read_text()


def test_a_level_that_there_is_not(counters: Counters, restored: None) -> None:
    with (
        pytest.raises(SettingsError, match=r"'loud'. Use DEBUG"),
        server_log("loud", None, False, counters),
    ):
        pass
