"""The vLLM connector: LaminaConnector of `kv_connector_module_path` lamina.engines.vllm.

    connector.py   what vLLM calls; hands on to one of the two sides
    scheduler.py   the scheduler's side: lookups, pins, what to load, gate and store
    worker.py      the worker's side: KV memory, transfers, waits, settling
    config.py      settings, and what is refused       identity.py   what a chunk's key depends on
    layout.py      geometry from the tensors            messages.py   between the two sides
    stats.py       statistics through vLLM's own hooks

Importing it touches no GPU and no network.
"""

from lamina.engines.vllm.connector import LaminaConnector

__all__ = ["LaminaConnector"]
