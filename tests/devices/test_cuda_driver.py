"""What the CUDA driver is told, on a library that only listens."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.devices import cuda_driver as driver

STREAM_ORDER, ANY_ORDER = 1, 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and _ANY of `cuda.h`."""


class Library:
    """Has one call, and notes in which order its sources may be read."""

    def __init__(self, call: str) -> None:
        self.orders: list[int] = []
        setattr(self, call, self._copy_batch)

    def _copy_batch(self, *arguments: Any) -> int:
        attributes = arguments[4]._obj
        self.orders.append(attributes.source_access_order)
        return 0


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"])
@pytest.mark.parametrize(("to_device", "order"), [(True, ANY_ORDER), (False, STREAM_ORDER)])
def test_the_arena_is_read_in_any_order_and_device_memory_in_the_streams(
    monkeypatch: pytest.MonkeyPatch, call: str, to_device: bool, order: int
) -> None:
    library = Library(call)
    monkeypatch.setattr(driver, "_driver", lambda: library)
    driver.copy_batch(1, 2, 3, 4, 5, to_device=to_device)
    assert library.orders == [order]
