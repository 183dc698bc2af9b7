"""The engine's side of Lamina, for any engine. An engine needs no more than what is named here."""

from lamina.client.client import Client
from lamina.client.gate import Gate, StepGates
from lamina.client.lookup import MISS, Lookup, LookupResult
from lamina.client.release import (
    AutoPolicy,
    Batch,
    FixedPolicy,
    Meters,
    Reason,
    Release,
    ReleasePolicy,
    ReleaseQuery,
    Speed,
    WholePolicy,
    policy_of,
    release_policy,
)
from lamina.client.transfers import Retrieve, Store

__all__ = [
    "MISS",
    "AutoPolicy",
    "Batch",
    "Client",
    "FixedPolicy",
    "Gate",
    "Lookup",
    "LookupResult",
    "Meters",
    "Reason",
    "Release",
    "ReleasePolicy",
    "ReleaseQuery",
    "Retrieve",
    "Speed",
    "StepGates",
    "Store",
    "WholePolicy",
    "policy_of",
    "release_policy",
]
