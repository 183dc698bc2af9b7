"""What the policy learns about a step that waits for slices already, under vLLM's schedulers."""

from __future__ import annotations

import pytest

from lamina.client import AutoPolicy, Release, ReleaseQuery
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK, LAYERS

SYNCHRONOUS, OUTSIDE = Release(1, 0), Release(1, 1)


class Scene:
    """A rig whose retrieves are planned as the test says, at a clock that stands still."""

    def __init__(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.releases: list[Release] = []
        self.queries: list[ReleaseQuery] = []

        def decide(policy: AutoPolicy, query: ReleaseQuery) -> Release:
            self.queries.append(query)
            return self.releases[len(self.queries) - 1]

        monkeypatch.setattr(AutoPolicy, "decide", decide)
        self.rig = Rig(mode, settings={"layerwise_overlap": "auto"})
        monkeypatch.setattr(self.rig.side._prefixes, "clock", lambda: 0.0)

    def add(self, chunks: int, release: Release) -> None:
        """A request with a hit of so many chunks."""
        self.releases.append(release)
        seed = len(self.releases)
        asked = prompt(seed, chunks * CHUNK + 10)
        self.rig.hold(asked)
        self.rig.add(f"r{seed}", asked, max_tokens=20)

    @property
    def gated_chunks(self) -> list[float]:
        """How long the step waits that each request was asked about, in chunks on the link."""
        waits = []
        for query in self.queries:
            assert query.speed is not None
            waits.append(query.batch.gated_s / (CHUNK * query.speed.copy_s_per_token))
        return waits


@pytest.fixture(params=MODES)
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(request.param, monkeypatch)


def test_a_step_waits_until_the_last_retrieve_that_it_reads_has_landed(scene: Scene) -> None:
    for chunks in (4, 2, 1):
        scene.add(chunks, SYNCHRONOUS)
    scene.rig.step()
    assert scene.gated_chunks == pytest.approx([0, 4, 6])
    scene.rig.close()


def test_a_step_does_not_wait_for_who_is_held(scene: Scene) -> None:
    for _ in range(2):
        scene.add(4, OUTSIDE)
    scene.rig.step()
    assert scene.gated_chunks == [0, 0]
    assert scene.queries[1].lane_busy_s > 0
    scene.rig.close()


def test_a_step_waits_for_the_rest_of_a_retrieve_whose_request_was_released(scene: Scene) -> None:
    scene.add(4, OUTSIDE)
    scene.rig.until(lambda: scene.rig.client.retrieves)
    scene.rig.client.retrieves[0].land(1)
    scene.rig.until(lambda: scene.rig.releases("r1"))
    scene.rig.catch_up()
    assert scene.rig.client.retrieves[0].landed_slices < LAYERS
    scene.add(4, OUTSIDE)
    scene.rig.until(lambda: len(scene.queries) == 2)
    assert scene.gated_chunks == pytest.approx([0, 4])
    scene.rig.close()
