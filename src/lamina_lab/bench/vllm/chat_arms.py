"""The arms of a chat, and the GPU memory of each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lamina.errors import SettingsError
from lamina_lab.bench.vllm.arms import AUTO, FLOOR, HIT, RECOMPUTE, Arm, parse_arms
from lamina_lab.bench.vllm.models import Model

_DEFAULT = {"lamina": AUTO, "none": FLOOR}


def chat_arms_of(connector: str) -> str:
    """What is measured unless something else is asked for."""
    return _DEFAULT.get(connector, HIT)


def parse_chat_arms(text: str, layers: int, connector: str) -> list[Arm]:
    """As `parse_arms`; but all store what they compute, and `floor` is alone, for its engine has
    memory for all. Raises `SettingsError`."""
    arms = parse_arms(text, layers, connector)
    names = [arm.name for arm in arms]
    if FLOOR in names and len(names) > 1:
        raise SettingsError("a chat's floor has more GPU memory than other arms", "Start it alone")
    if connector not in _DEFAULT and names != [HIT]:
        raise SettingsError(f"{connector} has one arm in a chat", f"Use {HIT}")
    return [arm if arm.name in (FLOOR, RECOMPUTE) else _storing(arm) for arm in arms]


def with_memory_for(model: Model, arms: Sequence[Arm]) -> Model:
    """GPU memory for the whole chat for `floor`, else for a third of it."""
    is_for_all = any(arm.name == FLOOR for arm in arms)
    blocks = model.chat.gpu_blocks(model.block_tokens, is_for_all)
    most_tokens = min(model.max_tokens, (blocks - 1) * model.block_tokens)  # or vLLM does not start
    return msgspec.structs.replace(model, gpu_blocks=blocks, max_tokens=most_tokens)


def _storing(arm: Arm) -> Arm:
    """Only Lamina's connector reads these; others store as they like."""
    return arm._replace(parameters={**arm.parameters, "lamina.store": True}, own_prompts=True)
