"""The ways to serve a hit that are compared, each forced by a request's own parameters."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from lamina.errors import SettingsError

FLOOR = "floor"
RECOMPUTE = "recompute"
AUTO = "auto"
HIT = "hit"
"""The one arm of a peer: whatever its connector does."""
OUR_ARMS = (
    "floor, recompute, miss, auto, whole, layered:N; after whole or layered:N one of :sync, "
    ":rK (release after K slices), :no-release; after any hit :store"
)


class Source(enum.Enum):
    """Where a request's prefix comes from."""

    GPU = "gpu"
    HOST = "host"
    NOWHERE = "nowhere"


class Arm(NamedTuple):
    """`parameters` go to the connector as `kv_transfer_params`.

    With `own_prompts` its requests are unlike the other arms': it stores what it computes, or must
    not have been stored, so its tokens cannot be compared.
    """

    name: str
    source: Source
    parameters: dict[str, Any]
    own_prompts: bool = False


def parse_arms(text: str, layers: int, connector: str) -> list[Arm]:
    """Arms by name, comma-separated. Raises `SettingsError`."""
    return [parse_arm(name.strip(), layers, connector) for name in text.split(",") if name.strip()]


def parse_arm(name: str, layers: int, connector: str) -> Arm:
    """One arm, for a model of `layers` layers behind `connector`."""
    if connector != "lamina":
        peers = {FLOOR: Source.GPU, RECOMPUTE: Source.NOWHERE, HIT: Source.HOST}
        if name not in peers or (connector == "none" and name == HIT):
            raise SettingsError(f"{connector} has no arm {name!r}", "Use " + ", ".join(peers))
        # A peer stores whatever it computes: no prompt may come twice.
        return Arm(name, peers[name], {}, own_prompts=connector != "none" or name == RECOMPUTE)
    kind, *options = name.split(":")
    stores = "store" in options
    options = [option for option in options if option != "store"]
    parameters: dict[str, Any] = {"lamina.store": stores}
    if kind in (FLOOR, RECOMPUTE) and not options:
        source = Source.GPU if kind == FLOOR else Source.NOWHERE
        return Arm(name, source, {**parameters, "lamina.retrieve": False}, stores)
    if kind == "miss" and not options:
        return Arm(name, Source.NOWHERE, parameters, own_prompts=True)
    if kind == AUTO and not options:
        return Arm(name, Source.HOST, {**parameters, "lamina.layerwise_overlap": AUTO}, stores)
    if kind == "whole":
        width = layers
    elif kind == "layered" and options and options[0].isdecimal() and int(options[0]):
        width = int(options.pop(0))
    else:
        raise SettingsError(f"there is no arm {name!r}", f"Known: {OUR_ARMS}")
    parameters["lamina.layerwise_overlap"] = width
    parameters["lamina.release_after_slices"] = _release_after(name, options, -(-layers // width))
    return Arm(name, Source.HOST, parameters, stores)


def _release_after(name: str, options: list[str], slices: int) -> int:
    match options:
        case []:
            return 1
        case ["sync"]:
            return 0
        case ["no-release"]:
            return slices
        case [after] if after.startswith("r") and after[1:].isdecimal():
            return min(int(after[1:]), slices)
    raise SettingsError(f"there is no arm {name!r}", f"Known: {OUR_ARMS}")
