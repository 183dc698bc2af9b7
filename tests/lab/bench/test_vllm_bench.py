"""The vLLM benchmark without vLLM: its workload, its arms, and its judgements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lamina.errors import LaminaError, SettingsError
from lamina_lab.bench.vllm.arms import Source, parse_arm, parse_arms
from lamina_lab.bench.vllm.compare import (
    Verdict,
    bootstrap,
    figures,
    judge,
    missed,
    ratio_of,
    verdicts,
)
from lamina_lab.bench.vllm.models import MODELS
from lamina_lab.bench.vllm.results import Report, Sample, Start, load, save
from lamina_lab.bench.vllm.show import draw, is_correct, report_view
from lamina_lab.bench.vllm.workload import Cell, Workload, parse_cells

WORKLOAD = Workload(documents=2, document_tokens=64, prompt_tokens=100, vocabulary=512)


def sample(arm: str, ttft_ms: float, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        "hit_tokens": 64,
        "concurrency": 1,
        "repeat": 1,
        "batch": 0,
        "document": 0,
        "tpot_ms": 1.0,
        "cached_tokens": 64,
        "expected_tokens": 64,
        "tokens": [5, 6, 7],
    }
    return Sample(arm=arm, ttft_ms=ttft_ms, **{**defaults, **fields})


def start(*samples: Sample, connector: str = "lamina") -> Start:
    return Start(
        connector=connector,
        model="tiny",
        command="",
        date="",
        host={},
        workload=WORKLOAD,
        samples=list(samples),
    )


# The workload


def test_prompts_are_the_same_every_time_and_share_only_what_they_should() -> None:
    prompt = WORKLOAD.prompt(1, 48, 4, 2)
    assert prompt == msgspec.structs.replace(WORKLOAD).prompt(1, 48, 4, 2)
    assert len(prompt) == 100
    assert prompt[:48] == WORKLOAD.document(1)[:48]
    assert prompt[48:] != WORKLOAD.prompt(1, 48, 4, 3)[48:]
    assert prompt[48:] != WORKLOAD.prompt(1, 48, 4, -2)[48:]
    assert WORKLOAD.document(0)[:8] != WORKLOAD.document(1)[:8]
    assert WORKLOAD.unseen(0, 20) != WORKLOAD.unseen(1, 20)
    assert min(prompt) >= 3
    assert max(prompt) < 512


def test_cells_are_parsed_and_nonsense_is_refused() -> None:
    assert parse_cells("15104:1, 14336:4") == (Cell(15104, 1), Cell(14336, 4))
    assert parse_cells("") == ()
    for text in ("15104", "a:1", "1:0", "1:2:3"):
        with pytest.raises(SettingsError):
            parse_cells(text)


def test_hits_of_every_model_are_whole_chunks_and_fit() -> None:
    for model in MODELS.values():
        workload = model.workload
        assert workload.document_tokens % model.chunk_tokens == 0
        assert model.chunk_tokens % model.block_tokens == 0
        assert workload.prompt_tokens + workload.output_tokens <= model.max_tokens
        held = workload.documents * workload.prompt_tokens / model.block_tokens
        assert held < model.gpu_blocks
    assert len(MODELS["llama-3.1-8b"].workload.prompt(0, 15104, 1, 1)) == 15154


# Arms


@pytest.mark.parametrize(
    ("name", "width", "release_after"),
    [
        ("whole", 32, 1),
        ("whole:sync", 32, 0),
        ("layered:1", 1, 1),
        ("layered:8:sync", 8, 0),
        ("layered:1:r16", 1, 16),
        ("layered:8:r16", 8, 4),
        ("layered:3:no-release", 3, 11),
    ],
)
def test_arm_forces_width_and_release(name: str, width: int, release_after: int) -> None:
    arm = parse_arm(name, 32, "lamina")
    assert arm.source is Source.HOST
    assert arm.parameters == {
        "lamina.store": False,
        "lamina.layerwise_overlap": width,
        "lamina.release_after_slices": release_after,
    }
    assert not arm.own_prompts


def test_arms_that_store_have_prompts_of_their_own() -> None:
    stores = parse_arm("layered:1:store", 32, "lamina")
    assert stores.parameters["lamina.store"]
    assert stores.own_prompts
    assert parse_arm("miss", 32, "lamina").own_prompts
    assert all(arm.own_prompts for arm in parse_arms("floor,hit", 32, "lmcache"))


def test_arms_are_accepted_by_the_connector() -> None:
    """The parameters are those that a request may have."""
    config = pytest.importorskip("lamina.engines.vllm.config")
    for arm in parse_arms("floor,recompute,miss,whole,layered:2:sync", 32, "lamina"):
        config.RequestSettings(config.ConnectorSettings(), arm.parameters)


@pytest.mark.parametrize(
    ("name", "connector"),
    [
        ("layered", "lamina"),
        ("layered:0", "lamina"),
        ("layered:1:soon", "lamina"),
        ("floor:sync", "lamina"),
        ("hit", "lamina"),
        ("hit", "none"),
        ("layered:1", "lmcache"),
    ],
)
def test_unknown_arm_is_refused(name: str, connector: str) -> None:
    with pytest.raises(SettingsError):
        parse_arm(name, 32, connector)


# Judgements


def test_tokens_alone_must_be_the_same() -> None:
    floor = sample("floor", 1, margins=[0.0, 0.0, 0.0])
    assert judge(floor, sample("whole", 1)) is Verdict.SAME
    assert judge(floor, sample("whole", 1, tokens=[5, 6, 8])) is Verdict.WRONG
    assert judge(floor, sample("whole", 1, tokens=[5, 6])) is Verdict.WRONG


@pytest.mark.parametrize(
    ("tokens", "margins", "verdict"),
    [
        ([5, 9, 7], [9.0, 0.1, 9.0], Verdict.TIE),
        ([5, 9, 7], [0.1, 9.0, 0.1], Verdict.UNDECIDED),
        ([5, 9, 7], [], Verdict.UNDECIDED),
        ([9, 6, 7], [0.1, 9.0, 9.0], Verdict.TIE),
        ([9, 6, 7], [9.0, 0.1, 0.1], Verdict.WRONG),
    ],
)
def test_tokens_of_a_batch_may_differ_where_its_additions_have_another_order(
    tokens: list[int], margins: list[float], verdict: Verdict
) -> None:
    floor = sample("floor", 1, concurrency=4, margins=margins)
    other = sample("whole", 1, concurrency=4, tokens=tokens)
    assert judge(floor, other) is verdict
    assert judge(floor, other, is_exact=True) is Verdict.WRONG


def test_times_of_an_exact_start_do_not_count() -> None:
    exact = start(sample("floor", 10), sample("whole", 99))
    exact.is_exact = True
    report = Report(starts=[exact, start(sample("floor", 10), sample("whole", 12))])
    assert [f.ttft_ms for f in figures(report)] == [10, 12]


def test_tokens_are_compared_with_the_same_request_of_the_floor() -> None:
    one = start(
        sample("floor", 1, document=0, tokens=[1]),
        sample("floor", 1, document=1, tokens=[2]),
        sample("whole", 1, document=0, tokens=[1]),
        sample("whole", 1, document=1, tokens=[1]),
        sample("whole", 1, document=1, repeat=2, tokens=[9]),
        sample("own", 1, document=1, tokens=[9], comparable=False),
    )
    tally = verdicts(one, ["whole", "own"])
    assert tally.keys() == {("whole", Cell(64, 1))}
    assert tally["whole", Cell(64, 1)][Verdict.SAME] == 1
    assert tally["whole", Cell(64, 1)][Verdict.WRONG] == 1
    assert not is_correct(Report(starts=[one]))


def test_a_hit_that_was_none_is_an_error() -> None:
    one = start(sample("whole", 1, cached_tokens=0))
    assert missed(one) == one.samples
    assert not is_correct(Report(starts=[one]))


def test_auto_may_compute_some_of_a_hit() -> None:
    """Its tokens are then computed in another order: nothing is wrong, nothing is proven."""
    shorter = sample("auto", 1, cached_tokens=32, tokens=[9])
    floor = sample("floor", 1)
    assert judge(floor, shorter) is Verdict.UNDECIDED
    assert judge(floor, shorter, is_exact=True) is Verdict.WRONG
    assert is_correct(Report(starts=[start(floor, shorter)]))
    assert missed(start(sample("whole", 1, cached_tokens=32)))
    assert missed(start(sample("auto", 1, cached_tokens=96)))


def test_bootstrap_holds_the_true_ratio_and_narrows() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(40):
        floor = rng.normal(100, 10, 24)
        low, high = bootstrap(floor * rng.normal(1.2, 0.05, 24), floor, resamples=800)
        held += low <= 1.2 <= high
        assert high - low < 0.1
    assert held >= 34


def test_ratio_pairs_batches_of_the_same_start() -> None:
    """A slower host slows both arms: the ratio has no spread though the times have."""
    starts = []
    for slowness in (1.0, 3.0):
        floor = [sample("floor", 10 * slowness, batch=b, document=b) for b in range(4)]
        whole = [sample("whole", 15 * slowness, batch=b, document=b) for b in range(4)]
        starts.append(start(*floor, *whole, sample("whole", 999, repeat=0)))
    report = Report(starts=starts)
    (whole_figure,) = [f for f in figures(report) if f.arm == "whole"]
    assert whole_figure.to_floor is not None
    assert whole_figure.to_floor == pytest.approx((1.5, 1.5, 1.5, 8))
    assert whole_figure.ttft_ms == pytest.approx(30)
    back = ratio_of(report, "floor", "whole", Cell(64, 1))
    assert back is not None
    assert back.value == pytest.approx(1 / 1.5)


def test_peers_are_held_to_their_own_floor() -> None:
    ours = start(sample("floor", 10), sample("whole", 12))
    peer = start(sample("floor", 20), sample("hit", 50), connector="lmcache")
    found = {f.arm: f for f in figures(Report(starts=[ours, peer]))}
    assert found["lmcache/hit"].to_floor is not None
    assert found["lmcache/hit"].to_floor.value == pytest.approx(2.5)
    assert found["whole"].to_floor is not None
    assert found["whole"].to_floor.value == pytest.approx(1.2)
    assert found["lmcache/floor"].to_floor is None


# Files


def test_reports_are_saved_whole_and_merged(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for number, path in enumerate(paths):
        save(Report(starts=[start(sample("floor", 10 + number), sample("whole", 12))]), path)
    merged = load(paths)
    assert [s.samples[0].ttft_ms for s in merged.starts] == [10, 11]
    assert sorted(tmp_path.iterdir()) == paths
    assert len(report_view(merged).renderables) > 1
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(LaminaError, match=r"c\.json"):
        load([tmp_path / "c.json"])


def test_starts_with_steps_of_other_sizes_are_not_merged(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, tokens in zip(paths, (2048, 8192), strict=True):
        one = msgspec.structs.replace(start(sample("floor", 10)), batched_tokens=tokens)
        save(Report(starts=[one]), path)
    with pytest.raises(LaminaError, match="2048 and 8192 tokens"):
        load(paths)


def test_report_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Report(starts=[start(sample("floor", 10), sample("whole", 12))]), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
