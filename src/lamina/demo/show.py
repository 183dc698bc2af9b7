"""How the demo's result is shown: a table and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group
from rich.table import Table

from lamina.demo.messages import Timeline
from lamina.demo.run import DemoResult
from lamina.errors import LaminaError


def table_of(result: DemoResult) -> Group:
    """The four arms, and what the numbers should be compared with."""
    spec = result.spec
    table = Table(
        title=f"First-token time of a hit: {spec.hit_tokens} tokens loaded, "
        f"{spec.tail_tokens} computed, {spec.layers} layers"
    )
    table.add_column("")
    table.add_column("TTFT, ms", justify="right")
    table.add_column("of whole", justify="right")
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
        f"The link is throttled to {result.link_gbps:.3f} GB/s, so that a hit's transfer takes as "
        f"long as its computation: T = C = {result.compute_ms:.1f} ms.",
        f"Waiting for the whole transfer costs T + C = {result.serial_ms:.1f} ms; "
        f"the best that layers can do is max(T, C) = {result.overlapped_ms:.1f} ms "
        f"({result.overlapped_ms / result.serial_ms:.2f} of it).",
    )


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """A PNG of each layer's arrival against its computation. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise LaminaError("matplotlib is missing", "pip install lamina[demo]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    before = 0.0
    for layer, arrived in enumerate(timeline.arrived_s):
        began, ended = timeline.compute_began_s[layer], timeline.compute_ended_s[layer]
        label = layer == 0
        axes.barh(
            layer - 0.2,
            (arrived - before) * 1e3,
            0.36,
            before * 1e3,
            color="#4c78a8",
            label="KV on its way" if label else None,
        )
        axes.barh(
            layer + 0.2,
            (ended - began) * 1e3,
            0.36,
            began * 1e3,
            color="#f58518",
            label="layer computes" if label else None,
        )
        before = arrived
    axes.axvline(timeline.first_token_s * 1e3, color="black", linestyle=":", label="first token")
    axes.invert_yaxis()
    axes.set_xlabel("ms since the request arrived")
    axes.set_ylabel("layer")
    axes.set_title("One hit, layer by layer, released when its first layer had landed")
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
