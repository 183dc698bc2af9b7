"""Release policies: how wide a request's slices are, when it may start to compute, and whether it
retrieves all of its hit."""

from lamina.client.release.auto import AutoPolicy
from lamina.client.release.base import Batch, Reason, Release, ReleasePolicy, ReleaseQuery, Speed
from lamina.client.release.fixed import FixedPolicy, WholePolicy
from lamina.client.release.forecast import Candidate, Forecast, Why
from lamina.client.release.meters import Meters
from lamina.settings import AUTO, WHOLE, ClientSettings, Overlap

__all__ = [
    "AutoPolicy",
    "Batch",
    "Candidate",
    "FixedPolicy",
    "Forecast",
    "Meters",
    "Reason",
    "Release",
    "ReleasePolicy",
    "ReleaseQuery",
    "Speed",
    "WholePolicy",
    "Why",
    "policy_of",
    "release_policy",
]


def policy_of(settings: ClientSettings) -> ReleasePolicy:
    """The policy that the settings ask for."""
    return release_policy(settings.layerwise_overlap, settings.release_after_slices)


def release_policy(overlap: Overlap, release_after_slices: int | None) -> ReleasePolicy:
    """`overlap` layers a slice, `WHOLE` for all. With `AUTO` the policy chooses, unless
    `release_after_slices` forces the release: then of slices of one layer."""
    if overlap == AUTO and release_after_slices is None:
        return AutoPolicy()
    after = 1 if release_after_slices is None else release_after_slices
    if overlap == WHOLE:
        return WholePolicy(after)
    return FixedPolicy(1 if overlap == AUTO else overlap, after)
