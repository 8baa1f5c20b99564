"""`lowprec bench train`: speed and memory of a training step under each recipe, next to torch's own ways."""

from __future__ import annotations

from typing import Any

import click

from lowprec.cli.options import complete_recipe, emit, json_option, split

EXAMPLE = """\b
Examples:
  lowprec bench train
  lowprec bench train --model cnn --recipes bf16,fp8,int8 --memory
"""


@click.command(epilog=EXAMPLE)
@click.option("--model", default="gpt", show_default=True, help="gpt, gpt-small or cnn.")
@click.option("--recipes", metavar="R,R", shell_complete=complete_recipe, help="Recipes. [those with a target]")
@click.option("--peers", metavar="P,P", help="Of torch's ways. [all]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Steps of each.")
@click.option("--where/--no-where", default=True, help="Where the time of a step goes.")
@click.option("--memory/--no-memory", default=False, help="Peak memory of a step.")
@json_option
def command(**given: Any) -> None:
    """Race recipes against torch autocast and print ratios of the same run.

    Steps are taken in turn, so a machine that slows down slows all. --where sorts the
    time of a step by kind, beside the time its products alone would take.
    """
    from lowprec.jobs import machine, speed

    peers = split(given["peers"]) if given["peers"] is not None else speed.PEERS
    recipes = split(given["recipes"]) if given["recipes"] else speed.RECIPES
    for name in peers:
        if name not in speed.PEERS:
            from lowprec.errors import unknown_name

            raise unknown_name("peer", name, speed.PEERS)
    rows = speed.race((*peers, *recipes), given["model"], given["rounds"], lambda text: click.echo(text, err=True))
    for row in rows:
        if given["where"] and row["error"] is None and not row["name"].endswith("compiled"):
            row["where_ms"] = speed.breakdown(row["name"], given["model"])
        if given["memory"] and row["error"] is None:
            row["memory"] = speed.memory(row["name"], given["model"])
    result = {
        "kind": "bench train",
        "model": given["model"],
        "rounds": given["rounds"],
        "machine": machine.facts(),
        "limits_ms": speed.limits(given["model"]),
        "rows": rows,
    }
    emit(result, given["json_to"], lambda: _render(result))


def _render(result: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    from lowprec.jobs import machine

    table = Table(title=f"{result['model']}: one training step", title_justify="left")
    table.add_column("")
    for name in ("ms", "a second", "vs autocast bf16", "vs fp32"):
        table.add_column(name, justify="right")
    kinds = list(next((row["where_ms"] for row in result["rows"] if "where_ms" in row), {}))
    for kind in kinds:
        table.add_column(kind, justify="right")
    with_memory = any("memory" in row for row in result["rows"])
    if with_memory:
        table.add_column("rest MB", justify="right")
        table.add_column("peak MB", justify="right")
    for row in result["rows"]:
        if row["error"]:
            table.add_row(row["name"], row["error"])
            continue
        cells = [
            row["name"],
            f"{row['step_ms']:.0f}",
            f"{row['per_second']:,.0f}",
            _ratio(row["vs_torch_bf16"]),
            _ratio(row["vs_torch_fp32"]),
        ]
        cells += [f"{row['where_ms'][kind]:.0f}" if "where_ms" in row else "" for kind in kinds]
        if with_memory:
            cells += [f"{row['memory'][key] / 2**20:.0f}" for key in ("rest", "peak")] if "memory" in row else ["", ""]
        table.add_row(*cells)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
        limits = result["limits_ms"]
        console.print(f"products of linear layers alone: bf16 {limits['bf16']:.0f} ms, int8 {limits['int8']:.0f} ms")
        console.print(machine.describe(result["machine"]))
    return captured.get()


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
