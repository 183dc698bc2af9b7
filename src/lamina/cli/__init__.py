"""The `lamina` command. It needs what `lamina[server]` installs; engines do not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from lamina.errors import LaminaError, SettingsError

if TYPE_CHECKING:
    import typer

_SERVER_NEEDS = ("typer", "rich", "starlette", "uvicorn", "prometheus_client")
"""What `lamina[server]` installs, as it is imported."""


def main() -> None:
    """Run the command; an error that is made on purpose is one line, not a trace.

    Exits with 2 when what was asked for cannot be, and asking again is of no use, with 1 when it
    failed.
    """
    try:
        from lamina.cli.app import add_commands, app

        add_commands()
        run(app)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _SERVER_NEEDS:
            raise
        _fail(f"{package} is not installed here. Install the server: pip install '.[server]'", 1)


def run(app: typer.Typer) -> NoReturn:
    """Run the command of `app` that was asked for, with errors as `main` has them."""
    import typer

    # typer has no other name for what click raises
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        said: str = error.format_message()  # type: ignore[attr-defined]
        if not said:  # no command: its help has been printed
            sys.exit(2)
        _fail(f"{said.rstrip('.')}. See lamina --help", 2)
    except LaminaError as error:
        _fail(str(error), 2 if isinstance(error, SettingsError) else 1)
    except typer.Abort:
        _fail("interrupted", 130)
    sys.exit(code or 0)


def _fail(why: str, code: int) -> NoReturn:
    print(f"lamina: {why}", file=sys.stderr)
    sys.exit(code)
