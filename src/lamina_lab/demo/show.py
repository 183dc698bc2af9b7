"""How the demo's result is shown: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from lamina_lab.demo.messages import WHOLE, Timeline
from lamina_lab.demo.run import DemoResult

_ARRIVES, _COMPUTES = "#4c78a8", "#f58518"
_MOST_TICKS = 24


def table_of(result: DemoResult) -> Group:
    """The four arms, and what the numbers should be compared with. Fits into 80 columns."""
    spec = result.spec
    table = Table(
        title=f"First-token time of a hit: {spec.hit_tokens} tokens retrieved, "
        f"{spec.tail_tokens} computed, {spec.layers} layers"
    )
    table.add_column("", no_wrap=True)
    table.add_column("TTFT, ms", justify="right", no_wrap=True)
    table.add_column("of whole", justify="right", no_wrap=True)
    table.add_column("logits equal recompute's")
    for arm in result.arms:
        table.add_row(
            arm.arm,
            f"{arm.ttft_ms:.1f}",
            f"{arm.ratio_to_whole:.2f}",
            "bit for bit" if arm.bit_identical else "[red]NO[/red]",
        )
    return Group(
        table,
        f"T = {result.transfer_ms:.1f} ms: a whole transfer in this run, by the server's account, "
        f"on a link throttled to {result.link_gbps:.3f} GB/s.",
        f"C = {result.compute_ms:.1f} ms: computing what is new, alone. The throttle was set so "
        "that T is C; more is a busy machine.",
        f"Waiting for the whole transfer costs T + C = {result.serial_ms:.1f} ms; "
        f"the best that layers can do is max(T, C) = {result.overlapped_ms:.1f} ms "
        f"({result.overlapped_ms / result.serial_ms:.2f} of it).",
    )


def draw_timeline(timelines: list[Timeline], path: Path) -> None:
    """A PNG of each layer's arrival against its computation, with a whole transfer above it all.

    Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (whole,) = [timeline for timeline in timelines if timeline.arm == WHOLE]
    (layered,) = [timeline for timeline in timelines if timeline.arm != WHOLE]
    layers = len(layered.arrived_s)
    figure, axes = pyplot.subplots(figsize=(9, 5))
    _bar(axes, -1.7, 0.0, whole.arrived_s[-1], _ARRIVES)
    _bar(axes, -1.3, whole.compute_began_s[0], whole.compute_ended_s[-1], _COMPUTES)
    before = 0.0
    for layer, arrived in enumerate(layered.arrived_s):
        began, ended = layered.compute_began_s[layer], layered.compute_ended_s[layer]
        _bar(axes, layer - 0.2, before, arrived, _ARRIVES, "" if layer else "KV on its way")
        _bar(axes, layer + 0.2, began, ended, _COMPUTES, "" if layer else "computing")
        before = arrived
    for timeline, style in ((whole, "--"), (layered, ":")):
        axes.axvline(
            timeline.first_token_s * 1e3,
            color="black",
            linestyle=style,
            label=f"first token: {timeline.arm}",
        )
    shown = range(0, layers, -(-layers // _MOST_TICKS))
    axes.set_yticks([-1.5, *shown], ["whole", *map(str, shown)])
    axes.set_ylim(layers - 0.4, -2.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the request arrived")
    axes.set_ylabel("layer")
    axes.set_title("One hit: moved whole, and layer by layer, released with its first layer")
    axes.legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bar(axes: Any, y: float, from_s: float, to_s: float, color: str, label: str = "") -> None:
    axes.barh(y, (to_s - from_s) * 1e3, 0.36, from_s * 1e3, color=color, label=label or None)
