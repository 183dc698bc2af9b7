"""Runs the demo: starts both processes, follows their reports, judges the result."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

import msgspec

from lamina.bench.processes import private_socket, python_process, server_process
from lamina.demo.messages import (
    ARMS,
    RECOMPUTE,
    WHOLE,
    Calibrated,
    DemoSpec,
    Measured,
    Report,
    Timeline,
)
from lamina.errors import LaminaError


class ArmResult(msgspec.Struct, frozen=True):
    """One arm: median first-token time, its ratio to whole, whether all logits were the same as
    recomputing gives, bit for bit, and how many tokens came from the cache."""

    arm: str
    ttft_ms: float
    ratio_to_whole: float
    bit_identical: bool
    hit_tokens: int


class DemoResult(msgspec.Struct, frozen=True):
    """`transfer_ms` and `compute_ms` are of one hit alone; `serial_ms` is their sum, what waiting
    for the whole transfer costs; `overlapped_ms` the larger one, the best that layers can do."""

    spec: DemoSpec
    link_gbps: float
    transfer_ms: float
    compute_ms: float
    serial_ms: float
    overlapped_ms: float
    arms: list[ArmResult]
    timeline: Timeline


def run_demo(spec: DemoSpec, progress: Callable[[str, int, int], None]) -> DemoResult:
    """Run the whole demo in a few seconds to a minute.

    `progress(what, done, total)` is called as it goes. Raises `LaminaError` when a process dies.
    """
    with ExitStack() as stack:
        socket = stack.enter_context(private_socket())
        spec = msgspec.structs.replace(spec, socket=str(socket))
        engine = stack.enter_context(python_process(*_engine_command(spec)))
        reports = _reports(engine)
        total = 1 + spec.documents * (1 + len(ARMS)) + 1
        progress("measuring compute", 0, total)
        calibrated = next(reports)
        assert isinstance(calibrated, Calibrated)
        link_gbps = calibrated.load_bytes / calibrated.compute_s / 1e9
        options = _server_options(spec, calibrated.load_bytes, link_gbps)
        stack.enter_context(server_process(socket, *options))
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
        measured: list[Measured] = []
        timeline = None
        for done, report in enumerate(reports, start=1):
            progress(_describe(report), done, total)
            if isinstance(report, Measured):
                measured.append(report)
            elif isinstance(report, Timeline):
                timeline = report
        if timeline is None:
            raise LaminaError(
                f"the demo's engine ended early (exit code {engine.wait()})",
                "Its error is above; the demo needs `pip install lamina[demo]`",
            )
    return judge(spec, calibrated, measured, timeline)


def judge(
    spec: DemoSpec, calibrated: Calibrated, measured: list[Measured], timeline: Timeline
) -> DemoResult:
    """Turn measurements into the result. The link was set so that transfer equals compute."""
    compute_ms = calibrated.compute_s * 1e3
    expected = {m.document: m.logits_sha256 for m in measured if m.arm == RECOMPUTE}
    by_arm = {arm: [m for m in measured if m.arm == arm] for arm in ARMS}
    ttft_ms = {arm: median(m.ttft_s for m in of_arm) * 1e3 for arm, of_arm in by_arm.items()}
    arms = [
        ArmResult(
            arm,
            ttft_ms[arm],
            ttft_ms[arm] / ttft_ms[WHOLE],
            all(m.logits_sha256 == expected[m.document] for m in of_arm),
            min(m.hit_tokens for m in of_arm),
        )
        for arm, of_arm in by_arm.items()
    ]
    link_gbps = calibrated.load_bytes / calibrated.compute_s / 1e9
    return DemoResult(
        spec,
        link_gbps,
        compute_ms,
        compute_ms,
        2 * compute_ms,
        compute_ms,
        arms,
        timeline,
    )


def _engine_command(spec: DemoSpec) -> list[str]:
    return ["-m", "lamina.demo.engine_process", msgspec.json.encode(spec).decode()]


def _server_options(spec: DemoSpec, document_bytes: int, link_gbps: float) -> list[str]:
    return [
        *("--arena", str(2 * spec.documents * document_bytes)),
        *("--chunk-tokens", str(spec.chunk_tokens)),
        *("--host-link-gbps", str(link_gbps)),
    ]


def _reports(engine: subprocess.Popen[str]) -> Iterator[Report]:
    assert engine.stdout is not None
    for line in engine.stdout:
        yield msgspec.json.decode(line, type=Report)


def _describe(report: Report) -> str:
    if isinstance(report, Measured):
        return report.arm
    return "drawing the timeline" if isinstance(report, Timeline) else "filling the cache"
