"""A plugin, `-p tests.support.prefer_rings`: engines on the host choose rings.

So everything that holds for direct copies is asked of rings too, by the same tests.
"""

from __future__ import annotations

from lamina import records
from lamina.devices.host import HostWorkerDevice
from lamina.geometry import Geometry


def _prefers_rings(device: HostWorkerDevice, geometry: Geometry) -> bool:
    return True


HostWorkerDevice.prefers_rings = _prefers_rings  # type: ignore[method-assign, assignment]
records.RETRIEVE_RING_BYTES = 16 << 20
records.STORE_RING_BYTES = 4 << 20
records.JOINED_PART = 1 << 40  # a record for every slice, as tests hold back slices
