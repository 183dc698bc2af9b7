"""The demo: what it says of its numbers, its picture, and a small run of all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from lamina.errors import LaminaError
from lamina_lab.demo.messages import (
    ARMS,
    EARLY_RELEASE,
    RECOMPUTE,
    WHOLE,
    Calibrated,
    DemoSpec,
    Measured,
    Timeline,
)
from lamina_lab.demo.run import judge, run_demo
from lamina_lab.demo.show import draw_timeline, table_of
from tests.support.shown import shown

SPEC = DemoSpec(documents=3)
CALIBRATED = Calibrated(compute_s=0.1, retrieve_bytes=10**8)


def measured(transfers_s: list[float | None]) -> list[Measured]:
    """Every arm of some documents; the whole transfers took `transfers_s`."""
    return [
        Measured(arm, document, 0.3, 64, transfer_s if arm == WHOLE else 0.05, "same")
        for document, transfer_s in enumerate(transfers_s)
        for arm in ARMS
    ]


def timeline(arm: str, layers: int) -> Timeline:
    """Layers that arrive, or are computed, every 10 ms."""
    times = [0.01 * (layer + 1) for layer in range(layers)]
    arrived = [times[-1]] * layers if arm == WHOLE else times
    began = [0.01 * layer + (arrived[-1] if arm == WHOLE else 0.01) for layer in range(layers)]
    return Timeline(arm, arrived, began, [t + 0.01 for t in began], began[-1] + 0.01)


def test_the_transfer_is_what_the_server_measured_and_not_what_the_throttle_was_set_to() -> None:
    result = judge(SPEC, CALIBRATED, measured([0.25, 0.15, 0.2]), [])
    assert result.transfer_ms == pytest.approx(200)
    assert result.compute_ms == pytest.approx(100)
    assert result.serial_ms == pytest.approx(300)
    assert result.overlapped_ms == pytest.approx(200)
    text = shown(table_of(result))
    for words in ("T = 200.0 ms", "C = 100.0 ms", "T + C = 300.0 ms", "(0.67 of it)"):
        assert words in text.replace("\n", "")


def test_a_run_without_a_hit_is_an_error_that_says_so() -> None:
    with pytest.raises(LaminaError, match="no document was found in the cache"):
        judge(SPEC, CALIBRATED, measured([None, None, None]), [])


@pytest.mark.parametrize("layers", [1, 16, 100])
def test_the_picture_has_a_tick_for_whole_and_for_layers_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    ticks: list[tuple[float, str]] = []
    bars: list[tuple[float, float, float]] = []

    def close(figure: Any) -> None:
        (axes,) = figure.axes
        labels = [label.get_text() for label in axes.get_yticklabels()]
        ticks.extend(zip(axes.get_yticks(), labels, strict=True))
        for bar in axes.patches:
            bars.append((bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()))
        kept(figure)

    kept = pyplot.close
    monkeypatch.setattr(pyplot, "close", close)
    path = tmp_path / "picture.png"
    draw_timeline([timeline(WHOLE, layers), timeline(EARLY_RELEASE, layers)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (at, label), *others = ticks
    assert label == "whole"
    assert at < 0
    assert [str(int(y)) for y, _ in others] == [label for _, label in others]
    assert {int(y) for y, _ in others} <= set(range(layers))
    of_whole = [bar for bar in bars if bar[0] < -0.5]
    assert [x for _, x, _ in of_whole] == pytest.approx([0, 10 * layers])
    assert [width for _, _, width in of_whole] == pytest.approx([10 * layers, 10 * layers])
    assert len(bars) == 2 + 2 * layers


def test_a_small_demo_from_end_to_end() -> None:
    spec = DemoSpec(documents=1, hit_tokens=128, tail_tokens=16, layers=2)
    result = run_demo(spec, lambda what, done, total: None)
    assert [arm.arm for arm in result.arms] == list(ARMS)
    assert all(arm.bit_identical for arm in result.arms)
    hits = {arm.arm: arm.hit_tokens for arm in result.arms}
    assert hits == {arm: 0 if arm == RECOMPUTE else 128 for arm in ARMS}
    at_least_ms = result.compute_ms * 0.9  # the throttle's: it may run ahead by a piece
    assert at_least_ms <= result.transfer_ms <= 60_000
    assert [timeline.arm for timeline in result.timelines] == [WHOLE, EARLY_RELEASE]
