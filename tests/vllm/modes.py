"""The ways to retrieve a hit that every scenario runs with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.tiny_llama import LAYERS

MODES: dict[str, dict[str, Any]] = {
    "whole-async": {"layerwise_overlap": 0},
    "whole-sync": {"layerwise_overlap": LAYERS, "release_after_slices": 0},
    "1-layer-async": {"layerwise_overlap": 1, "release_after_slices": 1},
    "1-layer-sync": {"layerwise_overlap": 1, "release_after_slices": 0},
    "3-layers-async": {"layerwise_overlap": 3, "release_after_slices": 1},
    "3-layers-sync": {"layerwise_overlap": 3, "release_after_slices": 0},
}
"""Parameters of a request: whole, 1 and 3 layers a slice, asynchronous and synchronous."""

in_every_mode = pytest.mark.parametrize("mode", list(MODES.values()), ids=list(MODES))
