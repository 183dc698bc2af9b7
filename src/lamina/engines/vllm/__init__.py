"""The vLLM connector: LaminaConnector of `kv_connector_module_path` lamina.engines.vllm.

    connector.py   what vLLM calls; hands on to one of the two sides
    scheduler.py   the scheduler's side: lookups, pins, what to retrieve, gate and store
    worker.py      the worker's side: KV memory, transfers, waits, settling
    config.py      settings, and what is refused       kinds.py      which models may be cached
    identity.py    what a chunk's key depends on, with fields.py, weights.py, adapters.py, epochs.py
    layout.py      geometry from the tensors           messages.py   between the two sides
    loaded.py      what can be seen of loaded weights  stats.py      statistics through vLLM's hooks

Importing it touches no GPU and no network.
"""

import sys
from typing import TYPE_CHECKING, Any

from lamina.engines.vllm.began import beginnings

if TYPE_CHECKING:
    from lamina.engines.vllm.connector import LaminaConnector

__all__ = ["LaminaConnector"]


def __getattr__(name: str) -> Any:
    """vLLM looks the class up whenever it makes an engine's configuration; see `began`."""
    if name != "LaminaConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lamina.engines.vllm import connector

    if str(sys._getframe(1).f_globals.get("__name__")).startswith("vllm."):
        beginnings.looked_up()
    return connector.LaminaConnector
