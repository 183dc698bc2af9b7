"""How a report is printed and drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from lamina_lab.bench.vllm.arms import AUTO, FLOOR, HIT, RECOMPUTE
from lamina_lab.bench.vllm.chat_show import chat_tables
from lamina_lab.bench.vllm.compare import (
    Figure,
    Ratio,
    Verdict,
    figures,
    label,
    missed,
    percentile,
    ratio_of,
    shortened,
    verdicts,
)
from lamina_lab.bench.vllm.results import Report, Start
from lamina_lab.bench.vllm.workload import Cell


def is_correct(report: Report) -> bool:
    """Every request found what it was to find, and no tokens were wrong."""
    for start in report.starts:
        if start.errors or missed(start):
            return False
        if any(tally[Verdict.WRONG] for tally in _tallies(start).values()):
            return False
    return True


def report_view(report: Report) -> Group:
    """Tables of first-token times, streams, correctness, and what else was measured."""
    found = figures(report)
    parts: list[Table | str] = [_ttft_table(found)] if found else []
    if streams := _stream_table(report):
        parts.append(streams)
    parts += chat_tables(report)
    parts += _auto_lines(report, found) + _peer_lines(found) + _overhead_lines(report, found)
    for number, start in enumerate(report.starts):
        parts += _start_lines(number, start)
    return Group(*parts)


def _ttft_table(found: list[Figure]) -> Table:
    table = Table(title="first-token time, ms, and its ratio to the same start's floor [95 %]")
    cells = sorted({figure.cell for figure in found}, key=lambda c: (c.concurrency, -c.hit_tokens))
    table.add_column("arm")
    for cell in cells:
        table.add_column(str(cell), justify="right")
    by_arm: dict[str, dict[Cell, Figure]] = {}
    for figure in found:
        by_arm.setdefault(figure.arm, {})[figure.cell] = figure
    best = {
        cell: min(
            (f for f in found if f.cell == cell and f.to_floor is not None),
            key=lambda f: f.to_floor.value if f.to_floor else 0.0,
            default=None,
        )
        for cell in cells
    }
    for arm, row in by_arm.items():
        table.add_row(arm, *(_shown(row.get(cell), best[cell]) for cell in cells))
    return table


def _shown(figure: Figure | None, best: Figure | None) -> str:
    if figure is None:
        return ""
    text = f"{figure.ttft_ms:.1f}"
    if figure.to_floor is not None:
        text += f"  {_ratio(figure.to_floor)}"
    return f"[bold]{text} *[/bold]" if figure is best else text


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} \\[{ratio.low:.3f} {ratio.high:.3f}]"


def _stream_table(report: Report) -> Table | None:
    table = Table(title="decoding streams beside hits: inter-token gap, ms (ratio to floor)")
    for heading in ("arm", "hits", "p50", "p99", "mean TTFT of the hits", "gaps"):
        table.add_column(heading, justify="right")
    rows = _streams(report)
    for (arm, cell), (gaps, ttft) in rows.items():
        prefix = arm.rpartition("/")[0]
        floor = rows.get((label(prefix or "lamina", FLOOR), cell))
        shown = []
        for share in (0.5, 0.99):
            value = percentile(gaps, share)
            of_floor = f" ({value / percentile(floor[0], share):.3f})" if floor else ""
            shown.append(f"{value:.2f}{of_floor}")
        table.add_row(arm, str(cell), *shown, f"{sum(ttft) / len(ttft):.1f}", str(len(gaps)))
    return table if rows else None


def _streams(report: Report) -> dict[tuple[str, Cell], tuple[list[float], list[float]]]:
    rows: dict[tuple[str, Cell], tuple[list[float], list[float]]] = {}
    for start in report.starts:
        for s in start.streams:
            key = label(start.connector, s.arm), Cell(s.hit_tokens, s.concurrency)
            gaps, ttft = rows.setdefault(key, ([], []))
            gaps += s.gaps_ms
            ttft += s.ttft_ms
    return rows


def _auto_lines(report: Report, found: list[Figure]) -> list[str]:
    """Is `auto` worse than the best other arm of ours, beyond the noise?"""
    lines = []
    for cell in dict.fromkeys(f.cell for f in found):
        ours = [f for f in found if f.cell == cell and f.to_floor and "/" not in f.arm]
        others = [f for f in ours if f.arm.startswith(("whole", "layered"))]
        if not others or not any(f.arm == "auto" for f in ours):
            continue
        best = min(others, key=lambda f: f.to_floor.value if f.to_floor else 0.0)
        ratio = ratio_of(report, "auto", best.arm, cell)
        if ratio is not None:
            judged = "not worse" if ratio.low <= 1 else "WORSE"
            lines.append(f"{cell}: auto to {best.arm} {_ratio(ratio)}: {judged}")
    return lines


def _overhead_lines(report: Report, found: list[Figure]) -> list[str]:
    """What the connector costs where it has nothing to give: misses, and tokens after the first."""
    lines = []
    for cell in dict.fromkeys(figure.cell for figure in found):
        for arm in ("miss", "miss:store"):
            if (ratio := ratio_of(report, arm, RECOMPUTE, cell)) is not None:
                lines.append(f"{cell}: {arm} to {RECOMPUTE} {_ratio(ratio)}")
    ours, bare = (_alone_tpot_ms(report, connector) for connector in ("lamina", "none"))
    if ours and bare:
        with_it, without = percentile(ours, 0.5), percentile(bare, 0.5)
        lines.append(
            f"time per output token alone: {with_it:.3f} ms with Lamina, {without:.3f} without: "
            f"{with_it / without:.3f}"
        )
    return lines


def _peer_lines(found: list[Figure]) -> list[str]:
    """Our arm to each peer's, in ms: other starts, so other noise."""
    lines = []
    for peer in (figure for figure in found if figure.arm.endswith(f"/{HIT}")):
        ours = {figure.arm: figure for figure in found if figure.cell == peer.cell}
        for arm in ("auto", "layered:1", "layered:1:sync"):
            if arm in ours:
                ratio = ours[arm].ttft_ms / peer.ttft_ms
                lines.append(f"{peer.cell}: {arm} takes {ratio:.3f} of {peer.arm}")
                break
    return lines


def _alone_tpot_ms(report: Report, connector: str) -> list[float]:
    return [
        s.tpot_ms
        for start in report.starts
        if start.connector == connector
        for s in start.samples
        if s.arm == FLOOR and s.concurrency == 1 and s.repeat and s.tpot_ms is not None
    ]


def _start_lines(number: int, start: Start) -> list[str]:
    engine = ", ".join(f"{key} {value}" for key, value in start.engine.items())
    exact = ", independent of batches" if start.is_exact else ""
    lines = [
        f"start {number}: {start.connector}{exact}, vLLM {start.host.get('vllm')} ({engine}), "
        f"chunks of {start.batched_tokens} tokens, link {start.link_gbps:.1f} GB/s, "
        f"{start.host.get('gpu')}"
    ]
    if start.chats:
        lines.append(f"  a chat with {start.gpu_blocks} blocks of GPU memory")
    alone = _alone_tpot_ms(Report(starts=[start]), start.connector)
    if alone:
        lines.append(f"  time per output token alone: {percentile(alone, 0.5):.3f} ms (median)")
    if (sensitivity := start.sensitivity) is not None:
        lines.append(
            f"  altered KV changed tokens: {sensitivity.pages_noticed} of "
            f"{sensitivity.pages_tried} single pages, {sensitivity.blocks_noticed} of "
            f"{sensitivity.blocks_tried} blocks of all layers"
        )
    for (arm, cell), tally in _tallies(start).items():
        if tally[Verdict.SAME] != sum(tally.values()):
            counts = ", ".join(f"{v.value} {n}" for v, n in tally.items() if n)
            lines.append(f"  tokens of {arm} at {cell} against the floor's: {counts}")
    if compared := sum(tally[Verdict.SAME] for tally in _tallies(start).values()):
        lines.append(f"  {compared} requests gave the floor's tokens")
    for cell, count in Counter(sample.cell for sample in shortened(start)).items():
        found = [s.cached_tokens for s in start.samples if s.cell == cell and s.arm == AUTO]
        lines.append(
            f"  auto computed a part of {count} hits at {cell}: it loaded "
            f"{sum(found) / max(1, len(found)):.0f} tokens on average"
        )
    for sample in missed(start)[:5]:
        lines.append(
            f"  [red]{sample.arm} at {sample.cell}: {sample.cached_tokens} tokens found, "
            f"{sample.expected_tokens} expected[/red]"
        )
    lines += [f"  [red]{escape(error)}[/red]" for error in start.errors]
    lines += [f"  {escape(note)}" for note in start.notes]
    if not start.is_whole:
        lines.append("  [yellow]not everything that was asked for was measured[/yellow]")
    return lines


def _tallies(start: Start) -> dict[tuple[str, Cell], dict[Verdict, int]]:
    """Tokens of hits; recomputing has another schedule, so its tokens prove nothing."""
    arms = {s.arm for s in start.samples if s.expected_tokens and s.comparable}
    return verdicts(start, arms)


def draw(report: Report, path: Path) -> None:
    """A PNG: per cell, every arm's ratio to the floor; none without any. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [figure for figure in figures(report) if figure.to_floor is not None]
    if not found:
        return
    cells = list(dict.fromkeys(figure.cell for figure in found))
    arms = list(dict.fromkeys(figure.arm for figure in found))
    width = 0.8 / max(1, len(arms))
    figure_, axes = pyplot.subplots(figsize=(max(8, 2.2 * len(cells)), 5))
    for number, arm in enumerate(arms):
        points = [
            (cells.index(f.cell) + (number - len(arms) / 2 + 0.5) * width, f.to_floor)
            for f in found
            if f.arm == arm and f.to_floor is not None
        ]
        errors = [[r.value - r.low for _, r in points], [r.high - r.value for _, r in points]]
        axes.bar(
            [x for x, _ in points],
            [r.value for _, r in points],
            width,
            yerr=errors,
            capsize=2,
            label=arm,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), [str(cell) for cell in cells])
    axes.set_xlabel("hit tokens : requests at once")
    axes.set_ylabel("first-token time / that of a hit in GPU memory")
    axes.legend(fontsize="small", ncols=2)
    figure_.tight_layout()
    figure_.savefig(path, dpi=120)
    pyplot.close(figure_)
