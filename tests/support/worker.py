"""The worker of known bytes as tests have it: small, on a host, connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry
from lamina_lab.known.content import equal_layers
from lamina_lab.known.memory import HostKvSpace
from lamina_lab.known.worker import KnownWorker

BLOCKS_PER_CHUNK = equal_layers().blocks_per_chunk(0)


class PageWorker(KnownWorker):
    """`options` are those of `KnownWorker`."""

    def __init__(
        self,
        socket: Path,
        geometry: Geometry | None = None,
        blocks: int = 64,
        device: HostWorkerDevice | None = None,
        **options: Any,
    ) -> None:
        super().__init__(socket, HostKvSpace(geometry or equal_layers(), blocks, device), **options)
        self.client.connect()
