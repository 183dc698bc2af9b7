"""A pipe that nobody has read: whoever writes to it waits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select

from tests.support.wait import PATIENCE_S

_PIPE_BYTES = 4096
_FILLING = b"."


class FullPipe:
    """`reader` and `writer` are its descriptors; `read` what was written since it was full."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self.writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writer, _FILLING * _PIPE_BYTES)
        os.set_blocking(self.writer, True)

    def read_line(self) -> str:
        """The next line that somebody writes; fails when none comes."""
        read = b""
        while not read.endswith(b"\n"):
            is_readable, _, _ = select.select([self.reader], [], [], PATIENCE_S)
            assert is_readable, "nobody writes a line"
            read += os.read(self.reader, 1)
        return read.lstrip(_FILLING).decode()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)
