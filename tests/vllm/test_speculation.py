"""Speculative decoding with vLLM's `ngram`: the tokens, the KV and the hits of an engine without.

Prompts repeat a few tokens, so that what follows often repeats them too: drafts are accepted, and
rejected. All is compared with a plain engine of the same model, which has run before; what one of
them stores the other hits.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from lamina.keys import KeyChain
from tests.support.server import ServerThread
from tests.vllm.engine import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    CHUNK_TOKENS,
    Answer,
    Engine,
    Pages,
    random_tokens,
)
from tests.vllm.modes import in_every_mode
from tests.vllm.test_engine_retrieve import WIDE_MARGIN, check_same
from tests.vllm.tiny_llama import LAYERS

PERIODS = [(1, 2), (2, 1), (2, 9), (2, 11), (3, 3), (3, 4)]
"""How many tokens each prompt repeats, and its seed."""
SAID = 60
PROMPTS = {
    f"p{count}.{seed}": (random_tokens(count, 50, count, seed) * 300)[: 4 * CHUNK_TOKENS + 20]
    for count, seed in PERIODS
}
FEW = list(PROMPTS)[:4:2]
HIT = 4 * CHUNK_TOKENS
STORED = 5 * CHUNK_TOKENS
"""With the answer; the last of them are generated tokens."""
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}


class Reference(NamedTuple):
    """What an engine without speculation answers to a prompt, and its pages."""

    answer: Answer
    pages: Pages


@pytest.fixture(scope="module")
def plain(model: Path, module_server: ServerThread) -> dict[str, Reference]:
    """It stores its prompts and answers."""
    engine = Engine(model, module_server.settings.socket)
    references = {}
    for name, prompt in PROMPTS.items():
        answer = engine.ask(prompt, SAID, retrieve=False)
        references[name] = Reference(answer, engine.pages_of("alone", STORED))
        assert answer.margin > WIDE_MARGIN
    engine.assert_idle(module_server)
    engine.close()
    return references


@pytest.fixture(scope="module")
def module_engine(
    model: Path, module_server: ServerThread, plain: dict[str, Reference]
) -> Iterator[Engine]:
    socket = module_server.settings.socket
    engine = Engine(model, socket, arguments={"speculative_config": SPECULATIVE})
    yield engine
    engine.close()


@pytest.fixture
def drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many drafts were accepted and rejected, as vLLM's scheduler counts for its metrics."""
    seen: Counter[str] = Counter()
    make = engine.scheduler.make_spec_decoding_stats

    def count(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
        seen["accepted"] += num_accepted_tokens
        seen["rejected"] += num_draft_tokens - num_accepted_tokens
        return make(stats, num_draft_tokens, num_accepted_tokens, **more)

    monkeypatch.setattr(engine.scheduler, "make_spec_decoding_stats", count)
    return seen


def check_close(pages: Pages, expected: Pages) -> None:
    """The same KV but for rounding. That of another token is far from it."""
    np.testing.assert_allclose(pages.view(np.float32), expected.view(np.float32), atol=1e-3)


def stored_pages(engine: Engine, server: ServerThread, tokens: list[int], salt: str) -> Pages:
    """What the server holds of these tokens' full chunks."""
    namespace = msgspec.structs.replace(engine.side._namespace, salt=salt)
    chunks = []
    for key in KeyChain(namespace, CHUNK_TOKENS).extend(tokens, {}):
        if (chunk := server.server.index.get(key)) is None:
            break
        page_bytes = engine.pages([0]).shape[-1]
        data = ctypes.string_at(chunk.address, LAYERS * BLOCKS_PER_CHUNK * page_bytes)
        chunks.append(np.frombuffer(data, np.uint8).reshape(LAYERS, BLOCKS_PER_CHUNK, page_bytes))
    return np.concatenate(chunks, axis=1)


@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_is_the_plain_engines(
    engine: Engine, drafts: Counter[str], plain: dict[str, Reference], name: str
) -> None:
    answer = engine.ask(PROMPTS[name], SAID, retrieve=False, store=False)
    assert drafts["accepted"] > 4
    assert drafts["rejected"] > 4
    check_same(answer, plain[name].answer)
    check_close(engine.pages_of("alone", STORED), plain[name].pages)


def test_pages_of_another_token_are_noticed(
    engine: Engine, server: ServerThread, plain: dict[str, Reference]
) -> None:
    name, *_ = PROMPTS
    said = plain[name].answer.tokens
    other = [*said[:30], said[30] + 1, *said[31:]]
    engine.ask(PROMPTS[name] + other, 2, retrieve=False, store=False)
    with pytest.raises(AssertionError):
        check_close(engine.pages_of("alone", STORED), plain[name].pages)


@in_every_mode
def test_a_hit_of_what_a_plain_engine_stored(
    engine: Engine, drafts: Counter[str], plain: dict[str, Reference], mode: dict[str, Any]
) -> None:
    """The tokens and logarithms of computing, the pages bit for bit; and as many drafts are
    accepted as without a hit."""
    for name in FEW:
        prompt = PROMPTS[name]
        drafts.clear()
        engine.forget()
        engine.ask(prompt, SAID, retrieve=False, store=False)
        computing = dict(drafts)
        drafts.clear()
        engine.forget()
        hit = engine.ask(prompt, SAID, store=False, **mode)
        assert hit.cached == HIT
        check_same(hit, plain[name].answer)
        pages = engine.pages_of("alone", HIT)
        np.testing.assert_array_equal(pages, plain[name].pages[:, : HIT // BLOCK_TOKENS])
        assert dict(drafts) == computing


@in_every_mode
def test_generated_tokens_are_stored_and_hit_by_the_next_turn(
    engine: Engine,
    server: ServerThread,
    drafts: Counter[str],
    plain: dict[str, Reference],
    mode: dict[str, Any],
) -> None:
    salt = f"turn {mode}"
    for name in FEW:
        prompt = PROMPTS[name]
        drafts.clear()
        engine.forget()
        said = engine.ask(prompt, SAID, retrieve=False, salt=salt)
        assert drafts["accepted"] > 4
        assert drafts["rejected"] > 4
        pages = engine.pages_of("alone", STORED)
        stored = stored_pages(engine, server, prompt + said.tokens[:-1], salt)
        np.testing.assert_array_equal(stored, pages)
        check_close(stored, plain[name].pages)

        turn = prompt + said.tokens + random_tokens(20, 51)
        engine.forget()
        computed = engine.ask(turn, 8, retrieve=False, store=False, salt=salt)
        engine.forget()
        hit = engine.ask(turn, 8, store=False, salt=salt, **mode)
        assert hit.cached == STORED
        assert hit.tokens == computed.tokens
        np.testing.assert_allclose(hit.logprobs, computed.logprobs, atol=WIDE_MARGIN / 10)
        np.testing.assert_array_equal(engine.pages_of("alone", STORED), pages)


def test_an_answer_that_ends_with_a_chunk(
    engine: Engine, server: ServerThread, plain: dict[str, Reference]
) -> None:
    """Its last token has KV only if it was a draft; where another was rejected, that one's KV lies
    there, and the chunk is not stored."""
    seen = set()
    for name, prompt in PROMPTS.items():
        engine.forget()
        said = engine.ask(prompt, STORED - len(prompt), retrieve=False, salt="end")
        stored = stored_pages(engine, server, prompt + said.tokens, "end")
        check_close(stored, plain[name].pages[:, : stored.shape[1]])
        seen.add(stored.shape[1] * BLOCK_TOKENS)
    assert HIT in seen
    assert seen <= {HIT, STORED}


@in_every_mode
def test_a_crowd_with_few_blocks(
    engine: Engine,
    server: ServerThread,
    drafts: Counter[str],
    plain: dict[str, Reference],
    mode: dict[str, Any],
) -> None:
    """Half of the requests hit what the plain engine stored; the others store prompts and answers
    of their own, lose their blocks on the way, and come back to a hit of what they stored."""
    salts = {name: f"crowd {mode}" if n % 2 else "" for n, name in enumerate(PROMPTS)}
    give_back = engine.occupy_all_but(36)
    try:
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, SAID, salt=salts[name] or None, **mode)
        answers = engine.run()
    finally:
        give_back()
    assert engine.preempted, "there was room for all"
    assert drafts["accepted"] > 50
    assert drafts["rejected"] > 50
    for name, prompt in PROMPTS.items():
        check_same(answers[name], plain[name].answer)
        tokens = prompt + answers[name].tokens[:-1]
        check_close(stored_pages(engine, server, tokens, salts[name]), plain[name].pages)
    assert len(answers) == len(PROMPTS)


def test_a_plain_engine_hits_what_was_stored(
    engine: Engine, model: Path, server: ServerThread, plain: dict[str, Reference]
) -> None:
    name, *_ = PROMPTS
    said = engine.ask(PROMPTS[name], SAID, retrieve=False, salt="other")
    pages = engine.pages_of("alone", STORED)
    check_close(pages, plain[name].pages)
    turn = PROMPTS[name] + said.tokens + random_tokens(20, 51)
    engine.forget()
    computed = engine.ask(turn, 8, retrieve=False, store=False)
    request = json.dumps({"prompt": turn, "tokens": 8, "salt": "other", "layerwise_overlap": 1})
    socket = str(server.settings.socket)
    command = [sys.executable, "-m", "tests.vllm.other_engine", str(model), socket, request]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    hit = json.loads(run.stdout.splitlines()[-1])
    assert (hit["cached"], hit["tokens"]) == (STORED, computed.tokens)
