"""What the release policy decides, under vLLM's real schedulers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from lamina.client import AutoPolicy, Release, ReleaseQuery
from lamina.client.release import Candidate, Forecast, Why
from lamina.engines.vllm.messages import Account, StepReport
from lamina.engines.vllm.planning import Planner
from tests.vllm.scheduler_harness import MODES, Rig, prompt
from tests.vllm.scripted_client import BLOCK, CHUNK, LAYERS

ASKED = prompt(1, 4 * CHUNK + 10)
in_every_mode = pytest.mark.parametrize("mode", MODES)
AUTO: dict[str, Any] = {"layerwise_overlap": "auto"}
Decide = Callable[[ReleaseQuery], Release]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Decide], list[ReleaseQuery]]:
    """Let `auto` answer as the test says; returns the list of what it is asked."""

    def install(decide: Decide) -> list[ReleaseQuery]:
        queries: list[ReleaseQuery] = []

        def answer(self: AutoPolicy, query: ReleaseQuery) -> Release:
            queries.append(query)
            return decide(query)

        monkeypatch.setattr(AutoPolicy, "decide", answer)
        return queries

    return install


@in_every_mode
def test_auto_is_the_default_and_asks_the_policy_with_what_is_there(mode: str, asked: Any) -> None:
    queries = asked(lambda query: Release(1, 1))
    rig = Rig(mode, settings=AUTO, step_tokens=64)
    rig.client.is_swift = True
    rig.hold(ASKED)
    rig.add("A", ASKED)
    rig.run("A")
    rig.close()
    query = queries[0]
    assert (query.layers, query.retrieve_tokens, query.compute_tokens) == (LAYERS, 4 * CHUNK, 10)
    assert (query.chunk_tokens, query.step_tokens) == (CHUNK, 64)
    assert query.speed is not None


@in_every_mode
def test_a_shorter_hit_is_retrieved_and_the_rest_computed_but_not_stored_again(
    mode: str, asked: Any
) -> None:
    asked(lambda query: Release(1, 1, query.retrieve_tokens - 2 * CHUNK))
    rig = Rig(mode, settings=AUTO)
    rig.client.is_swift = True
    rig.hold(ASKED)
    rig.add("A", ASKED)
    rig.run("A")
    rig.close()
    (retrieve,) = rig.client.retrieves
    assert len(retrieve.blocks) * BLOCK == 2 * CHUNK
    assert rig.steps_of("A")[0].requests["A"] == len(ASKED) - 2 * CHUNK
    assert not [store for store in rig.client.stores if len(store.keys) > 1]
    assert rig.counts["hit_tokens_computed"] == 2 * CHUNK


@in_every_mode
def test_a_hit_that_is_not_worth_retrieving_gives_its_lease_back(mode: str, asked: Any) -> None:
    asked(lambda query: Release(query.layers, 0, 0))
    rig = Rig(mode, settings=AUTO)
    rig.hold(ASKED)
    rig.add("A", ASKED)
    rig.until(lambda: rig.steps_of("A"))
    assert not rig.client.leases
    assert not rig.client.retrieves
    rig.run("A")
    rig.close()
    assert rig.counts["hit_tokens_computed"] == 4 * CHUNK


@in_every_mode
def test_the_last_answer_counts(mode: str, asked: Any) -> None:
    """There is no room at first: vLLM asks in each pass."""
    answers = iter([Release(1, 1)])
    queries = asked(lambda query: next(answers, Release(1, 0, CHUNK)))
    rig = Rig(mode, blocks=16, settings=AUTO)
    rig.add("X", prompt(2, 120), max_tokens=20, store=False)
    rig.until(lambda: rig.tokens["X"])
    rig.hold(ASKED)
    rig.add("A", ASKED)
    rig.run("A", "X")
    assert len(queries) > 1
    (retrieve,) = rig.client.retrieves
    assert len(retrieve.blocks) * BLOCK == CHUNK
    assert rig.releases("A") == 0, "a synchronous retrieve"
    rig.close()


@in_every_mode
def test_the_policy_learns_who_else_is_there(mode: str, asked: Any) -> None:
    queries = asked(lambda query: Release(1, 1))
    rig = Rig(mode, settings=AUTO, step_tokens=64)
    rig.add("decodes", prompt(2, 20), max_tokens=100)
    rig.until(lambda: rig.tokens["decodes"])
    rig.add("computes", prompt(3, 100), max_tokens=2)
    rig.hold(ASKED)
    rig.add("retrieves", ASKED)
    rig.until(lambda: rig.client.retrieves)
    rig.hold(prompt(4, 100))
    rig.add("A", prompt(4, 100))
    rig.until(lambda: len(rig.client.retrieves) > 1)
    first, last = queries[0].batch, queries[-1].batch
    assert (first.retrieving, last.retrieving, last.retrieving_tokens) == (0, 1, 10)
    assert first.decoding == 1
    assert first.prefilling == 1
    assert 0 < first.prefill_tokens <= 64
    rig.client.is_swift = True
    rig.run("decodes", "computes", "retrieves", "A")
    rig.close()


@in_every_mode
def test_unmeasured_alone_is_synchronous_and_beside_others_is_held(mode: str) -> None:
    rig = Rig(mode, settings=AUTO)
    rig.client.is_swift = True
    rig.hold(ASKED)
    rig.add("A", ASKED, max_tokens=40)
    rig.until(lambda: rig.tokens["A"])
    assert rig.releases("A") == 0
    other = prompt(2, 100)
    rig.hold(other)
    rig.add("B", other)
    rig.run("A", "B")
    assert rig.releases("B") == 1
    rig.close()
    assert rig.counts["retrieves_unmeasured"] == 2


@in_every_mode
def test_a_forced_release_is_no_question(mode: str, asked: Any) -> None:
    queries = asked(lambda query: Release(1, 1))
    rig = Rig(mode, settings=AUTO)
    rig.hold(ASKED)
    rig.add("A", ASKED, release_after_slices=0)
    rig.run("A")
    rig.close()
    assert not queries
    assert rig.releases("A") == 0
    assert rig.counts["retrieves_fixed"] == 1


@in_every_mode
def test_steps_are_measured(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second of a clock that runs when outputs are taken."""
    rig = Rig(mode, settings=AUTO, step_tokens=256, blocks=256)
    now_s = [0.0]
    monkeypatch.setattr(rig.side._prefixes, "clock", lambda: now_s[0])
    over = Planner.step_over

    def step_over(self: Planner, number: int) -> None:
        now_s[0] += 1.0
        over(self, number)

    monkeypatch.setattr(Planner, "step_over", step_over)
    rig.client.is_swift = True
    rig.add("A", prompt(1, 3 * 256 + 40), max_tokens=20)
    rig.run("A")
    steps = rig.side._prefixes.meters.steps
    assert steps.s_per_token(300) == pytest.approx(1 / 256)
    assert steps.decode_s == pytest.approx(1.0)
    rig.close()


@in_every_mode
@pytest.mark.parametrize("is_idle", [True, False])
def test_how_long_a_release_takes_is_measured(
    mode: str, asked: Any, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    """A slice lands every second from 0 on; after the first one the request is released, at 3 it is
    scheduled. Of an engine that decodes meanwhile nothing is learned."""
    asked(lambda query: Release(1, 1))
    rig = Rig(mode, settings=AUTO)
    now_s = 0.0
    monkeypatch.setattr(rig.side._prefixes, "clock", lambda: now_s)
    if not is_idle:
        rig.add("decodes", prompt(99, 20), max_tokens=200)
        rig.until(lambda: rig.tokens["decodes"])
    for number in range(3):
        begun_s = now_s
        rig.hold(prompt(number, 100))
        rig.add(f"r{number}", prompt(number, 100), max_tokens=1)
        rig.until(lambda: len(rig.client.retrieves) > number)  # noqa: B023
        (retrieve,) = rig.side.retrieves.open
        rig.client.retrieves[-1].land()
        now_s = begun_s + 3.0
        rig.run(f"r{number}")
        account = Account(retrieve, 1, begun_s, begun_s + LAYERS)
        early = account._replace(end_s=begun_s + 0.5)  # of all ranks the last one counts
        accounts = [*[early] * (len(rig.clients) - 1), account]
        rig.side.step_done((), StepReport(accounts=accounts))
        now_s = begun_s + 2 * LAYERS
    assert rig.side._prefixes.meters.releases.release_s == (pytest.approx(2.0) if is_idle else None)
    assert not rig.side._planner._outside
    if not is_idle:
        rig.abort("decodes")
    rig.close()


@in_every_mode
def test_a_decision_and_its_first_token_are_logged_and_counted(
    mode: str, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = Candidate(4 * CHUNK, 1, 0.1, 0.1, 0.0, 0.25, 0.5, 0.0)
    forecast = Forecast(0.0, 0.0, 0.0, chosen, Why.LEAST, (chosen,))
    asked(lambda query: Release(1, 1, forecast=forecast))
    rig = Rig(mode, settings=AUTO)
    rig.client.is_swift = True
    rig.hold(ASKED)
    with caplog.at_level(logging.DEBUG, "lamina.engines.vllm.planning"):
        rig.add("A", ASKED)
        rig.run("A")
    decided, came = [record.getMessage() for record in caplog.records]
    assert decided == (
        f"A: fixed: retrieves {4 * CHUNK} of {4 * CHUNK} tokens, 1 layers a slice, "
        f"released after 1 slices; forecast: {forecast}"
    )
    assert came.startswith("A: fixed: first token after")
    rig.close()
    assert rig.counts["first_tokens"] == 1
    assert rig.counts["expected_first_token_s"] == 0.5
    assert rig.counts["expected_release_s"] == 0.25
