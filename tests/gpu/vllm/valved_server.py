"""A real server, as a process, whose copies a test can slow down, fail and alter.

    python -m tests.gpu.vllm.valved_server SOCKET DEVICE

Reads commands from its standard input, one JSON object a line, and answers each with one. DEVICE is
`host` or `cuda`. A test process cannot hold such a server itself: CUDA IPC does not open memory in
the process that exported it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lamina import records
from lamina.devices.base import ServerDevice
from lamina.devices.cuda import server_devices
from lamina.devices.host import HostServerDevice
from lamina.errors import DeviceError
from lamina.server.main import Server
from lamina.settings import ServerSettings
from tests.support.valve import Valve, ValvedDevice
from tests.vllm.engine import CHUNK_TOKENS

ARENA_BYTES = 1 << 30


def split_records() -> None:
    """Where transfers go through rings: a record for every slice, as tests hold back slices. In the
    server's process as in the engine's."""
    records.JOINED_PART = 1 << 40


class Lane(Valve):
    """What retrieves go through: a pace, and perhaps a copy that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.pace_s = 0.0
        self.fails_after: int | None = None

    def pass_one(self) -> None:
        time.sleep(self.pace_s)  # a slow link
        if self.fails_after is not None:
            if self.fails_after == 0:
                self.fail_next(DeviceError("the link broke", "Mend it"))
            self.fails_after = self.fails_after - 1 if self.fails_after else None
        super().pass_one()


class Control:
    """Carries out commands; all that touches the server's state runs on its event loop."""

    def __init__(self, server: Server, lane: Lane) -> None:
        self._server = server
        self._lane = lane

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do"):
            case "gauges":
                return dict(self._server.gauges()) | {"filled": self._server.arena.is_filled}
            case "retrieves":
                self._lane.pace_s = command["pace_ms"] / 1e3
                self._lane.fails_after = command["fails_after"]
                self._lane.heal()
                return {}
            case "write":
                return {"old": self._write(**command)}
            case unknown:
                raise ValueError(unknown)

    def _write(self, key: str, offset: int, data: str) -> str:
        """Overwrite bytes of a stored chunk; returns what was there."""
        chunk = self._server.index.get(bytes.fromhex(key))
        assert chunk is not None
        new = bytes.fromhex(data)
        old = ctypes.string_at(chunk.address + offset, len(new))
        ctypes.memmove(chunk.address + offset, new, len(new))
        return old.hex()


async def serve(path: Path, device: str) -> None:
    split_records()
    lane = Lane()
    devices: dict[str, ServerDevice] = {"host": HostServerDevice()}
    devices |= server_devices() if device == "cuda" else {}
    valved = {name: ValvedDevice(inner) for name, inner in devices.items()}
    for valved_device in valved.values():
        valved_device.retrieves = lane
    settings = ServerSettings(socket=path, arena_bytes=ARENA_BYTES, chunk_tokens=CHUNK_TOKENS)
    server = Server(settings, valved)
    control = Control(server, lane)
    loop = asyncio.get_running_loop()

    async def answer(line: str) -> dict[str, Any]:
        return control.handle(json.loads(line))

    def read_commands() -> None:
        for line in sys.stdin:
            reply = asyncio.run_coroutine_threadsafe(answer(line), loop).result()
            print(json.dumps(reply), flush=True)
        loop.call_soon_threadsafe(server.stop)

    def ready() -> None:
        threading.Thread(target=read_commands, daemon=True).start()

    await server.run(ready)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
