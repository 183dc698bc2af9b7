"""The engine's side of Lamina, for any engine. An engine needs no more than what is named here:
`docs/engines.md` has a whole one, and what each call may and must do."""

from lamina.board import TransferStatus
from lamina.client.client import MISS, Client, Lookup, LookupResult
from lamina.client.gate import Gate, StepGates
from lamina.client.prefix import Offer, Prefix, Prefixes, Run
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
from lamina.client.retrieve import Retrieve
from lamina.client.store import Store, Ticket
from lamina.devices.base import WorkerDevice
from lamina.devices.cuda import CudaWorkerDevice
from lamina.devices.host import HostWorkerDevice
from lamina.errors import (
    DeviceError,
    ErrorCode,
    GeometryError,
    LaminaError,
    RequestRefusedError,
    ServerUnavailableError,
    SettingsError,
    UsageError,
)
from lamina.geometry import Allocation, Geometry, Group, Layer, PageMap, PlanePages
from lamina.keys import Extra, KeyChain, Namespace, chunk_keys
from lamina.settings import ClientSettings
from lamina.shards import Shard, digest_of

__all__ = [
    "MISS",
    "Allocation",
    "AutoPolicy",
    "Batch",
    "Client",
    "ClientSettings",
    "CudaWorkerDevice",
    "DeviceError",
    "ErrorCode",
    "Extra",
    "FixedPolicy",
    "Gate",
    "Geometry",
    "GeometryError",
    "Group",
    "HostWorkerDevice",
    "KeyChain",
    "LaminaError",
    "Layer",
    "Lookup",
    "LookupResult",
    "Meters",
    "Namespace",
    "Offer",
    "PageMap",
    "PlanePages",
    "Prefix",
    "Prefixes",
    "Reason",
    "Release",
    "ReleasePolicy",
    "ReleaseQuery",
    "RequestRefusedError",
    "Retrieve",
    "Run",
    "ServerUnavailableError",
    "SettingsError",
    "Shard",
    "Speed",
    "StepGates",
    "Store",
    "Ticket",
    "TransferStatus",
    "UsageError",
    "WholePolicy",
    "WorkerDevice",
    "chunk_keys",
    "digest_of",
    "policy_of",
    "release_policy",
]
