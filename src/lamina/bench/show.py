"""How benchmark results are printed."""

from __future__ import annotations

from rich.table import Table

from lamina.bench.transfer import TransferResult


def transfer_table(result: TransferResult) -> Table:
    """A row a cell."""
    spec = result.spec
    table = Table(
        title=f"{spec.device}: retrieves of {spec.document_bytes / 2**30:g} GiB, {spec.layers} "
        f"layers; link {result.link_load_gbps:.1f} GB/s load, {result.link_store_gbps:.1f} store"
    )
    for heading in (
        "page KiB",
        "layers/slice",
        "at once",
        "blocks",
        "GB/s",
        "of link",
        "first slice ms",
        "worst",
        "last ms",
        "cores",
        "store of link",
        "wrong bytes",
    ):
        table.add_column(heading, justify="right")
    for cell in result.cells:
        table.add_row(
            f"{cell.page_bytes / 1024:g}",
            f"{cell.layers_per_slice}",
            f"{cell.concurrency}",
            "in a row" if cell.consecutive_blocks else "scattered",
            f"{cell.gbps:.2f}",
            f"{cell.share_of_link:.3f}",
            f"{cell.first_slice_ms:.2f}",
            f"{cell.first_slice_worst_ms:.2f}",
            f"{cell.last_slice_ms:.2f}",
            f"{cell.server_cores:.2f}",
            f"{cell.store_share_of_link:.3f}",
            f"{cell.wrong_bytes}",
        )
    return table
