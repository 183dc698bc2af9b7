"""The command line of `lamina demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from lamina.cli.options import check_installed, check_writable
from lamina_lab import INSTALL_LAB


def demo(
    documents: Annotated[int, typer.Option(min=1, help="Documents in the cache.")] = 3,
    hit_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a document.")] = 1024,
    tail_tokens: Annotated[int, typer.Option(min=1, help="Fresh tokens after it.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 16,
    layers_per_slice: Annotated[int, typer.Option(min=1, help="Width of a slice.")] = 1,
    timeline: Annotated[Path | None, typer.Option(help="Where to put the picture.")] = Path(
        "demo-timeline.png"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve a small model with a cache on a throttled link, and compare four ways to retrieve a
    hit.

    Exits with 1 when any arm's logits differ from recomputing.
    """
    from lamina_lab.demo.messages import DemoSpec
    from lamina_lab.demo.run import run_demo
    from lamina_lab.demo.show import draw_timeline, table_of

    check_installed(
        "threadpoolctl", *(["matplotlib"] if timeline is not None else []), remedy=INSTALL_LAB
    )
    check_writable("--timeline", timeline)
    spec = DemoSpec(
        documents=documents,
        hit_tokens=hit_tokens,
        tail_tokens=tail_tokens,
        layers=layers,
        layers_per_slice=layers_per_slice,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        result = run_demo(
            spec,
            lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
        )
    if timeline is not None:
        draw_timeline(result.timelines, timeline)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(table_of(result))
        if timeline is not None:
            Console().print(f"Each layer's arrival against its computation: {timeline}")
    if not all(arm.bit_identical for arm in result.arms):
        raise typer.Exit(1)
