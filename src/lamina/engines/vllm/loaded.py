"""What can be seen of the weights that vLLM has loaded: KV scales, and whether anything changed.

vLLM promises a connector its attention layers (the static forward context) but not its model. The
model is taken from the worker that makes us, whose `get_model` is public: where that fails nothing
is watched, and every reset of vLLM's prefix cache counts as a change of weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_float", "_v_scale_float",
           "_q_scale_float", "_prob_scale_float", "_o_scale_float")  # fmt: skip
"""Attributes of vLLM's attention layers; absent in some versions, tensors in others."""
_ROW_WORDS = 4096
_MOST_CPU_BYTES = 256 << 20
"""On a CPU more would take longer at the start than an engine may be delayed (2 to 6 GB/s)."""


def scales_of(layers: Mapping[str, Any], names: Iterable[str]) -> str:
    """A digest of the KV scales of the layers with these names."""
    found = {
        name: {scale: _plain(getattr(layers.get(name), scale, None)) for scale in _SCALES}
        for name in names
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


class LoadedWeights:
    """Tells whether the weights in memory are still those of the start. On the engine's thread."""

    def __init__(self, model: Any) -> None:
        """`model` is vLLM's (`torch.nn.Module`), or None where there is none to be had."""
        self._model = model if model is not None and _is_quick(model) else None
        self._first = self._digest()
        self._hidden = _hidden(self._model)
        self._generation = ""

    @property
    def are_watched(self) -> bool:
        return self._model is not None

    def change(self) -> str | None:
        """Names the weights where they are not those of the start any more, "" where they are;
        None where that cannot be told."""
        if self._model is None:
            return None
        if any(value() is not getattr(module, name, None) for module, name, value in self._hidden):
            self._hidden, self._generation = _hidden(self._model), secrets.token_hex(16)
        digest = self._digest()
        return f"{digest}{self._generation}" if self._generation or digest != self._first else ""

    def _digest(self) -> str:
        """A sum over every byte of the parameters and scales: any update that training makes
        changes it. One read of all of them, and one number of each across the bus."""
        import torch

        began_s = time.monotonic()
        names, sums = [], []
        for name, tensor in _weights(self._model):
            names.append(name)
            sums.append(_sum(tensor))
        numbers = torch.stack(sums).cpu().tolist() if sums else []
        log.debug("looked at the loaded weights for %.0f ms", (time.monotonic() - began_s) * 1e3)
        return hashlib.sha256(json.dumps([names, numbers]).encode()).hexdigest()


def model_of_caller() -> Any:
    """The model of the vLLM worker that is making a connector, or None."""
    from vllm.v1.worker.worker_base import WorkerBase

    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, WorkerBase):
            try:
                return caller.get_model()
            except Exception as error:  # a worker of another kind
                log.debug("the loaded weights cannot be watched: %s", error)
                return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _hidden(model: Any) -> list[tuple[Any, str, weakref.ref[Any]]]:
    """What modules call in place of a parameter that was emptied: vLLM's CPU build packs weights
    into memory that nobody else can see, anew whenever they are loaded again."""
    found = []
    for module in model.modules() if model is not None else ():
        if any(p is not None and not p.numel() for p in module._parameters.values()):
            for name, value in vars(module).items():
                if isinstance(value, FunctionType) and not name.startswith("_"):
                    found.append((module, name, weakref.ref(value)))
    return found


def _weights(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if model is None:
        return
    yield from sorted(model.named_parameters(), key=lambda named: str(named[0]))
    for name, buffer in sorted(model.named_buffers(), key=lambda named: str(named[0])):
        if name.endswith("_scale"):
            yield name, buffer


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage as 64-bit words, each times a number that depends on where it lies,
    summed modulo 2**64: rows of words are summed by column and by row, so that both say where."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole = flat.numel() // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    rows = flat[:whole].view(torch.int64).view(-1, _ROW_WORDS)
    sums = [rows.sum(0), rows.sum(1), flat[whole:].to(torch.int64)]
    return torch.stack([(part * _numbers(part.numel(), part.device)).sum() for part in sums])


@lru_cache(64)  # models have few sizes of tensors
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern (the finaliser of MurmurHash3 over 1, 2, …)."""
    import torch

    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in (-49064778989728563, -4265267296055464877):
        numbers = (numbers ^ (numbers >> 33)) * factor
    return (numbers ^ (numbers >> 33)) | 1


def _is_quick(model: Any) -> bool:
    on_cpu = sum(
        tensor.numel() * tensor.element_size()
        for _, tensor in _weights(model)
        if tensor.device.type == "cpu"
    )
    return bool(on_cpu <= _MOST_CPU_BYTES)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
