"""Lamina's lines in an engine's log: where vLLM's own lines are, and as many of them."""

from __future__ import annotations

import logging

import vllm.envs as envs

from lamina import protocol
from lamina.client import Client
from lamina.errors import LaminaError
from lamina.settings import AUTO, WHOLE, ClientSettings, Overlap

log = logging.getLogger(__name__)

_STATS_WAIT_S = 0.05
"""So long an engine's start may wait to tell what the server holds."""


def join_vllm() -> None:
    """Give the logger "lamina" what vLLM has configured for its own: handlers, level, and whether
    lines also go to the root's. Once; and not where somebody else has configured logging."""
    ours, theirs = logging.getLogger("lamina"), logging.getLogger("vllm")
    if ours.handlers or not envs.VLLM_CONFIGURE_LOGGING or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def printable_name(model: str) -> str:
    """A model's name as the server takes it: of a long path its end."""
    end = model[-protocol.MAX_LABEL_CHARS :]
    return "".join(c if c.isprintable() else "?" for c in end)


def tell_start(client: Client, settings: ClientSettings) -> None:
    """Say which server serves this engine, and what it holds unless that takes long."""
    holds = ""
    try:
        stats = client.ask(protocol.GetStats, _STATS_WAIT_S)
    except LaminaError:  # told without
        pass
    else:
        assert isinstance(stats, protocol.Stats)
        arena_gib = stats.values["arena_capacity_bytes"] / 2**30
        holds = f", arena {arena_gib:.4g} GiB, {stats.values['chunks']:,.0f} chunks"
    log.info(
        "Lamina serves this engine: %s%s, layering %s",
        settings.socket,
        holds,
        _layering(settings.layerwise_overlap),
    )


def _layering(overlap: Overlap) -> str:
    if overlap == AUTO:
        return AUTO
    return "off" if overlap == WHOLE else f"by {overlap} layers"
