"""A server for the soak: `lamina serve` whose next copy fails each time it gets SIGUSR1.

Run as `python -m lamina_lab.soak.server SOCKET ARENA_BYTES CHUNK_TOKENS`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from types import FrameType

from lamina.copies import CopyList
from lamina.devices.base import CopyStream, Direction, EngineMemory
from lamina.devices.host import NAME, HostCopyStream, HostServerDevice
from lamina.errors import DeviceError
from lamina.server.main import Server
from lamina.settings import ServerSettings


class BrittleDevice(HostServerDevice):
    """A host device of which a copy in either direction fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def break_next(self, number: int, frame: FrameType | None) -> None:
        self.is_broken = True

    def stream(self, direction: Direction) -> CopyStream:
        return _BrittleStream(direction, self)


class _BrittleStream(HostCopyStream):
    def __init__(self, direction: Direction, device: BrittleDevice) -> None:
        super().__init__(direction, None)
        self._device = device

    def copy(self, memory: EngineMemory, copies: CopyList) -> None:
        if self._device.is_broken:
            self._device.is_broken = False
            raise DeviceError("the link broke", "This is a test of what happens then")
        super().copy(memory, copies)


def main() -> None:
    socket, arena_bytes, chunk_tokens = sys.argv[1:]
    device = BrittleDevice()
    signal.signal(signal.SIGUSR1, device.break_next)
    settings = ServerSettings(
        socket=Path(socket), arena_bytes=int(arena_bytes), chunk_tokens=int(chunk_tokens)
    )
    asyncio.run(Server(settings, {NAME: device}).run())


if __name__ == "__main__":
    main()
