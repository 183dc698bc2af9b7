"""The table of vLLM's configuration: it names every field, and says what is so."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig

from lamina.engines.vllm.environment import ENVIRONMENT
from lamina.engines.vllm.fields import FIELDS, WHOLE, Treatment, as_markdown
from lamina.engines.vllm.identity import described
from tests.vllm.scheduler_config import engine_config

HERE = Path(__file__).parent
CLASSES_0_26: dict[str, list[str]] = json.loads((HERE / "fields_0_26.json").read_text())
"""vLLM 0.26.0's configuration classes and their fields; `make test-vllm-gpu` compares them."""
PLACES = {
    "VllmConfig": "",
    "ModelConfig": "model_config",
    "MultiModalConfig": "model_config.multimodal_config",
    "CacheConfig": "cache_config",
    "ParallelConfig": "parallel_config",
    "SchedulerConfig": "scheduler_config",
    "DeviceConfig": "device_config",
    "LoadConfig": "load_config",
    "AttentionConfig": "attention_config",
    "MambaConfig": "mamba_config",
    "KernelConfig": "kernel_config",
    "LoRAConfig": "lora_config",
    "CompilationConfig": "compilation_config",
    "SpeculativeConfig": "speculative_config",
    "KVTransferConfig": "kv_transfer_config",
}
"""Where the classes that have rows by field are in a `VllmConfig`."""


def classes_of(root: type) -> dict[str, list[str]]:
    """The configuration classes that are reachable from `root` by the types of their fields."""
    found: dict[str, list[str]] = {}
    left: list[Any] = [root]
    while left:
        kind = left.pop()
        if kind.__name__ in found:
            continue
        found[kind.__name__] = sorted(field.name for field in dataclasses.fields(kind))
        names = vars(sys.modules[kind.__module__]) | vars(vllm.config)
        hints = typing.get_type_hints(kind, names)
        kinds: list[Any] = [
            t for field in dataclasses.fields(kind) for t in types_in(hints[field.name])
        ]
        kinds += [field.default_factory for field in dataclasses.fields(kind)]
        kinds += [c for c in kind.__subclasses__() if c.__module__.startswith("vllm.config")]
        left += [k for k in kinds if isinstance(k, type) and dataclasses.is_dataclass(k)]
    return found


def types_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
        for base in getattr(hint, "__orig_bases__", ()):
            yield from types_in(base)
    for argument in typing.get_args(hint):
        yield from types_in(argument)


INSTALLED = classes_of(VllmConfig)


def unnamed(classes: dict[str, list[str]]) -> list[str]:
    """Fields that the table does not name."""
    return [
        f"{name}.{field}"
        for name, fields in classes.items()
        for field in fields
        if name not in WHOLE and field not in FIELDS.get(name, {})
    ]


@pytest.mark.skipif(vllm.__version__.startswith("0.26."), reason="that version's is another test")
def test_the_table_names_every_field_of_the_vllm_that_is_installed() -> None:
    assert len(INSTALLED) > 40
    assert not unnamed(INSTALLED)


def test_the_table_names_every_field_of_0_26() -> None:
    assert len(CLASSES_0_26) > 30
    assert not unnamed(CLASSES_0_26)


def test_a_field_that_the_table_does_not_name_is_noticed() -> None:
    assert unnamed({"CacheConfig": ["cache_dtype", "new"], "NewConfig": ["field"]}) == [
        "CacheConfig.new",
        "NewConfig.field",
    ]


def test_the_table_names_nothing_that_there_is_not() -> None:
    for name, rows in FIELDS.items():
        assert rows.keys() <= {*CLASSES_0_26.get(name, ()), *INSTALLED.get(name, ())}, name
        assert name not in WHOLE
        assert name in PLACES


def test_the_page_shows_the_table() -> None:
    page = (HERE.parents[1] / "docs" / "identity.md").read_text()
    assert as_markdown() in page, "write it anew: python -m lamina.engines.vllm.fields"


@pytest.fixture(scope="module")
def config() -> Any:
    made = engine_config(False, 64, "fail", 512, {}, drafts=2)
    made.lora_config = LoRAConfig()
    made.model_config.multimodal_config = MultiModalConfig()
    return made


def rows(*treatments: Treatment) -> list[Any]:
    return [
        pytest.param(name, field, id=f"{name}.{field}")
        for name, fields in FIELDS.items()
        for field, row in fields.items()
        if row.treatment in treatments and field in INSTALLED.get(name, ())
    ]


def differs(config: Any, name: str, field: str) -> bool:
    """Whether another value of the field is another configuration, for the key."""
    owner = config
    for part in filter(None, PLACES[name].split(".")):
        owner = getattr(owner, part)
    before, value = described(config, "0.32.0"), getattr(owner, field)
    object.__setattr__(owner, field, "another value")
    try:
        return described(config, "0.32.0") != before
    finally:
        object.__setattr__(owner, field, value)


@pytest.mark.parametrize(("name", "field"), rows(Treatment.KEY, Treatment.REFUSED))
def test_a_field_that_changes_kv_is_in_the_key(config: Any, name: str, field: str) -> None:
    if name == "KVTransferConfig":
        pytest.skip("about us: refused or the same")
    if "field by field" in FIELDS[name][field].why:
        pytest.skip("its fields have rows of their own")
    assert differs(config, name, field)


@pytest.mark.parametrize(("name", "field"), rows(Treatment.NEUTRAL))
def test_a_field_that_does_not_is_not(config: Any, name: str, field: str) -> None:
    assert not differs(config, name, field)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_variable_that_changes_kv_is_in_the_key(
    config: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    unset = described(config, "0.32.0")
    monkeypatch.setenv(name, "")
    empty = described(config, "0.32.0")
    monkeypatch.setenv(name, "1")
    assert len({json.dumps(d) for d in (unset, empty, described(config, "0.32.0"))}) == 3


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("num_hidden_layers", 4),
        ("new_field_of_a_new_model", 1),
        ("quantization_config", {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}),
    ],
)
def test_what_the_model_says_of_itself_is_in_the_key(config: Any, where: str, value: Any) -> None:
    """Also where only overrides of the user's say it: they are applied to it."""
    before = described(config, "0.32.0")
    hf_config = config.model_config.hf_config
    missing = object()
    was = getattr(hf_config, where, missing)
    setattr(hf_config, where, value)
    try:
        assert described(config, "0.32.0") != before
    finally:
        if was is missing:
            delattr(hf_config, where)
        else:
            setattr(hf_config, where, was)
    assert described(config, "0.32.0") == before


def test_where_the_model_came_from_is_not_in_the_key(config: Any) -> None:
    hf_config = config.model_config.hf_config
    before, was = described(config, "0.32.0"), hf_config._name_or_path
    hf_config._name_or_path = "/another/place"
    assert described(config, "0.32.0") == before
    hf_config._name_or_path = was


def test_the_longest_prompt_that_vllm_is_to_find_itself_is_in_the_key(config: Any) -> None:
    """A model is then made for the longest there is, whatever fits into memory afterwards."""
    before, was = described(config, "0.32.0"), config.model_config.original_max_model_len
    config.model_config.original_max_model_len = -1
    assert described(config, "0.32.0") != before
    config.model_config.original_max_model_len = was


def test_versions_of_vllm_are_in_the_key_and_patches_are_not(config: Any) -> None:
    assert described(config, "0.32.0") == described(config, "0.32.1")
    assert described(config, "0.32.0") != described(config, "0.33.0")


def test_speculation_is_not_in_the_key_and_what_a_newer_vllm_sets_of_it_is(config: Any) -> None:
    """Engines with it and without share their KV."""
    speculative, described_so = config.speculative_config, described(config, "0.32.0")
    config.speculative_config = None
    assert described(config, "0.32.0") == described_so

    @dataclasses.dataclass
    class SpeculativeConfig:
        method: str = "ngram"
        new_field: int = 0

    config.speculative_config = SpeculativeConfig()
    assert described(config, "0.32.0") != described_so
    config.speculative_config = speculative


def test_plugins_of_vllm_are_in_the_key(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.engines.vllm import identity

    before = described(config, "0.32.0")
    plugin = SimpleNamespace(name="p", value="p:register", dist=SimpleNamespace(version="1"))
    monkeypatch.setattr(identity, "entry_points", lambda group: [plugin])
    assert described(config, "0.32.0") != before


def test_a_description_is_alike_in_every_process(config: Any) -> None:
    """No address of an object, no order of a set."""
    text = json.dumps(described(config, "0.32.0"))
    assert " at 0x" not in text
