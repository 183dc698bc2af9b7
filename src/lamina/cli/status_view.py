"""What `lamina status` prints of a server, for people and as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from lamina.protocol import Stats
from lamina.settings import size_text


def status_data(stats: Stats) -> dict[str, Any]:
    """All of it, flat but for the refusals and the engines."""
    engines = [msgspec.structs.asdict(engine) for engine in stats.engines]
    return {"version": stats.version, **stats.values, "refused": stats.refused, "engines": engines}


def status_view(socket: Path, stats: Stats) -> Group:
    """Tables that fit into 80 columns."""
    values = stats.values
    table = Table(title=escape(f"Lamina {stats.version} at {socket}"), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("up", _duration(values["uptime_s"]))
    capacity, ready = values["arena_capacity_bytes"], values["arena_ready_bytes"]
    used = ready - values["arena_free_bytes"]
    table.add_row("arena", f"{_size(used)} of {_size(capacity)} used ({used / capacity:.0%})")
    if ready < capacity:
        table.add_row("arena still filling", f"{_size(ready)} resident")
    chunk_tokens = values["chunk_tokens"]
    found, asked = (values[name] * chunk_tokens for name in ("hit_chunks", "lookup_chunks"))
    rate = f"{found / asked:.1%} ({found:,} of {asked:,} tokens)" if asked else "nothing looked up"
    table.add_row("hit rate", rate)
    shown = {"uptime_s", "arena_capacity_bytes", "arena_ready_bytes", "arena_free_bytes"}
    for name, value in values.items():
        if name not in shown:
            table.add_row(name.removesuffix("_bytes").replace("_", " "), _value(name, value))
    refusals = ", ".join(f"{count:,} {code}" for code, count in stats.refused.items())
    table.add_row("requests refused", refusals or "none")
    return Group(table, *_engines(stats))


def _engines(stats: Stats) -> list[Table | str]:
    if not stats.engines:
        return ["No engine is connected."]
    table = Table(title="Connections")
    table.add_column("label", overflow="fold")
    table.add_column("model", overflow="fold")
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    table.add_column("KV registered", justify="right", no_wrap=True)
    for engine in stats.engines:
        kv = size_text(engine.registered_bytes) if engine.device else "none"
        table.add_row(
            escape(engine.label), escape(engine.model), str(engine.pid), engine.device, kv
        )
    return [table]


def _value(name: str, value: float) -> str:
    return _size(value) if name.endswith("_bytes") else f"{value:,}"


def _size(nbytes: float) -> str:
    return size_text(int(nbytes))


def _duration(seconds: float) -> str:
    minutes, left_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (left_s, "s")]
    said = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(said[:2]) or "0 s"
