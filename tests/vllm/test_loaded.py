"""What can be seen of loaded weights: any change of them, and KV scales."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina.engines.vllm import loaded
from lamina.engines.vllm.loaded import LoadedWeights, scales_of


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = torch.nn.Linear(300, 200)
        self.narrow = torch.nn.Parameter(torch.randn(70, 50).half().t(), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("counter", torch.tensor(0))


@pytest.fixture
def model() -> Model:
    return Model()


def last(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1e-6


def swap(tensor: torch.Tensor) -> None:
    """The same numbers in another order."""
    with torch.no_grad():
        tensor[[0, 1]] = tensor[[1, 0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: last(model.large.weight),
        lambda model: last(model.large.bias.data),  # no version counter tells of that
        lambda model: swap(model.large.weight),
        lambda model: swap(model.narrow),
        lambda model: last(model.norm),
        lambda model: model._k_scale.fill_(2.0),
        lambda model: setattr(model, "norm", torch.nn.Parameter(torch.zeros(5))),
    ],
    ids=["one-number", "as-data", "order", "transposed", "norm", "scale", "replaced"],
)
def test_any_change_is_noticed(model: Model, change: Callable[[Model], Any]) -> None:
    weights = LoadedWeights(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert weights.change() == ""
    change(model)
    changed = weights.change()
    assert changed
    assert weights.change() == changed
    with torch.no_grad():
        model.load_state_dict(before)
    assert weights.change() == ""


def test_what_is_no_weight_may_change(model: Model) -> None:
    weights = LoadedWeights(model)
    model.counter += 1
    assert weights.change() == ""


def test_equal_weights_have_the_same_name_elsewhere() -> None:
    """Ranks of one engine are told that they have the same."""
    one, other = Model(), Model()
    weights = [LoadedWeights(model) for model in (one, other)]
    for model in (one, other):
        last(model.norm)
    assert weights[0].change() == weights[1].change() != ""


def test_weights_that_were_packed_away_are_new_when_what_calls_them_is(model: Model) -> None:
    """As vLLM's CPU build does: the parameter is empty, a function has the weights."""

    def pack() -> None:
        packed = torch.randn(3)
        model.large.cpu_linear = lambda x: x @ packed

    model.large.weight = torch.nn.Parameter(torch.empty(0))
    pack()
    weights = LoadedWeights(model)
    assert weights.change() == ""
    pack()
    changed = weights.change()
    assert changed
    assert weights.change() == changed
    pack()
    assert weights.change() not in ("", changed)


def test_without_a_model_nothing_can_be_told() -> None:
    weights = LoadedWeights(None)
    assert not weights.are_watched
    assert weights.change() is None


def test_a_model_that_takes_long_to_look_at_is_not_watched(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "_MOST_CPU_BYTES", 1000)
    assert LoadedWeights(model).change() is None


@pytest.mark.parametrize("scale", ["_k_scale", "_v_scale", "_q_scale", "_k_scale_float"])
@pytest.mark.parametrize("other", [2.0, torch.tensor(2.0), torch.tensor([1.0, 2.0])])
def test_scales_of_every_layer_count(scale: str, other: Any) -> None:
    def layers() -> dict[str, Any]:
        return {n: SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale_float=1.0) for n in "abc"}

    names = list("abc")
    before = scales_of(layers(), names)
    assert scales_of(layers(), names) == before
    changed = layers()
    setattr(changed["c"], scale, other)
    assert scales_of(changed, names) != before
