"""Policies that always answer the same: `WholePolicy` is what a cache without layers does."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.client.release.base import Release, ReleaseQuery


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
