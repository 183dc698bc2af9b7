"""The chat of the vLLM benchmark without vLLM: its turns, its phases, and what is made of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Group

from lamina.errors import SettingsError
from lamina_lab.bench.vllm.chat import Chat, Turn, parse_rates
from lamina_lab.bench.vllm.chat_arms import chat_arms_of, parse_chat_arms, with_memory_for
from lamina_lab.bench.vllm.chat_show import chat_figures, chat_tables, mean_phase_ms
from lamina_lab.bench.vllm.models import MODELS
from lamina_lab.bench.vllm.phases import (
    PHASES,
    Passage,
    Phases,
    passage_named,
    phases_of,
    read_passages,
)
from lamina_lab.bench.vllm.results import ChatSample, Report, Start, load, save
from lamina_lab.bench.vllm.show import draw, report_view
from lamina_lab.bench.vllm.trace import Trace
from lamina_lab.bench.vllm.workload import Workload
from tests.support.shown import shown

CHAT = Chat(
    conversations=5,
    system_tokens=32,
    least_document=40,
    most_document=90,
    turn_tokens=8,
    output_tokens=4,
    vocabulary=512,
)


# Turns


def test_every_turn_comes_once_and_conversations_in_order() -> None:
    first, later = CHAT.first_turns(3, 2.0), CHAT.later_turns(3, 2.0)
    assert sorted(t.conversation for t in first) == list(range(5))
    assert {t.turn for t in first} == {1}
    assert sorted((t.conversation, t.turn) for t in later) == list(
        itertools.product(range(5), (2, 3, 4))
    )
    for turns in (first, later):
        times = [turn.at_s for turn in turns]
        assert times == sorted(times)
        assert times[0] > 0
    for number in range(5):
        mine = [turn.turn for turn in later if turn.conversation == number]
        assert mine == [2, 3, 4]


def test_turns_are_the_same_every_time_and_others_in_each_run() -> None:
    assert CHAT.later_turns(1, 3.0) == msgspec.structs.replace(CHAT).later_turns(1, 3.0)
    assert CHAT.later_turns(1, 3.0) != CHAT.later_turns(2, 3.0)
    twice = [turn.at_s for turn in CHAT.later_turns(1, 6.0)]
    assert twice == pytest.approx([turn.at_s / 2 for turn in CHAT.later_turns(1, 3.0)])


def test_arrivals_are_a_poisson_process_of_the_rate_over_all_conversations() -> None:
    """Gaps of an exponential distribution: their standard deviation is their mean."""
    gaps: list[float] = []
    for run in range(200):
        times = [0.0, *(turn.at_s for turn in CHAT.later_turns(run, 4.0))]
        gaps += np.diff(times).tolist()
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.08)


def test_a_turn_waits_for_the_answer_before_and_no_other_does() -> None:
    turn = Turn(conversation=0, turn=2, at_s=5.0, pause_s=0.5)
    assert turn.due_s() == 5.0
    assert turn.due_s(4.9) == 5.0
    assert turn.due_s(7.0) == 7.5


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    one, other = CHAT.opening(0, 1), CHAT.opening(0, 2)
    assert one[:32] == other[:32]
    assert one[32:40] != other[32:40]
    assert one == msgspec.structs.replace(CHAT).opening(0, 1)
    assert len(one) == len(CHAT.opening(1, 1))
    assert one[:8] != CHAT.opening(1, 1)[:8]
    assert all(72 <= len(CHAT.opening(0, number)) <= 122 for number in range(5))
    assert len(CHAT.words(0, 1, 2)) == 8
    assert len({tuple(CHAT.words(r, c, t)) for r in (0, 1) for c in (0, 1) for t in (1, 2)}) == 8


def test_gpu_memory_is_for_all_or_for_a_third() -> None:
    chat = msgspec.structs.replace(CHAT, conversations=9, least_document=80, most_document=80)
    each = 10  # 32 + 80 + 4 * 12 tokens, of 16 a block
    assert chat.longest_tokens == 160
    assert chat.gpu_blocks(16, is_for_all=True) == 9 * (each + 1) + 1
    assert chat.gpu_blocks(16, is_for_all=False) == (9 * each - 8 * 2) // 3 + 1
    alone = msgspec.structs.replace(chat, conversations=1)
    assert alone.gpu_blocks(16, is_for_all=False) == each + 2  # at least one must fit


def test_every_models_chat_fits() -> None:
    for model in MODELS.values():
        arms = parse_chat_arms("auto", model.layers, "lamina")
        small = with_memory_for(model, arms)
        assert model.chat.longest_tokens <= small.max_tokens < small.gpu_blocks * model.block_tokens
        assert model.chat.vocabulary == model.workload.vocabulary
    published = MODELS["llama-3.1-8b"]
    large = with_memory_for(published, parse_chat_arms("floor", 32, "none"))
    small = with_memory_for(published, parse_chat_arms("hit", 32, "lmcache"))
    assert small.max_tokens == published.max_tokens
    assert 2.8 < large.gpu_blocks / small.gpu_blocks < 3.5
    token_bytes = 2 * 32 * 8 * 128 * 2
    assert large.gpu_blocks * 16 * token_bytes < published.arena_bytes


# Options


def test_rates_are_parsed_and_nonsense_is_refused() -> None:
    assert parse_rates("3, 6.5") == (3.0, 6.5)
    for text in ("", "3,", "fast", "0", "-1", "inf", "nan"):
        with pytest.raises(SettingsError):
            parse_rates(text)


def test_arms_of_a_chat_store_except_the_floor_which_is_alone() -> None:
    auto, whole = parse_chat_arms("auto,whole", 32, "lamina")
    assert (auto.name, whole.name) == ("auto", "whole")
    assert auto.parameters == {"lamina.store": True, "lamina.layerwise_overlap": "auto"}
    assert whole.parameters["lamina.store"]
    (floor,) = parse_chat_arms("floor", 32, "lamina")
    assert floor.parameters == {"lamina.store": False, "lamina.retrieve": False}
    for connector in ("lamina", "none", "offloading", "lmcache"):
        assert parse_chat_arms(chat_arms_of(connector), 32, connector)
    for text, connector in (("floor,auto", "lamina"), ("floor", "lmcache"), ("hit", "none")):
        with pytest.raises(SettingsError):
            parse_chat_arms(text, 32, connector)


# Phases


def passage(**fields: Any) -> Passage:
    """Sent at 10.0; its first token is received at 10.2."""
    given: dict[str, Any] = {
        "request": "bench-1-abc",
        "queued_s": 10.01,
        "has_connector": True,
        "passed_s": 10.02,
        "lookup_s": 0.003,
        "allocated_s": 10.05,
        "scheduled_s": 10.1,
        "first_token_s": 10.19,
    }
    return Passage(**{**given, **fields})


def phases(one: Passage) -> list[Any]:
    found = phases_of(one, 10.0, 10.2)
    assert found is not None
    told = [getattr(found, phase) for phase in PHASES]
    assert sum(ms for ms in told if ms is not None) == pytest.approx(200)
    return [None if ms is None else pytest.approx(ms) for ms in told]


def test_phases_of_an_asynchronous_retrieve() -> None:
    """Released before all has landed: the step that it is in waits for the rest."""
    one = passage(retrieved_tokens=64, is_asynchronous=True, released_s=10.08, landed_s=10.12)
    assert phases(one) == [20, 10, 27, 3, 30, 40, 70]
    early = msgspec.structs.replace(one, landed_s=10.07)
    assert phases(early) == [20, 10, 27, 3, 30, 20, 90]
    of_a_peer = msgspec.structs.replace(one, landed_s=None)
    assert phases(of_a_peer) == [20, 10, 27, 3, 30, 20, 90]


def test_phases_of_a_retrieve_in_its_own_step() -> None:
    one = passage(retrieved_tokens=64, scheduled_s=10.05, landed_s=10.15)
    assert phases(one) == [20, 10, 27, 3, 100, 0, 40]
    unknown = msgspec.structs.replace(one, landed_s=None)
    assert phases(unknown) == [20, 10, 27, 3, None, None, 140]


def test_phases_without_a_retrieve_and_without_a_connector() -> None:
    assert phases(passage()) == [20, 10, 27, 3, 0, 0, 140]
    bare = passage(has_connector=False, allocated_s=None, lookup_s=0.0)
    assert phases(bare) == [20, 10, 80, None, None, None, 90]
    assert phases_of(passage(first_token_s=None), 10.0, 10.2) is None


def test_a_scheduler_is_watched_from_the_queue_to_the_last_token(tmp_path: Path) -> None:
    """Every call takes a second, and every look at the clock one more."""
    clock = itertools.count(100.0)
    answers = iter([(None, False), (None, False), (64, True), (64, True)])
    account = SimpleNamespace(number=7, end_s=150.0)
    connector = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: next(answers),
        update_state_after_alloc=lambda request, blocks, tokens: None,
        build_connector_meta=lambda output: SimpleNamespace(
            retrieves=[SimpleNamespace(number=7, request="bench-1-abc")]
        ),
        update_connector_output=lambda output: None,
    )
    scheduled: dict[str, int] = {}
    outputs: list[Any] = []
    scheduler = SimpleNamespace(
        connector=connector,
        add_request=lambda request: None,
        schedule=lambda: SimpleNamespace(num_scheduled_tokens=scheduled),
        update_from_output=lambda: {0: SimpleNamespace(outputs=outputs)},
    )
    path = tmp_path / "passages.jsonl"
    Trace(path, lambda: next(clock)).watch(scheduler)
    request = SimpleNamespace(request_id="bench-1-abc")
    scheduler.add_request(request)  # 100
    scheduler.schedule()  # 101
    connector.get_num_new_matched_tokens(request, 0)  # asked at 102, told at 103 to come again
    connector.get_num_new_matched_tokens(request, 0)  # until 105
    connector.get_num_new_matched_tokens(request, 0)  # until 107: the answer
    next(clock)  # no blocks
    connector.get_num_new_matched_tokens(request, 0)  # from 109 to 110
    connector.update_state_after_alloc(request, None, 64)  # 111
    connector.build_connector_meta(None)
    told = SimpleNamespace(
        finished_recving={"bench-1-abc"},
        kv_connector_worker_meta=SimpleNamespace(accounts=[account]),
    )
    connector.update_connector_output(told)  # 112
    scheduled["bench-1-abc"] = 8
    scheduler.schedule()  # 113
    outputs.append(SimpleNamespace(request_id="bench-1-abc", new_token_ids=[1], finish_reason=None))
    scheduler.update_from_output()  # 114
    scheduler.update_from_output()
    assert not path.exists()
    outputs[0].finish_reason = "length"
    scheduler.update_from_output()
    assert passage_named(read_passages(path), "bench-1") == Passage(
        request="bench-1-abc",
        queued_s=100,
        has_connector=True,
        passed_s=101,
        lookup_s=6,  # 102 to 107, 109 to 110
        allocated_s=111,
        retrieved_tokens=64,
        is_asynchronous=True,
        released_s=112,
        landed_s=150,
        scheduled_s=113,
        first_token_s=114,
    )
    assert passage_named(read_passages(path), "bench-1-a") is None
    assert read_passages(tmp_path / "none") == {}


# What is made of them


def sample(arm: str, turn: int, ttft_ms: float, **fields: Any) -> ChatSample:
    given: dict[str, Any] = {
        "rate": 3.0,
        "run": 0,
        "conversation": 0,
        "sent_s": 0.0,
        "late_ms": 0.0,
        "was_deferred": False,
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "tpot_ms": 1.0,
    }
    return ChatSample(arm=arm, turn=turn, ttft_ms=ttft_ms, **{**given, **fields})


def start(*samples: ChatSample, connector: str = "lamina") -> Start:
    return Start(
        connector=connector,
        model="tiny",
        command="",
        date="",
        host={},
        workload=Workload(),
        chat=CHAT,
        chats=list(samples),
    )


def test_later_turns_are_the_headline_and_held_to_the_floor_of_their_rate() -> None:
    ours = start(
        *(sample("auto", turn, ms) for turn, ms in ((1, 900), (2, 20), (3, 40))),
        sample("auto", 2, 60, rate=6.0),
    )
    floor = start(
        *(sample("floor", turn, ms) for turn, ms in ((1, 800), (2, 10), (3, 14))), connector="none"
    )
    auto, bare, faster = chat_figures(Report(starts=[ours, floor]))
    assert (auto.arm, auto.rate, bare.arm, faster.rate) == ("auto", 3.0, "none/floor", 6.0)
    assert [s.ttft_ms for s in auto.first] == [900]
    assert auto.to_floor is not None
    assert auto.to_floor.value == pytest.approx(30 / 12)
    assert [s.ttft_ms for s in auto.slow] == [40]
    assert bare.to_floor is None
    assert faster.to_floor is None


def test_a_phase_that_is_not_known_is_shown_as_such(tmp_path: Path) -> None:
    told = Phases(
        frontend=1, step=2, queue=3, lookup=None, lane=None, placing=None, computing=41.25
    )
    known = msgspec.structs.replace(told, lookup=0.5, lane=7.5, placing=9.5)
    one = start(sample("recompute", 2, 10, phases=told), sample("recompute", 3, 10))
    assert mean_phase_ms(one.chats, "computing") == 41.25
    assert mean_phase_ms(one.chats, "lane") is None
    assert mean_phase_ms([*one.chats, sample("auto", 2, 10, phases=known)], "lane") is None
    ours = start(sample("auto", 2, 10, phases=known), sample("auto", 3, 10, late_ms=30))
    report = Report(starts=[one, ours])
    save(report, tmp_path / "chat.json")
    text = shown(Group(*chat_tables(load([tmp_path / "chat.json"]))))
    rows = [line.split() for line in text.splitlines()]
    assert ["3:", "recompute", "1.0", "2.0", "3.0", "-", "-", "-", "41.2"] in rows
    assert ["3:", "auto", "1.0", "2.0", "3.0", "0.5", "7.5", "9.5", "41.2"] in rows
    assert "1 of 4 turns were sent 20 ms late" in text


def test_tables_with_numbers_as_long_as_they_get_fit_into_a_terminal() -> None:
    told = Phases(**dict.fromkeys(PHASES, 9_999.9))
    peer = start(
        *(sample("hit", turn, 9_999.9, rate=6.0, phases=told) for turn in (1, 2, 3)),
        connector="offloading-v2",
    )
    floor = start(sample("floor", 2, 1_020, rate=6.0), connector="none")
    text = shown(report_view(Report(starts=[peer, floor])))
    assert "6: offloading-v2/hit" in text
    assert "9.80 [9.80 9.80]" in text


def test_a_chat_alone_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Report(starts=[start(sample("auto", 2, 10))]), tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()
