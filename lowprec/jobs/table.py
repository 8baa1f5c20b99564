"""The table of a comparison in 80 columns of plain text.

It is laid out by hand rather than by a table library because it must never wrap: it is pasted into issues and READMEs.
"""

from __future__ import annotations

from typing import Any

from lowprec.jobs import machine

__all__ = ["number", "render"]


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number for a cell, "-" where there is none.

    >>> number(1.234), number(None), number(12345.6, 0)
    ('1.23', '-', '12,346')
    """
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"


def _difference(row: dict[str, Any]) -> str:
    if row["difference"] is None:
        return "-"
    spread = "" if row["spread"] is None else f"±{100 * row['spread']:.1f}"
    return f"{100 * row['difference']:+.1f}{spread}"


def _counts(row: dict[str, Any]) -> str:
    if row["flushed"] is None:
        return "-"
    return f"{row['flushed']:.2f}/{row['saturated']:.2f}"


def _cells(row: dict[str, Any]) -> list[str]:
    peak = row["peak_bytes"]
    return [
        row["recipe"],
        number(row["rate"], 0),
        f"{number(row['vs_torch_fp32'])} {number(row['vs_torch_bf16']):>4}",
        number(row["loss"], 3),
        _difference(row),
        number(row["bytes_a_parameter"], 1),
        number(None if peak is None else peak / 2**20, 0),
        number(None if row["low_share"] is None else 100 * row["low_share"], 0, "%"),
        _counts(row),
        row["verdict"],
    ]


def render(result: dict[str, Any]) -> str:
    """The table with its sentence and its notes.

    Args:
        result: what `lowprec.jobs.results.summarise` gives.
    """
    unit = result["unit"]
    over = ["", unit, "x torch", "val", "% from", "B per", "peak", "low", "flush", ""]
    under = ["recipe", "/s", "fp32 bf16", "loss", result["baseline"].removeprefix("torch-"), "param", "MiB", "GEMM"]
    under += ["/sat %", "verdict"]
    body = [_cells(row) for row in result["rows"]]
    widths = [max(len(cells[i]) for cells in [over, under, *body]) for i in range(len(over))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return " ".join([first, *(c.rjust(w) for c, w in zip(cells[1:-1], widths[1:-1])), cells[-1]]).rstrip()

    head = [line(over), line(under), "-" * (sum(widths) + len(widths) - 1)]
    notes = [f"{row['recipe']}: {row['error']}" for row in result["rows"] if row["error"]]
    seeds = len(result["seeds"])
    notes.append(f"{result['about'] or result['job']}; {result['steps']} steps, {seeds} seed{'s' * (seeds != 1)}.")
    if seeds == 1:
        notes.append("One seed: the loss differences carry no spread; give --seeds 3 for one.")
    notes.append(machine.describe(result["machine"]))
    return "\n".join([*head, *map(line, body), "", result["sentence"], *notes])
