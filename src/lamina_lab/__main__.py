"""`python -m lamina_lab bench ...`: the laboratory's commands without an installation."""

from __future__ import annotations

import typer

from lamina.cli import run
from lamina_lab.bench.cli import bench_app
from lamina_lab.demo.cli import demo

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.command("demo")(demo)

if __name__ == "__main__":
    run(app)
