"""The reference model: its bits depend on tokens and KV alone, and on all of the KV."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from lamina_lab.reference.config import FloatArray, ReferenceConfig
from lamina_lab.reference.kv_memory import KVMemory
from lamina_lab.reference.model import ReferenceModel, Span
from lamina_lab.reference.weights import Weights

IntArray = npt.NDArray[np.int64]

SHALLOW = ReferenceConfig(layers=4)
NUM_BLOCKS = 48
PROMPT_TOKENS = 150
"""Two tiles and part of a third; nine blocks and part of a tenth."""


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(SHALLOW)


@pytest.fixture(scope="module")
def deep_model() -> ReferenceModel:
    return ReferenceModel(ReferenceConfig())


def random_tokens(count: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, SHALLOW.vocab, count)


def block_table(seed: int | None = None) -> npt.NDArray[np.int32]:
    """All blocks, in order or shuffled."""
    blocks = np.arange(NUM_BLOCKS, dtype=np.int32)
    return blocks if seed is None else np.random.default_rng(seed).permutation(blocks)


def poisoned_memory(config: ReferenceConfig = SHALLOW) -> KVMemory:
    memory = KVMemory(config, NUM_BLOCKS)
    memory.poison(range(NUM_BLOCKS))
    return memory


def compute(
    model: ReferenceModel,
    tokens: IntArray,
    memory: KVMemory,
    blocks: npt.NDArray[np.int32],
    cuts: Sequence[int] = (),
) -> FloatArray:
    """Last token's logits after computing `tokens` in chunks that end at `cuts`."""
    steps = [
        model.forward([Span("request", start, tokens[start:end], blocks)], memory)
        for start, end in itertools.pairwise([0, *cuts, len(tokens)])
    ]
    logits: FloatArray = steps[-1][0]
    return logits


def kv_bytes(memory: KVMemory, blocks: npt.NDArray[np.int32], tokens: int) -> bytes:
    """K and V of a request's first tokens in all layers, wherever they are kept."""
    return b"".join(
        pages[blocks].reshape(-1, *pages.shape[2:])[:tokens].tobytes()
        for layer in range(memory.config.layers)
        for pages in (memory.keys(layer), memory.values(layer))
    )


@dataclasses.dataclass(frozen=True)
class Expected:
    tokens: IntArray
    logits: FloatArray
    kv: bytes


@pytest.fixture(scope="module")
def expected(model: ReferenceModel) -> Expected:
    """One request, prefilled whole and alone in fresh memory."""
    tokens, memory = random_tokens(PROMPT_TOKENS, seed=1), KVMemory(SHALLOW, NUM_BLOCKS)
    logits = compute(model, tokens, memory, block_table())
    return Expected(tokens, logits, kv_bytes(memory, block_table(), PROMPT_TOKENS))


def assert_same_bits(
    expected: Expected, logits: FloatArray, memory: KVMemory, blocks: npt.NDArray[np.int32]
) -> None:
    assert np.isfinite(expected.logits).all()
    assert logits.tobytes() == expected.logits.tobytes()
    assert kv_bytes(memory, blocks, PROMPT_TOKENS) == expected.kv


# The model is a Llama.


def dense_llama(
    config: ReferenceConfig, weights: Weights, tokens: IntArray
) -> npt.NDArray[np.float64]:
    """Last token's logits in float64, with no pages, tiles or fused heads."""

    def norm(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5))

    def rope(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.outer(np.arange(len(x)), frequencies))
        turned = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    dim, kv_start, kv_width = config.head_dim, config.heads * config.head_dim, config.kv_heads
    hidden = weights.embedding[tokens].astype(np.float64)
    for layer in weights.layers:
        qkv = norm(hidden) @ layer.qkv
        heads = []
        for head in range(config.heads):
            kv_head = head * config.kv_heads // config.heads
            q = rope(qkv[:, head * dim :][:, :dim])
            k = rope(qkv[:, kv_start + kv_head * dim :][:, :dim])
            v = qkv[:, kv_start + (kv_width + kv_head) * dim :][:, :dim]
            scores = q @ k.T / np.sqrt(dim)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v)
        hidden += np.concatenate(heads, axis=1) @ layer.output
        gate_up = norm(hidden) @ layer.gate_up
        gate, up = gate_up[:, : config.intermediate], gate_up[:, config.intermediate :]
        hidden += (gate / (1 + np.exp(-gate)) * up) @ layer.down
    return np.asarray((norm(hidden) @ weights.head)[-1])


def test_agrees_with_a_dense_float64_llama(model: ReferenceModel, expected: Expected) -> None:
    dense = dense_llama(SHALLOW, model.weights, expected.tokens)
    np.testing.assert_allclose(expected.logits, dense, atol=1e-3)


# A row's bits depend on tokens and KV alone.


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(
    "cuts",
    [(1,), (63, 64, 65), (7, 100), (16, 32, 48, 149), (130,), tuple(range(90, 150))],
    ids=["first", "tile-edge", "unaligned", "blocks", "third-tile", "token-by-token"],
)
def test_chunks_do_not_change_bits(
    model: ReferenceModel, expected: Expected, cuts: tuple[int, ...], planes: int
) -> None:
    config = dataclasses.replace(SHALLOW, planes=planes)
    memory = poisoned_memory(config)
    logits = compute(
        ReferenceModel(config, model.weights), expected.tokens, memory, block_table(), cuts
    )
    assert_same_bits(expected, logits, memory, block_table())


def test_neighbours_in_the_batch_do_not_change_bits(
    model: ReferenceModel, expected: Expected
) -> None:
    """Beside it: another prefill with the same rows, a chunk, and a decode in mid-tile."""
    memory, blocks = poisoned_memory(), block_table(seed=3)
    ours, others = blocks[:10], [blocks[10:20], blocks[20:30], blocks[30:40]]
    decoded = random_tokens(80, seed=4)
    compute(model, decoded[:-1], memory, others[2])
    logits = model.forward(
        [
            Span("prefill", 0, random_tokens(PROMPT_TOKENS, seed=5), others[0]),
            Span("ours", 0, expected.tokens[:70], ours),
            Span("decode", 79, decoded[-1:], others[2]),
        ],
        memory,
    )
    logits = model.forward(
        [
            Span("chunk", 0, random_tokens(33, seed=6), others[1]),
            Span("ours", 70, expected.tokens[70:], ours),
        ],
        memory,
    )
    assert_same_bits(expected, logits[1], memory, ours)


def test_block_ids_do_not_change_bits(model: ReferenceModel, expected: Expected) -> None:
    memory, blocks = poisoned_memory(), block_table(seed=2)
    assert_same_bits(expected, compute(model, expected.tokens, memory, blocks), memory, blocks)


def test_a_shared_prefix_does_not_change_bits(model: ReferenceModel, expected: Expected) -> None:
    """Another request computed our first five blocks, and goes on differently."""
    memory, blocks = poisoned_memory(), block_table(seed=2)
    shared, theirs, ours = blocks[:5], blocks[5:10], blocks[10:15]
    prefix = expected.tokens[:80]
    other = np.concatenate([prefix, random_tokens(60, seed=7)])
    compute(model, other, memory, np.concatenate([shared, theirs]))
    table = np.concatenate([shared, ours])
    logits = model.forward([Span("ours", 80, expected.tokens[80:], table)], memory)
    assert_same_bits(expected, logits[0], memory, table)


def test_stale_kv_in_reused_blocks_does_not_change_bits(
    model: ReferenceModel, expected: Expected
) -> None:
    memory, blocks = poisoned_memory(), block_table()
    compute(model, random_tokens(300, seed=8), memory, blocks)
    assert_same_bits(expected, compute(model, expected.tokens, memory, blocks), memory, blocks)


# The hooks.


def test_old_pages_are_read_only_after_before_layer(
    model: ReferenceModel, expected: Expected
) -> None:
    """Each layer's old KV arrives inside its `before_layer`; by then the new KV is written."""
    start = 75  # inside a block: its page holds old and new slots
    memory, blocks = poisoned_memory(), block_table(seed=2)
    compute(model, expected.tokens[:start], memory, blocks)
    used = blocks[: -(-start // SHALLOW.block_tokens)]
    tensors = [(memory.keys(layer), memory.values(layer)) for layer in range(SHALLOW.layers)]
    old = [[pages[used].copy() for pages in pair] for pair in tensors]
    memory.poison(used)
    events: list[tuple[str, int]] = []

    def arrive(layer: int) -> None:
        events.append(("before", layer))
        for pages, saved in zip(tensors[layer], old[layer], strict=True):
            assert np.isfinite(pages[blocks[6:9]]).all(), "new KV is written before the hook"
            arrived = pages[used]
            missing = np.isnan(arrived)
            arrived[missing] = saved[missing]
            pages[used] = arrived

    def done(layer: int) -> None:
        events.append(("after", layer))

    span = Span("ours", start, expected.tokens[start:], blocks)
    logits = model.forward([span], memory, before_layer=arrive, after_layer=done)
    assert_same_bits(expected, logits[0], memory, blocks)
    layers = range(SHALLOW.layers)
    assert events == [(name, layer) for layer in layers for name in ("before", "after")]


# The output depends on every block of KV.


def test_one_byte_of_any_block_changes_the_next_logits(deep_model: ReferenceModel) -> None:
    """One mantissa byte of one K in one page; the first layers that show it differ by block."""
    config, blocks = deep_model.config, block_table()
    tokens = random_tokens(601, seed=9)
    memory = KVMemory(config, NUM_BLOCKS)
    compute(deep_model, tokens[:-1], memory, blocks)
    last = [Span("decode", 600, tokens[-1:], blocks)]
    clean = deep_model.forward(last, memory)

    def shows(layer: int, block: int) -> bool:
        page = memory.page(layer, 0, block)
        byte = 4 * 17 + 2  # an element of the block's first K; its third byte is mantissa
        page[byte] ^= 0x40
        altered = deep_model.forward(last, memory)
        page[byte] ^= 0x40
        assert np.isfinite(altered).all()
        return not np.array_equal(altered, clean)

    blind = [
        block
        for block in range(-(-600 // config.block_tokens))
        if not any(shows(layer, block) for layer in range(config.layers))
    ]
    assert not blind
    assert np.array_equal(deep_model.forward(last, memory), clean), "the memory was restored"


def test_unrelated_prefixes_with_a_common_tail_continue_differently(
    deep_model: ReferenceModel,
) -> None:
    tail, blocks = random_tokens(32, seed=10), block_table()
    continuations = set()
    for seed in range(8):
        tokens = np.concatenate([random_tokens(256, seed=100 + seed), tail])
        memory = KVMemory(deep_model.config, NUM_BLOCKS)
        continuation = [int(compute(deep_model, tokens, memory, blocks).argmax())]
        for position in range(len(tokens), len(tokens) + 3):
            span = Span("decode", position, continuation[-1:], blocks)
            continuation.append(int(deep_model.forward([span], memory)[0].argmax()))
        continuations.add(tuple(continuation))
    assert len(continuations) == 8


# Weights, memory, refusals.


def test_weights_depend_on_the_seed_alone() -> None:
    fingerprint = ReferenceModel(SHALLOW).weights.fingerprint()
    assert Weights.seeded(SHALLOW).fingerprint() == fingerprint
    assert Weights.seeded(dataclasses.replace(SHALLOW, seed=1)).fingerprint() != fingerprint
    assert len(bytes.fromhex(fingerprint)) == 32


@pytest.mark.parametrize("planes", [1, 2])
def test_pages_lie_where_the_memory_says(model: ReferenceModel, planes: int) -> None:
    config = dataclasses.replace(SHALLOW, planes=planes)
    memory, blocks = KVMemory(config, NUM_BLOCKS), block_table(seed=2)
    compute(ReferenceModel(config, model.weights), random_tokens(200, seed=11), memory, blocks)
    block = int(blocks[3])
    for layer in range(config.layers):
        assert memory.address(layer) % mmap.PAGESIZE == 0
        assert memory.nbytes(layer) == planes * NUM_BLOCKS * config.page_bytes
        raw = b"".join(
            ctypes.string_at(
                memory.address(layer)
                + memory.plane_offset_bytes(plane)
                + block * memory.page_stride_bytes,
                config.page_bytes,
            )
            for plane in range(planes)
        )
        kv = memory.keys(layer)[block].tobytes() + memory.values(layer)[block].tobytes()
        pages = [memory.page(layer, plane, block) for plane in range(planes)]
        assert raw == kv == b"".join(page.tobytes() for page in pages)
        assert [plane.shape[0] for plane in memory.planes(layer)] == [NUM_BLOCKS] * planes
        assert all(plane.flags.c_contiguous for plane in memory.planes(layer))


def test_poison_fills_the_named_blocks_in_every_layer_and_no_other() -> None:
    memory = KVMemory(SHALLOW, NUM_BLOCKS)
    memory.poison([3, 5])
    for layer in range(SHALLOW.layers):
        (plane,) = memory.planes(layer)
        poisoned = np.isnan(plane).reshape(NUM_BLOCKS, -1)
        assert np.flatnonzero(poisoned.all(axis=1)).tolist() == [3, 5]
        assert np.flatnonzero(poisoned.any(axis=1)).tolist() == [3, 5]


def test_close_unmaps_the_memory() -> None:
    memory = KVMemory(SHALLOW, NUM_BLOCKS)
    address = memory.address(0)

    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

    plane = memory.planes(0)[0]
    memory.close()
    plane[0] = 1  # a view that is still held stays valid
    assert mapped()
    del plane
    memory.close()
    assert not mapped()


def test_config_says_how_large_pages_are() -> None:
    config = ReferenceConfig()
    assert config.page_bytes == 2 * 16 * 4 * 32 * 4
    assert dataclasses.replace(config, planes=2).page_bytes == config.page_bytes // 2
    assert config.kv_bytes_per_token == config.layers * config.page_bytes // config.block_tokens


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ReferenceConfig(layers=0), "layers is 0; set it to a positive"),
        (lambda: ReferenceConfig(seed=-1), "seed is -1; set it to zero or more"),
        (lambda: ReferenceConfig(kv_heads=3), "make heads a multiple of kv_heads"),
        (lambda: ReferenceConfig(head_dim=31), "make head_dim even"),
        (lambda: ReferenceConfig(tile_tokens=40), "make it a multiple of block_tokens"),
        (lambda: ReferenceConfig(planes=3), "planes is 3; set 1"),
        (lambda: KVMemory(SHALLOW, 0), "at least one block"),
    ],
)
def test_bad_shapes_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("start", "count", "message"),
    [(0, 0, "at least one token"), (-1, 2, "position of zero or more"), (30, 3, "allocate blocks")],
)
def test_bad_spans_are_refused(model: ReferenceModel, start: int, count: int, message: str) -> None:
    span = Span("ours", start, random_tokens(count, seed=1), block_table()[:2])
    with pytest.raises(ValueError, match=f"request ours: .*{message}"):
        model.forward([span], KVMemory(SHALLOW, 2))
