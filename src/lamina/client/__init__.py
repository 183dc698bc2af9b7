"""The engine's side of Lamina, for any engine. An engine needs no more than what is named here."""

from lamina.client.client import Client
from lamina.client.gate import Gate, StepGates
from lamina.client.lookup import MISS, Lookup, LookupResult
from lamina.client.release import (
    FixedPolicy,
    Release,
    ReleasePolicy,
    ReleaseQuery,
    WholePolicy,
    fixed_policy,
    policy_of,
)
from lamina.client.transfers import Retrieve, Store

__all__ = [
    "MISS",
    "Client",
    "FixedPolicy",
    "Gate",
    "Lookup",
    "LookupResult",
    "Release",
    "ReleasePolicy",
    "ReleaseQuery",
    "Retrieve",
    "StepGates",
    "Store",
    "WholePolicy",
    "fixed_policy",
    "policy_of",
]
