"""`lamina bench vllm` as a user runs it, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lamina_lab.bench.vllm.compare import Verdict, figures, missed, verdicts
from lamina_lab.bench.vllm.results import load
from lamina_lab.bench.vllm.workload import Cell
from tests.vllm.engine import ENVIRONMENT

ARMS = ["floor", "layered:1", "whole:sync", "miss:store"]


def test_every_arm_is_measured_and_hits_give_the_floors_tokens(tmp_path: Path) -> None:
    """Exit 0 says: every request found what it was to find, alone with the floor's tokens."""
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "lamina_lab", "bench", "vllm", "--model", "tiny"]
    command += ["--arms", ",".join(ARMS), "--cells", "512:1,384:4", "--streams", "384:4"]
    command += ["--repeats", "1", "--save", str(path)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = load([path])
    (start,) = report.starts
    assert start.is_whole
    assert not start.errors
    assert not missed(start)
    assert start.sensitivity is not None
    assert start.sensitivity.blocks_noticed == start.sensitivity.blocks_tried
    cells = [Cell(512, 1), Cell(384, 4)]
    measured = {(figure.arm, figure.cell): figure.requests for figure in figures(report)}
    assert measured == {(arm, cell): 8 for arm in ARMS for cell in cells}
    for arm in ("layered:1", "whole:sync"):
        alone = verdicts(start, [arm])[arm, Cell(512, 1)]
        assert alone[Verdict.SAME] == 16  # the proof and the timed repeat
    assert {stream.arm for stream in start.streams} == {"floor", "layered:1", "whole:sync"}
    assert all(stream.gaps_ms for stream in start.streams)
