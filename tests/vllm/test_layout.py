"""Geometry from tensors: bytes written through a tensor are found where the page map says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lamina.engines.vllm.layout import KvLayout, layout_of
from lamina.errors import GeometryError

BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 6, 32, 64
HEADS, HEAD_DIM = 2, 8
View = Callable[[torch.Tensor, int], torch.Tensor]
"""The part of a layer's tensor that belongs to one block of the scheduler."""


def layout(tensors: dict[str, torch.Tensor], blocks: int = BLOCKS) -> KvLayout:
    found = layout_of(tensors, blocks, BLOCK_TOKENS, CHUNK_TOKENS)
    found.page_map.check(found.geometry, [a.nbytes for a in found.allocations])
    return found


def bytes_of(found: KvLayout, layer: int, block: int) -> list[bytes]:
    """The pages of a block, one a plane, read at the addresses of the page map."""
    nbytes = found.geometry.layers[layer].page_bytes
    return [
        ctypes.string_at(
            found.allocations[p.region].address + p.offset_bytes + block * p.stride_bytes, nbytes
        )
        for p in found.page_map.planes[layer]
    ]


def check(tensors: dict[str, torch.Tensor], view: View, planes: int) -> KvLayout:
    """Fill each block of each layer with a value of its own through `view`, and find only it, in
    all of it, on the pages of that block."""
    found = layout(tensors)
    ordered = [tensors[layer.name] for layer in found.geometry.layers]
    for number, tensor in enumerate(ordered):
        for block in range(BLOCKS):
            view(tensor, block).fill_(1 + number * BLOCKS + block)
    for number, tensor in enumerate(ordered):
        for block in range(BLOCKS):
            part = view(tensor, block)
            pages = bytes_of(found, number, block)
            assert len(pages) == planes
            nbytes = part.numel() * part.element_size()
            assert sum(len(page) for page in pages) == nbytes
            expected = torch.full((part.numel(),), 1 + number * BLOCKS + block, dtype=part.dtype)
            assert b"".join(pages) == expected.view(torch.uint8).numpy().tobytes()
    return found


def outer(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[block]


def second(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[:, block]


def layers_of(make: Callable[[], torch.Tensor], count: int = 3) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.self_attn.attn": make() for i in range(count)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_k_and_v_packed_in_a_block(dtype: torch.dtype) -> None:
    def make() -> torch.Tensor:
        return torch.zeros(BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM, dtype=dtype)

    check(layers_of(make), outer, planes=1)


def test_heads_outside_tokens() -> None:
    """HND: the same logical shape, permuted strides."""

    def make() -> torch.Tensor:
        stored = torch.zeros(BLOCKS, 2, HEADS, BLOCK_TOKENS, HEAD_DIM)
        return stored.permute(0, 1, 3, 2, 4)

    check(layers_of(make), outer, planes=1)


def test_order_inside_a_block_is_in_the_signature() -> None:
    """Pages of the same size but another order are other bytes: never the same namespace."""
    tokens_first = torch.zeros(BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
    heads_first = torch.zeros(BLOCKS, 2, HEADS, BLOCK_TOKENS, HEAD_DIM).permute(0, 1, 3, 2, 4)
    one, other = layout({"layers.0": tokens_first}), layout({"layers.0": heads_first})
    assert one.geometry.digest == other.geometry.digest
    assert one.signature != other.signature


def test_k_and_v_apart() -> None:
    check(
        layers_of(lambda: torch.zeros(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)), second, planes=2
    )


def test_planes_permuted_to_the_inside_of_the_shape() -> None:
    """Shape (blocks, 2, …) over memory of (2, blocks, …): two planes all the same."""

    def make() -> torch.Tensor:
        stored = torch.zeros(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        return stored.transpose(0, 1)

    check(layers_of(make), outer, planes=2)


def test_mla_has_one_vector_a_token() -> None:
    check(layers_of(lambda: torch.zeros(BLOCKS, BLOCK_TOKENS, 20)), outer, planes=1)


def test_kernel_blocks_smaller_than_the_schedulers() -> None:
    """A kernel that uses 4 blocks where the scheduler has one."""

    def four(tensor: torch.Tensor, block: int) -> torch.Tensor:
        return tensor[4 * block : 4 * block + 4]

    def four_apart(tensor: torch.Tensor, block: int) -> torch.Tensor:
        return tensor[:, 4 * block : 4 * block + 4]

    packed = (4 * BLOCKS, 2, BLOCK_TOKENS // 4, HEADS, HEAD_DIM)
    check(layers_of(lambda: torch.zeros(packed)), four, planes=1)
    apart = (2, 4 * BLOCKS, BLOCK_TOKENS // 4, HEADS, HEAD_DIM)
    check(layers_of(lambda: torch.zeros(apart)), four_apart, planes=2)


def test_layers_of_one_allocation() -> None:
    """Layer outside block, as vLLM lays them out now: one region, exported once."""
    storage = torch.zeros(3, BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    tensors = {f"layers.{i}": storage[i] for i in range(3)}
    found = check(tensors, outer, planes=1)
    assert [a.address for a in found.allocations] == [storage.data_ptr()]


def test_layers_inside_a_block_of_one_allocation() -> None:
    """Block outside layer: pages of a layer are a whole block's stride apart."""
    storage = torch.zeros(BLOCKS, 3, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
    tensors = {f"layers.{i}": storage[:, i] for i in range(3)}
    found = check(tensors, outer, planes=1)
    page = found.geometry.layers[0].page_bytes
    assert {p.stride_bytes for planes in found.page_map.planes for p in planes} == {3 * page}


def test_tensor_that_begins_inside_its_allocation() -> None:
    storage = torch.zeros(16 + BLOCKS * BLOCK_TOKENS * 20)
    check({"layers.0": storage[16:].view(BLOCKS, BLOCK_TOKENS, 20)}, outer, planes=1)


def test_layers_are_in_execution_order() -> None:
    names = [f"model.layers.{i}.attn" for i in (10, 9, 0, 2)]
    found = layout({name: torch.zeros(BLOCKS, BLOCK_TOKENS, 4) for name in names})
    assert [layer.name for layer in found.geometry.layers] == [
        f"model.layers.{i}.attn" for i in (0, 2, 9, 10)
    ]


def test_layer_that_uses_anothers_kv_is_that_layer() -> None:
    """It waits for the slice of the layer whose pages it reads, and is not moved twice."""
    tensors = layers_of(lambda: torch.zeros(BLOCKS, BLOCK_TOKENS, 4))
    tensors["model.layers.3.self_attn.attn"] = tensors["model.layers.1.self_attn.attn"]
    found = layout(tensors)
    assert len(found.geometry.layers) == 3
    assert found.layer_of["model.layers.3.self_attn.attn"] == 1


def test_head_count_that_equals_the_block_count_is_not_mistaken_for_it() -> None:
    def make() -> torch.Tensor:
        return torch.zeros(BLOCKS, 2, BLOCK_TOKENS, BLOCKS, HEAD_DIM)

    check(layers_of(make), outer, planes=1)


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        (torch.zeros(BLOCKS, 2, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM)[..., :HEAD_DIM], "contiguous"),
        (torch.zeros(2, HEADS, BLOCKS, BLOCK_TOKENS, HEAD_DIM)[:, :, :, ::2], "contiguous"),
        (torch.zeros(BLOCKS + 1, BLOCK_TOKENS, 20), "no dimension"),
        (
            torch.zeros(2 * BLOCKS, 3, BLOCK_TOKENS // 2, 20)[:, 0],
            "kernel blocks",
        ),
    ],
    ids=["padded-heads", "every-second-token", "other-block-count", "kernel-blocks-apart"],
)
def test_what_cannot_be_represented_is_refused(tensor: torch.Tensor, cause: str) -> None:
    with pytest.raises(GeometryError, match=cause) as error:
        layout({"layers.0": tensor})
    assert "layers.0" in error.value.cause
    assert error.value.remedy


def test_state_space_layer_is_refused() -> None:
    states = [torch.zeros(BLOCKS, 4), torch.zeros(BLOCKS, 8)]
    with pytest.raises(GeometryError, match="several tensors"):
        layout({"layers.0": states})  # type: ignore[dict-item]


def test_two_planes_read_by_bytes_are_k_and_v() -> None:
    tensor = torch.arange(2 * BLOCKS * BLOCK_TOKENS * 4, dtype=torch.float32)
    tensor = tensor.view(2, BLOCKS, BLOCK_TOKENS, 4)
    found = layout({"layers.0": tensor})
    for plane, page in enumerate(bytes_of(found, 0, 3)):
        np.testing.assert_array_equal(
            np.frombuffer(page, np.float32), tensor[plane, 3].flatten().numpy()
        )
