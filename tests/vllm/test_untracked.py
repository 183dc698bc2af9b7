"""A request that goes without the cache may still find a retrieve's blocks in vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.scheduler_harness import MODES, Rig
from tests.vllm.test_scheduler_hazards import ASKED, SMALL, promoted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bypass", [{"nonsense": 1}, {"retrieve": False, "store": False}])
def test_a_sharer_that_goes_without_the_cache_waits_for_its_slices_too(
    mode: str, bypass: dict[str, Any]
) -> None:
    """vLLM gives it blocks that an aborted owner's retrieve still fills."""
    rig = Rig(mode, blocks=SMALL)
    retrieve = promoted(rig)
    rig.abort("A")
    rig.add("B", ASKED, **bypass)
    rig.run("B")
    assert retrieve.is_over
    rig.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_whose_prompt_may_still_grow_is_gated_too(mode: str) -> None:
    rig = Rig(mode, blocks=SMALL)
    promoted(rig)
    rig.abort("A")
    rig.add("B", ASKED, resumable=True)
    assert rig.side.is_tracked("B")
    rig.abort("B")
    rig.close()
