"""vLLM 0.26.0's configuration is the one that the table of identities was made for."""

from __future__ import annotations

import pytest

from tests.gpu.vllm.engine import GpuEngine


def test_the_committed_list_names_the_fields_of_0_26(engine: GpuEngine) -> None:
    import vllm
    from vllm.config import VllmConfig

    from tests.vllm.test_fields import CLASSES_0_26, classes_of

    if not vllm.__version__.startswith("0.26."):
        pytest.skip("another vLLM")
    assert classes_of(VllmConfig) == CLASSES_0_26


def test_the_loaded_weights_can_be_looked_at(engine: GpuEngine) -> None:
    """And a change of one number of them is seen."""
    import torch

    loaded = engine.worker._worker._weights
    assert loaded.are_watched
    assert loaded.change() == ""
    weight = max(loaded._model.parameters(), key=lambda parameter: parameter.numel())
    with torch.no_grad():
        flat = weight.view(-1)
        was = flat[-1].clone()
        flat[-1] = was + 1
        assert loaded.change()
        flat[-1] = was
    assert loaded.change() == ""
