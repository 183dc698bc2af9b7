"""Runs the demo: starts both processes, follows their reports, judges the result."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

import msgspec

from lamina.errors import LaminaError
from lamina_lab.bench.processes import private_socket, python_process, server_process
from lamina_lab.demo.messages import (
    ARMS,
    RECOMPUTE,
    WHOLE,
    Calibrated,
    DemoSpec,
    Measured,
    Report,
    Timeline,
)

_TIMELINES = 2
"""Hits that are watched for the picture: a whole one, and one with early release."""


class ArmResult(msgspec.Struct, frozen=True):
    """One arm: median first-token time, its ratio to whole, whether all logits were the same as
    recomputing gives, bit for bit, and how many tokens came from the cache."""

    arm: str
    ttft_ms: float
    ratio_to_whole: float
    bit_identical: bool
    hit_tokens: int


class DemoResult(msgspec.Struct, frozen=True):
    """`transfer_ms` is the median of the run's whole transfers, as the server accounts for them;
    `compute_ms` is of a tail alone, before a server ran. `serial_ms` is their sum, what waiting for
    the whole transfer costs; `overlapped_ms` the larger one, the best that layers can do."""

    spec: DemoSpec
    link_gbps: float
    transfer_ms: float
    compute_ms: float
    serial_ms: float
    overlapped_ms: float
    arms: list[ArmResult]
    timelines: list[Timeline]


def run_demo(spec: DemoSpec, progress: Callable[[str, int, int], None]) -> DemoResult:
    """Run the whole demo in a few seconds to a minute.

    `progress(what, done, total)` is called as it goes. Raises `LaminaError` when a process dies.
    """
    with ExitStack() as stack:
        socket = stack.enter_context(private_socket())
        spec = msgspec.structs.replace(spec, socket=str(socket))
        engine = stack.enter_context(python_process(*_engine_command(spec)))
        reports = _reports(engine)
        total = 1 + spec.documents * (1 + len(ARMS)) + _TIMELINES
        progress("measuring compute", 0, total)
        calibrated = next(reports)
        assert isinstance(calibrated, Calibrated)
        link_gbps = calibrated.retrieve_bytes / calibrated.compute_s / 1e9
        options = _server_options(spec, calibrated.retrieve_bytes, link_gbps)
        stack.enter_context(server_process(socket, *options))
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
        measured: list[Measured] = []
        timelines: list[Timeline] = []
        for done, report in enumerate(reports, start=1):
            progress(_describe(report), done, total)
            if isinstance(report, Measured):
                measured.append(report)
            elif isinstance(report, Timeline):
                timelines.append(report)
        if len(timelines) < _TIMELINES:
            raise LaminaError(
                f"the demo's engine ended early (exit code {engine.wait()})", "Its error is above"
            )
    return judge(spec, calibrated, measured, timelines)


def judge(
    spec: DemoSpec, calibrated: Calibrated, measured: list[Measured], timelines: list[Timeline]
) -> DemoResult:
    """Turn measurements into the result. Raises `LaminaError` when there was no hit to measure."""
    compute_ms = calibrated.compute_s * 1e3
    whole_s = [m.transfer_s for m in measured if m.arm == WHOLE and m.transfer_s is not None]
    if not whole_s:
        raise LaminaError(
            "no document was found in the cache when it was asked for whole",
            "Try again on a machine that has less to do",
        )
    transfer_ms = median(whole_s) * 1e3
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
    link_gbps = calibrated.retrieve_bytes / calibrated.compute_s / 1e9
    return DemoResult(
        spec,
        link_gbps,
        transfer_ms,
        compute_ms,
        transfer_ms + compute_ms,
        max(transfer_ms, compute_ms),
        arms,
        timelines,
    )


def _engine_command(spec: DemoSpec) -> list[str]:
    return ["-m", "lamina_lab.demo.engine_process", msgspec.json.encode(spec).decode()]


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
