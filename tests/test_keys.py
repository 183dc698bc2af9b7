"""Chunk keys: the same in every process, a chain, and apart whenever bytes could differ."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import LaminaError, UsageError
from lamina.geometry import Geometry, Group, Layer
from lamina.keys import KEY_BYTES, Extra, KeyChain, Namespace, chunk_keys

CHUNK_TOKENS = 4
NAMESPACE = Namespace(model="m", weights="w", dtype="float32", geometry=bytes(32))

GOLDEN_SCRIPT = """
from lamina.geometry import Geometry, Group, Layer
from lamina.keys import Extra, KeyChain, Namespace

geometry = Geometry(4, (Group(2),), (Layer("l", 0, 1, 8),))
namespace = Namespace(
    model="m", weights="w", dtype="float32", geometry=geometry.digest, layout="NHD", backend="b",
    ranks="1x1", scales="k", adapter="a", salt="s", epoch="e",
)
tokens = [0, 1, 2, 3, 4294967295, 7, 8, 9, 10, 11, 12, 13, 14]
extras = {1: [Extra("mm", "img", 2), Extra("lora", "p#f")]}
for value in (geometry.digest, namespace.seed, *KeyChain(namespace, 4).extend(tokens, extras)):
    print(value.hex())
"""
GOLDEN = [
    "a6639cd21b9f177133e8c861531be52cd1b552aa12b1d6944d216c9502145bcd",
    "01d7a59484daf943e88840849723da8aa6a0a142cca529509e3651b328edee89",
    "d37aa6c07f5a6384af6284adeccd28854531067960fd88e2e8d5dd69303e81b8",
    "a29b5248fa0a006525783c88345fcb54a9cc2f8d1fa0e837dbd1b41057df3724",
    "1f8c1efafb59088e942389a7e6b70b09532def40af57dce1d9af21a186e3c0c4",
]
"""Keys that are on disks: when these change, every stored chunk is lost."""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_a_fresh_process_computes_the_golden_keys_whatever_its_hash_seed(hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GOLDEN_SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == GOLDEN


def test_a_key_is_the_sha256_of_parent_tokens_and_extras() -> None:
    tokens = [7, 2**32 - 1, 0, 1, 9, 8, 7, 6]
    first = hashlib.sha256(NAMESPACE.seed + struct.pack("<4I", *tokens[:4])).digest()
    encoded = msgspec.msgpack.encode([["lora", "p", 0], ["mm", "i", 2]])
    second = hashlib.sha256(first + struct.pack("<4I", *tokens[4:]) + encoded).digest()
    extras = {1: [Extra("mm", "i", 2), Extra("lora", "p")]}
    assert KeyChain(NAMESPACE, CHUNK_TOKENS).extend(tokens, extras) == [first, second]
    assert len(first) == len(NAMESPACE.seed) == KEY_BYTES


token_ids = st.integers(0, 2**32 - 1)
extra_items = st.builds(
    Extra, st.sampled_from(["mm", "lora"]), st.sampled_from(["", "a", "b"]), st.integers(0, 9)
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(token_ids, min_size=1, max_size=30), st.data())
def test_changing_a_token_changes_its_chunks_key_and_all_later_ones_and_no_other(
    tokens: list[int], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[index] = data.draw(token_ids.filter(lambda token: token != tokens[index]))
    before = chunk_keys(NAMESPACE, CHUNK_TOKENS, tokens)
    after = chunk_keys(NAMESPACE, CHUNK_TOKENS, changed)
    assert len(before) == len(after) == len(tokens) // CHUNK_TOKENS
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [chunk < index // CHUNK_TOKENS for chunk in range(len(before))]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(token_ids, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(1, 9),
    st.dictionaries(st.integers(0, 5), st.lists(extra_items, max_size=2), max_size=2),
)
def test_extending_step_by_step_gives_the_keys_of_the_whole(
    tokens: list[int], stops: list[int], chunk_tokens: int, extras: dict[int, list[Extra]]
) -> None:
    whole = KeyChain(NAMESPACE, chunk_tokens).extend(tokens, extras)
    chain = KeyChain(NAMESPACE, chunk_tokens)
    for stop in sorted(stops):
        chain.extend(tokens[:stop], extras)
        assert chain.keys == whole[: min(stop, len(tokens)) // chunk_tokens]
    assert chain.extend(tokens, extras) == whole
    assert chain.extend(tokens[:1], extras) == whole, "a shorter sequence took keys away"


def test_extras_count_chunks_from_the_start_of_the_sequence_also_when_it_is_extended() -> None:
    tokens, extras = list(range(12)), {1: [Extra("mm", "image")]}
    whole = KeyChain(NAMESPACE, CHUNK_TOKENS).extend(tokens, extras)
    chain = KeyChain(NAMESPACE, CHUNK_TOKENS)
    chain.extend(tokens[:4], extras)
    assert chain.extend(tokens, extras) == whole


def test_keys_do_not_depend_on_the_type_that_holds_the_tokens() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = chunk_keys(NAMESPACE, CHUNK_TOKENS, tokens)
    assert chunk_keys(NAMESPACE, CHUNK_TOKENS, tuple(tokens)) == expected
    for dtype in (np.int32, np.int64, np.uint32, np.uint64, ">i4"):
        assert chunk_keys(NAMESPACE, CHUNK_TOKENS, np.array(tokens, dtype)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"weights": "w2"},
        {"dtype": "float16"},
        {"geometry": b"\x01" + bytes(31)},
        {"layout": "HND"},
        {"backend": "flash"},
        {"ranks": "2x1"},
        {"salt": "tenant"},
        {"scales": "other"},
        {"adapter": "other"},
        {"epoch": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_the_namespace_changes_every_key(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(NAMESPACE, **change)
    tokens = list(range(8))
    before = chunk_keys(NAMESPACE, CHUNK_TOKENS, tokens)
    after = chunk_keys(other, CHUNK_TOKENS, tokens)
    assert not set(before) & set(after)


def test_fields_of_a_namespace_cannot_run_into_each_other() -> None:
    one = msgspec.structs.replace(NAMESPACE, model="ab", weights="c")
    two = msgspec.structs.replace(NAMESPACE, model="a", weights="bc")
    assert one.seed != two.seed


def test_another_geometry_gives_other_keys() -> None:
    def keys(page_bytes: int) -> list[bytes]:
        geometry = Geometry(4, (Group(2),), (Layer("l", 0, 1, page_bytes),))
        namespace = msgspec.structs.replace(NAMESPACE, geometry=geometry.digest)
        return chunk_keys(namespace, CHUNK_TOKENS, list(range(8)))

    assert not set(keys(8)) & set(keys(16))


@pytest.mark.parametrize(
    "other",
    [
        [],
        [Extra("mm", "image", 1)],
        [Extra("mm", "other", 0)],
        [Extra("lora", "image", 0)],
        [Extra("mm", "image", 0), Extra("mm", "image", 2)],
    ],
)
def test_another_extra_changes_its_chunks_key_and_the_later_ones(other: list[Extra]) -> None:
    def keys(found: list[Extra]) -> list[bytes]:
        return KeyChain(NAMESPACE, CHUNK_TOKENS).extend(list(range(12)), {1: found})

    before, after = keys([Extra("mm", "image", 0)]), keys(other)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_the_order_in_which_extras_are_named_does_not_matter() -> None:
    extras = [Extra("mm", "b", 1), Extra("mm", "a", 2), Extra("lora", "c")]
    tokens = list(range(4))
    one = KeyChain(NAMESPACE, CHUNK_TOKENS).extend(tokens, {0: extras})
    assert KeyChain(NAMESPACE, CHUNK_TOKENS).extend(tokens, {0: extras[::-1]}) == one


@pytest.mark.parametrize("token", [-1, 2**32, -(2**63), 2**63 - 1, 2**63, 2**64])
def test_a_token_id_out_of_range_is_refused_and_no_key_is_added(token: int) -> None:
    chain = KeyChain(NAMESPACE, CHUNK_TOKENS)
    chain.extend([0, 1, 2, 3])
    with pytest.raises(LaminaError, match=r"token id is outside .* Send token ids"):
        chain.extend([0, 1, 2, 3, 4, 5, 6, token])
    assert len(chain.keys) == 1


def test_a_token_id_of_an_unfinished_chunk_is_not_looked_at() -> None:
    chain = KeyChain(NAMESPACE, CHUNK_TOKENS)
    assert len(chain.extend([0, 1, 2, 3, -1])) == 1


@pytest.mark.parametrize("field", ["model", "salt", "adapter"])
@pytest.mark.parametrize("value", ["\udc80", object()])
def test_a_namespace_that_cannot_be_hashed_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match="a namespace cannot be hashed"):
        KeyChain(msgspec.structs.replace(NAMESPACE, **{field: value}), CHUNK_TOKENS)


def test_an_extra_that_cannot_be_hashed_is_refused_and_its_chunk_has_no_key() -> None:
    chain = KeyChain(NAMESPACE, CHUNK_TOKENS)
    with pytest.raises(UsageError, match="a chunk's extras cannot be hashed"):
        chain.extend(list(range(12)), {1: [Extra("mm", "\udc80")]})
    assert chain.keys == KeyChain(NAMESPACE, CHUNK_TOKENS).extend(list(range(4)))
