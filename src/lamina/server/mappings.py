"""Engines' memory is opened and closed on a thread of its own.

Closing a mapping of a GPU's memory can take tens of milliseconds, and an engine may have hundreds.
One thread does both, in order: memory that is registered anew while its former mappings are still
being closed is opened after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lamina.board import Board
from lamina.devices.base import EngineMemory, ServerDevice
from lamina.linux import Peer
from lamina.protocol import Region
from lamina.server.turns import Turns


class Memories:
    """The thread. Used by the server's event loop only."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lamina-memory")

    def open(
        self, device: ServerDevice, peer: Peer, board: Board, regions: Sequence[Region]
    ) -> Turns[EngineMemory]:
        """Open a worker's allocations; raises what `ServerDevice.open` does."""
        opened = asyncio.wrap_future(self._thread.submit(device.open, peer, board, regions))
        yield opened
        return opened.result()

    def close(self, memory: EngineMemory) -> asyncio.Future[None]:
        """Give memory back on which no copy is in flight; done, or failed, once that is over."""
        return asyncio.wrap_future(self._thread.submit(memory.close))

    async def stop(self) -> None:
        """End the thread, once it has closed all that it was given."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))
        self._thread.shutdown()
