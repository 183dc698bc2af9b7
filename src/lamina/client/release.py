"""Release policies: how wide a request's slices are and when it may start to compute.

A policy is asked once per retrieve. `WholePolicy` is what a cache without layers does; a
`FixedPolicy` moves `layers_per_slice` layers at a time and releases after the first slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina.settings import WHOLE, ClientSettings


class ReleaseQuery(NamedTuple):
    """What a policy may look at: the model's layers, tokens to load and tokens to compute."""

    layers: int
    load_tokens: int
    compute_tokens: int


class Release(NamedTuple):
    """The answer. `release_after_slices` is 0 for a synchronous load: the request runs at once,
    every layer waits for its own slice."""

    layers_per_slice: int
    release_after_slices: int


class ReleasePolicy(Protocol):
    def decide(self, query: ReleaseQuery) -> Release:
        """Called on the engine's thread."""


@dataclass(frozen=True)
class WholePolicy:
    """One slice of all layers: compute starts when everything has landed."""

    release_after_slices: int = 1

    def decide(self, query: ReleaseQuery) -> Release:
        return Release(query.layers, self.release_after_slices)


@dataclass(frozen=True)
class FixedPolicy:
    """Always the same width and the same number of slices before release."""

    layers_per_slice: int
    release_after_slices: int = 1

    def decide(self, query: ReleaseQuery) -> Release:
        return Release(min(self.layers_per_slice, query.layers), self.release_after_slices)


def policy_of(settings: ClientSettings) -> ReleasePolicy:
    """The policy that the settings ask for."""
    return fixed_policy(settings.layerwise_overlap, settings.release_after_slices)


def fixed_policy(layerwise_overlap: int, release_after_slices: int) -> ReleasePolicy:
    """`layerwise_overlap` layers a slice, `WHOLE` for all."""
    if layerwise_overlap == WHOLE:
        return WholePolicy(release_after_slices)
    return FixedPolicy(layerwise_overlap, release_after_slices)
