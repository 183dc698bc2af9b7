"""A request that goes without the cache may still find a load's blocks in vLLM's own."""

from __future__ import annotations

import pytest

from tests.vllm.scheduler_harness import MODES, Rig
from tests.vllm.test_scheduler_hazards import ASKED, SMALL, promoted


@pytest.mark.parametrize("mode", MODES)
def test_a_sharer_with_settings_that_are_refused_waits_for_its_slices_too(mode: str) -> None:
    """vLLM gives it blocks that an aborted owner's load still fills."""
    rig = Rig(mode, blocks=SMALL)
    load = promoted(rig)
    rig.abort("A")
    rig.add("B", ASKED, nonsense=1)
    rig.run("B")
    assert load.is_over
    rig.close()
