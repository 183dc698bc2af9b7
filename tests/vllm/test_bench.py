"""`lamina bench vllm` as a user runs it, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina_lab.bench.vllm.chat_show import chat_figures
from lamina_lab.bench.vllm.compare import Verdict, figures, missed, verdicts
from lamina_lab.bench.vllm.models import MODELS
from lamina_lab.bench.vllm.phases import PHASES
from lamina_lab.bench.vllm.results import Report, Start, load
from lamina_lab.bench.vllm.workload import Cell
from tests.vllm.engine import ENVIRONMENT

ARMS = ["floor", "layered:1", "whole:sync", "miss:store"]


def measured(path: Path, *options: str) -> Start:
    """One start, all of it and without an error: exit 0."""
    command = [sys.executable, "-m", "lamina_lab", "bench", "vllm", "--model", "tiny"]
    command += [*options, "--repeats", "1", "--save", str(path)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (start,) = load([path]).starts
    assert start.is_whole
    assert not start.errors
    return start


def test_every_arm_is_measured_and_hits_give_the_floors_tokens(tmp_path: Path) -> None:
    """Exit 0 says: every request found what it was to find, alone with the floor's tokens."""
    options = ["--arms", ",".join(ARMS), "--cells", "512:1,384:4", "--streams", "384:4"]
    start = measured(tmp_path / "report.json", *options)
    assert not missed(start)
    assert start.sensitivity is not None
    assert start.sensitivity.blocks_noticed == start.sensitivity.blocks_tried
    cells = [Cell(512, 1), Cell(384, 4)]
    found = figures(Report(starts=[start]))
    assert {(figure.arm, figure.cell): figure.requests for figure in found} == {
        (arm, cell): 8 for arm in ARMS for cell in cells
    }
    for arm in ("layered:1", "whole:sync"):
        alone = verdicts(start, [arm])[arm, Cell(512, 1)]
        assert alone[Verdict.SAME] == 16  # the proof and the timed repeat
    assert {stream.arm for stream in start.streams} == {"floor", "layered:1", "whole:sync"}
    assert all(stream.gaps_ms for stream in start.streams)


def test_a_chat_is_measured_and_its_first_token_times_are_explained_by_phase(
    tmp_path: Path,
) -> None:
    """Both arms get the same turns; as so little fits into GPU memory, later turns retrieve."""
    options = ["--chat", "--arms", "layered:1,recompute", "--rates", "20", "--limit-s", "120"]
    start = measured(tmp_path / "chat.json", *options)
    chat = MODELS["tiny"].chat
    assert start.chat == chat
    assert start.gpu_blocks == chat.gpu_blocks(MODELS["tiny"].block_tokens, is_for_all=False)
    layered, recompute = chat_figures(Report(starts=[start]))
    assert (layered.arm, recompute.arm) == ("layered:1", "recompute")
    for figure in (layered, recompute):
        assert len(figure.first) == chat.conversations
        assert len(figure.later) == chat.conversations * (chat.turns - 1)
        for sample in (*figure.first, *figure.later):
            assert sample.phases is not None
            told = [getattr(sample.phases, phase) for phase in PHASES]
            assert all(ms is not None and ms > -0.01 for ms in told)
            assert sum(told) == pytest.approx(sample.ttft_ms, abs=0.1)
    asked = [
        sorted((s.conversation, s.turn, s.prompt_tokens) for s in (*figure.first, *figure.later))
        for figure in (layered, recompute)
    ]
    assert asked[0] == asked[1]
    found = [sum(s.cached_tokens for s in figure.later) for figure in (layered, recompute)]
    assert found[0] > 0.6 * sum(s.prompt_tokens for s in layered.later)
    assert found[1] < found[0]
    lanes = [s.phases.lane for s in layered.later if s.phases is not None and s.phases.lane]
    assert len(lanes) > len(layered.later) // 2
