"""What benchmarks print: a plain table (timing by turns is `lowprec.jobs.timing`)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a plain table, the first column to the left."""
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, box=None, title_justify="left", pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    console = Console(width=110)
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip()
