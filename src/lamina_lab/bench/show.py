"""How benchmark results are printed."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table

from lamina.settings import size_text
from lamina_lab.bench.results import TransferResult
from lamina_lab.soak.results import SoakReport


def transfer_table(result: TransferResult) -> Group:
    """A row a cell: rates, then times; and what was measured beside. Fits into 80 columns."""
    spec = result.spec
    rates = _cell_table(
        "Rates", "GB/s", "of link", "of bare\nloop", "store\nof link", "wrong\nbytes"
    )
    times = _cell_table("Times, ms", "first\nslice", "worst", "last", "server's\ncores")
    for cell in result.cells:
        key = (
            f"{cell.page_bytes / 1024:g}",
            f"{cell.layers_per_slice}",
            f"{cell.concurrency}",
            "in a row" if cell.consecutive_blocks else "scattered",
        )
        rates.add_row(
            *key,
            f"{cell.gbps:.2f}",
            f"{cell.share_of_link:.3f}",
            f"{cell.share_of_bare_loop:.3f}" if cell.share_of_bare_loop else "",
            f"{cell.store_share_of_link:.3f}",
            f"{cell.wrong_bytes}",
        )
        times.add_row(
            *key,
            f"{cell.first_slice_ms:.2f}",
            f"{cell.first_slice_worst_ms:.2f}",
            f"{cell.last_slice_ms:.2f}",
            f"{cell.server_cores:.2f}",
        )
    title = (
        f"{spec.device}: retrieves of {size_text(spec.document_bytes)}, {spec.layers} layers; "
        f"link {result.link_retrieve_gbps:.1f} GB/s retrieve, {result.link_store_gbps:.1f} store"
    )
    notes = []
    if result.server_gpu_bytes is not None:
        notes.append(f"The server takes {result.server_gpu_bytes / 2**20:.0f} MiB of GPU memory.")
    if (overlap := result.overlap) is not None:
        notes.append(
            f"Beside transfers a matrix product takes x{overlap.gemm_slowdown:.3f}, "
            f"a memory-bound kernel x{overlap.memory_bound_slowdown:.3f}."
        )
        notes.append(
            f"Gated layers: {overlap.gated_total_ms:.2f} ms for {overlap.transfer_ms:.2f} ms of "
            f"transfer and {overlap.compute_ms:.2f} of computation; {overlap.bound_ms:.2f} is good."
        )
    return Group(title, rates, times, *notes)


def _cell_table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    for heading in ("page\nKiB", "layers/\nslice", "at\nonce", "blocks", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def soak_table(report: SoakReport) -> Table:
    """What was done, what broke, and what must be nothing."""
    table = Table(
        title=f"{report.spec.engines} engines, {report.spec.minutes:g} minutes", show_header=False
    )
    for heading, counts in (
        ("operations", report.operations),
        ("faults", report.faults),
        ("retries", report.retries),
        ("transfers that failed", report.errors),
    ):
        table.add_row(heading, f"{sum(counts.values()):,}")
        for name, count in counts.items():
            table.add_row(f"  {name}", f"{count:,}")
    table.add_row("bytes checked", f"{report.checked_bytes:,}")
    for number, server in enumerate(report.servers):
        if server.rss_least:
            memory = f"{server.rss_least / 2**20:.1f} to {server.rss_most / 2**20:.1f} MiB"
            table.add_row(f"server {number}, {server.lived_s:.0f} s", memory)
    for heading, faults in (
        ("wrong bytes", report.wrong_bytes),
        ("hangs", report.hangs),
        ("leaks", report.leaks),
    ):
        table.add_row(heading, "; ".join(faults) or "none")
    return table
