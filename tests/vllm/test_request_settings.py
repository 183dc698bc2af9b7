"""What users write into `kv_transfer_params` costs them the cache at most, and nobody else."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lamina.engines.vllm.config import ConnectorSettings, RequestSettings
from lamina.errors import SettingsError
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import CHUNK

ASKED = prompt(1, 4 * CHUNK + 2)
MALFORMED: dict[str, list[Any]] = {
    "release_after_slices": ["x", "-1", "1" * 5_000, -1, 10**400, 1e400, 1.0, True, [], {}],
    "retrieve": ["false", 0, 1, None, []],
    "store": ["false", 0, 1, None, []],
    "layerwise_overlap": [-1, "x", [], 1e400, None],
    "nonsense\nmore": [1],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in MALFORMED.items() for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_a_malformed_setting_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        RequestSettings(ConnectorSettings(), {f"lamina.{name}": value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("after", [0, 3, "0", "3"])
def test_slices_as_a_number_or_its_digits(after: Any) -> None:
    params = {"lamina.release_after_slices": after, "lamina.retrieve": False}
    settings = RequestSettings(ConnectorSettings(), params)
    assert settings.policy.release_after_slices == int(after)  # type: ignore[attr-defined]
    assert not settings.retrieve
    assert settings.store


class Hostile(dict[str, Any]):
    """Parameters that cannot be read at all."""

    def items(self) -> Any:
        raise RecursionError("it never ends")


UNREADABLE = [
    {"lamina.release_after_slices": "x"},
    {"lamina.retrieve": "false"},
    {7: 1},
    Hostile(a=1),
]


@pytest.mark.parametrize("params", UNREADABLE, ids=["slices", "retrieve", "key", "hostile"])
@pytest.mark.parametrize("mode", MODES)
def test_beside_a_retrieve_the_request_is_computed_and_others_are_cached(
    mode: str, params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads the blocks that A's retrieve still fills, so it must be known."""
    rig = Rig(mode)
    rig.hold(ASKED, 2)
    rig.add("A", ASKED, release_after_slices=1)
    rig.until(lambda: rig.client.retrieves)
    with caplog.at_level(logging.WARNING):
        rig.add("B", ASKED, params=params)
    assert rig.side.is_tracked("B")
    (said,) = [r.getMessage() for r in caplog.records if "without the cache" in r.message]
    assert said.startswith("request B ")
    rig.client.is_swift = True
    rig.run("A", "B")
    later = prompt(2, 2 * CHUNK + 2)
    rig.hold(later)
    rig.add("C", later)
    rig.run("C")
    assert rig.ended == {"A": "LENGTH", "B": "LENGTH", "C": "LENGTH"}
    assert [retrieve.request for retrieve in rig.client.retrieves] == ["A", "C"]
    assert not rig.counts["faults"]
    rig.close()


@pytest.mark.parametrize("names", [{"name": "B\udc80"}, {"name": "B", "salt": "\udc80"}])
@pytest.mark.parametrize("mode", MODES)
def test_a_request_with_a_lone_surrogate_goes_without_the_cache_alone(
    mode: str, names: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """JSON may hold one; it can be neither sent nor hashed."""
    rig = Rig(mode)
    rig.hold(ASKED, 2)
    with caplog.at_level(logging.WARNING):
        rig.add(prompt=ASKED, **names)  # type: ignore[arg-type]
    (said,) = [r.getMessage() for r in caplog.records if "without the cache" in r.message]
    assert "is no valid Unicode text" in said
    assert said.isascii()
    rig.client.is_swift = True
    rig.run(names["name"])
    later = prompt(2, 2 * CHUNK + 2)
    rig.hold(later)
    rig.add("C", later)
    rig.run("C")
    assert rig.ended == {names["name"]: "LENGTH", "C": "LENGTH"}
    assert [retrieve.request for retrieve in rig.client.retrieves] == ["C"]
    assert not rig.counts["faults"]
    rig.close()
