"""Where Python is: `python3 -m scripts.pythons python3.12` prints the path of one that runs.

An interpreter is looked for in PATH, then among pyenv's versions (`$PYENV_ROOT`, or `~/.pyenv`). It
must say itself that it is the version: pyenv's shims lie in PATH for versions that are switched off
too, and fail. Needs Python 3.8 or newer and nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
"""Those that Lamina is tested on."""
_ASK_TIMEOUT_S = 30.0


class MissingPythonError(Exception):
    """No interpreter of that name runs here; the text says where it was looked for."""


def find(name: str) -> str:
    """The interpreter that `name` means: a path, `python3` as PATH has it, or `python3.12`.

    Raises `MissingPythonError`.
    """
    wanted = name.partition("python")[2] if re.fullmatch(r"python3\.\d+", name) else None
    looked_at = [Path(name)] if "/" in name else _candidates(name)
    for path in looked_at:
        version = _version(path)
        if version is not None and wanted in (None, version):
            return str(path)
    raise MissingPythonError(
        f"there is no {name} that runs: neither in PATH nor in {_pyenv_versions()}. "
        f"Install one (`pyenv install {wanted or 3}`), or name another by PYTHON=path"
    )


def main_version() -> str:
    """The version of the `python3` in PATH, by which everything is run that needs only one."""
    version = _version(Path(find("python3")))
    assert version is not None
    return version


def _candidates(name: str) -> list[Path]:
    in_path = [Path(entry or ".") / name for entry in os.environ.get("PATH", "").split(os.pathsep)]
    installed = _pyenv_versions().glob(f"*/bin/{name}")
    newest_first = sorted(installed, key=lambda path: _numbers(path.parts[-3]), reverse=True)
    return [path for path in [*in_path, *newest_first] if os.access(path, os.X_OK)]


def _pyenv_versions() -> Path:
    root = os.environ.get("PYENV_ROOT")
    return (Path(root) if root else Path.home() / ".pyenv") / "versions"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _version(python: Path) -> str | None:
    """`3.12`, as the interpreter says itself; None for one that does not run."""
    ask = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def main() -> None:
    """Print where the named interpreter is; without a name, the versions that there should be."""
    try:
        print(find(sys.argv[1]) if len(sys.argv) > 1 else "\n".join(VERSIONS))
    except MissingPythonError as error:
        sys.exit(f"pythons: {error}")


if __name__ == "__main__":
    main()
