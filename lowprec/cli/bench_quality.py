"""`lowprec bench quality`: what each recipe costs in loss, over seeds, against fp32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import emit, json_option, split

EXAMPLE = """\b
Examples:
  lowprec bench quality
  lowprec bench quality --recipes fp32,fp8,mxfp4 --seeds 1 --steps 200
"""


@click.command(epilog=EXAMPLE)
@click.option("--recipes", metavar="R,R", help="Recipes; fp32 is added. [those with a target]")
@click.option("--model", default="gpt", show_default=True, help="gpt or cnn.")
@click.option("--size", default="small", show_default=True, help="Of gpt: tiny, small, medium.")
@click.option("--steps", type=click.IntRange(1), default=600, show_default=True, help="Steps.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Starts.")
@click.option("--jobs", type=click.IntRange(1), help="Runs at a time. [one a core]")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@json_option
def command(**given: Any) -> None:
    """Train under every recipe and compare the final loss with fp32's.

    Differences are paired by seed; the table gives their mean, their spread and the bound
    the recipe should keep.
    """
    from lowprec.jobs.quality import DEFAULT, Task, run, table

    names = split(given["recipes"]) if given["recipes"] else DEFAULT
    names = names if "fp32" in names else ("fp32", *names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = given["jobs"] or cores
    threads = max(1, cores // jobs)
    tasks = [
        Task(name, seed, given["model"], given["size"], given["steps"], threads, given["device"])
        for seed in range(given["seeds"])
        for name in names
    ]
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for task, outcome in run(tasks, jobs):
        found[task.recipe, task.seed] = outcome
        said = outcome["error"] or f"loss {outcome['loss']:.4f} in {outcome['seconds']:.0f} s"
        click.echo(f"{len(found)}/{len(tasks)}  {task.recipe}, seed {task.seed}: {said}", err=True)
        if given["json_to"] not in (None, "-"):  # what is done so far survives whatever comes
            _write(Path(given["json_to"]), _result(given, table(_in_order(found, names))))
    result = _result(given, table(_in_order(found, names)))
    emit(result, given["json_to"], lambda: _render(result))


def _in_order(found: dict[tuple[str, int], Any], names: tuple[str, ...]) -> dict[tuple[str, int], Any]:
    return {key: found[key] for key in sorted(found, key=lambda key: (names.index(key[0]), key[1]))}


def _result(given: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from lowprec.jobs import machine

    about = {name: given[name] for name in ("model", "size", "steps", "seeds", "device")}
    return {"kind": "bench quality", **about, "machine": machine.facts(), "rows": rows}


def _write(path: Path, result: dict[str, Any]) -> None:
    import json

    from lowprec.jobs.rundir import jsonable

    path.write_text(json.dumps(jsonable(result), indent=1))


def _render(result: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{result['model']} {result['size']}, {result['steps']} steps", title_justify="left")
    shown.add_column("recipe")
    for name in ("seeds", "loss", "vs fp32", "spread", "bound"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    for row in result["rows"]:
        shown.add_row(
            row["recipe"],
            str(row["seeds"]),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            _percent(row["difference_percent"]),
            _percent(row["spread_percent"], sign=False),
            _percent(row["bound_percent"], sign=False),
            row["error"] or {True: "within", False: "outside", None: ""}[row["met"]],
        )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def _percent(value: float | None, sign: bool = True) -> str:
    if value is None:
        return ""
    return f"{value:+.2f}%" if sign else f"{value:.2f}%"
