"""Release policies: what the settings ask for is what each retrieve gets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.client import FixedPolicy, Release, ReleaseQuery, WholePolicy, policy_of
from lamina.settings import ClientSettings


def query(layers: int = 32) -> ReleaseQuery:
    return ReleaseQuery(layers, retrieve_tokens=1024, compute_tokens=64)


@pytest.mark.parametrize("layers", [1, 2, 32])
def test_whole_is_one_slice_of_all_layers_released_when_it_has_landed(layers: int) -> None:
    assert WholePolicy().decide(query(layers)) == Release(layers, 1)


@pytest.mark.parametrize("release_after_slices", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 3, 32])
def test_a_fixed_policy_answers_its_width_and_its_slices(
    width: int, release_after_slices: int
) -> None:
    policy = FixedPolicy(width, release_after_slices)
    assert policy.decide(query()) == Release(width, release_after_slices)


def test_a_width_above_the_layers_moves_them_all_at_once() -> None:
    assert FixedPolicy(64).decide(query(32)).layers_per_slice == 32


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 1_000_000), st.integers(1, 1_000_000))
def test_a_fixed_policy_does_not_look_at_tokens(layers: int, retrieve: int, compute: int) -> None:
    policy = FixedPolicy(4, 2)
    assert policy.decide(ReleaseQuery(layers, retrieve, compute)) == policy.decide(query(layers))


@pytest.mark.parametrize(
    ("overlap", "policy"),
    [
        (False, WholePolicy),
        (0, WholePolicy),
        (True, FixedPolicy(1, 1)),
        ("1", FixedPolicy(1, 1)),
        (8, FixedPolicy(8, 1)),
    ],
)
def test_the_overlap_setting_chooses_the_policy(overlap: object, policy: object) -> None:
    chosen = policy_of(ClientSettings.parse({"lamina.layerwise_overlap": overlap}))
    assert chosen == policy or type(chosen) is policy


@pytest.mark.parametrize("release_after_slices", [0, 1, 7])
@pytest.mark.parametrize(("overlap", "width"), [(0, 32), (2, 2)])
def test_the_release_setting_reaches_the_policy_of_whole_and_of_layered_retrieves(
    overlap: int, width: int, release_after_slices: int
) -> None:
    parsed = ClientSettings(layerwise_overlap=overlap, release_after_slices=release_after_slices)
    assert policy_of(parsed).decide(query()) == Release(width, release_after_slices)
