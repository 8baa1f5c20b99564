"""`lowprec plan`: bytes by role, the largest batch, FLOPs by format, and which layers convert, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import complete_recipe, emit, job_options, json_option, split

EXAMPLE = """\b
Examples:
  lowprec plan --model gpt --size small --recipes bf16,fp8 --memory 8G
  lowprec plan --params 70e9 --layers 80 --hidden 8192 --recipes bf16,msamp-O3
  lowprec plan --model model.safetensors --recipes fp8-block --modules
"""
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def size_in_bytes(text: str) -> float:
    """Bytes in a size such as "24G", "512M" or "1e9".

    >>> size_in_bytes("24G") == 24 * 2**30
    True
    """
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    try:
        return float(word[:-1]) * _UNITS[word[-1]] if word and word[-1] in _UNITS else float(word)
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write it like 24G, 512M or 1e9.") from None


@click.command(epilog=EXAMPLE)
@click.option(
    "--recipes", default="fp32,bf16,fp8", show_default=True, metavar="R,R", shell_complete=complete_recipe,
    help="Recipes.",
)  # fmt: skip
@job_options
@click.option("--config", type=click.Path(path_type=Path), help="config.json of a safetensors model.")
@click.option("--params", type=float, help="Parameters of a transformer that is not here.")
@click.option("--layers", type=click.IntRange(1), help="Its layers.")
@click.option("--hidden", type=click.IntRange(1), help="Its width.")
@click.option("--vocab", type=click.IntRange(1), default=32000, show_default=True, help="Its vocabulary.")
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True, help="Tokens a sample.")
@click.option("--memory", metavar="SIZE", help="Memory to fill, e.g. 24G: says the largest batch.")
@click.option("--modules", is_flag=True, help="Show a row for each module too.")
@json_option
def command(**given: Any) -> None:
    """Say what a training step will need under each recipe.

    Of a model that runs, activations are measured on two small batches. Of one that is only
    sizes or a safetensors file they are estimated, for a transformer with fused attention.
    """
    from lowprec.recipes import recipe as find_recipe

    names = split(given["recipes"])
    for name in names:
        find_recipe(name)
    memory = size_in_bytes(given["memory"]) if given["memory"] else None
    needs, plans, batch = _needs(given, names)
    rows = [need.to_dict(batch, memory) for need in needs]
    result = {"kind": "plan", "batch": batch, "memory": memory, "rows": rows, "plans": [p.to_dict() for p in plans]}
    emit(result, given["json_to"], lambda: _text(result, plans if given["modules"] else []))


def _needs(given: dict[str, Any], names: tuple[str, ...]) -> tuple[list[Any], list[Any], int]:
    """Needs and plan of every recipe, and the batch they are shown for."""
    from lowprec import workloads
    from lowprec.jobs import planner, skeleton

    sized = [given[k] is not None for k in ("params", "layers", "hidden")]
    if any(sized) and not all(sized):
        raise ValueError("--params, --layers and --hidden belong together; give all three.")
    path = Path(given["model"])
    if all(sized):
        what = (given["params"], given["layers"], given["hidden"], given["vocab"], given["context"])
        found = [planner.needs_of_shapes(lambda: skeleton.from_sizes(*what), name) for name in names]
        batch = given["batch"] or 1
    elif path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json") or path.is_dir():
        found = [
            planner.needs_of_shapes(lambda: skeleton.from_safetensors(path, given["config"]), name) for name in names
        ]
        batch = given["batch"] or 1
    else:
        work = workloads.load(given["model"], given["data"], given["size"] or "tiny", given["batch"])
        found = [planner.needs_of_workload(work, name) for name in names]
        batch = planner.batch_of(work)
    return [need for need, _ in found], [plan for _, plan in found], batch


def _amount(value: float | None) -> str:
    """Bytes in the unit that reads best."""
    if value is None:
        return "-"
    for unit, size in (("G", 2**30), ("M", 2**20)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value / 2**10:.3g}K"


def _not_converted(rows: list[dict[str, Any]]) -> list[str]:
    """Why modules stay as they are, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["handler"]:
            reasons.setdefault(row["note"], []).append(row["name"] or "(model)")
    return [
        f"  not {', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}: {why}"
        for why, names in reasons.items()
    ]


def _text(result: dict[str, Any], plans: list[Any]) -> str:
    heads = ["recipe", "weights", "master", "grads", "states", "act/sample", "peak", "comm"]
    heads += ["batch"] if result["memory"] else []
    table = [heads]
    for row in result["rows"]:
        keys = ("weights", "masters", "gradients", "states", "activations", "peak", "communication")
        cells = [row["recipe"], *(_amount(row[key]) for key in keys)]
        table.append([*cells, str(row["largest_batch"])] if result["memory"] else cells)
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))]) for line in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    first = result["rows"][0]
    how = "measured" if first["measured"] else "estimated"
    lines += ["", f"{first['parameters']:,} parameters, AdamW; peak at batch {result['batch']}, activations {how}."]
    if result["memory"]:
        lines.append(f"batch: the most samples that fit {_amount(result['memory'])}.")
    if not first["measured"] and not first["activations"]:
        lines.append("No config.json with sizes: activations are left out; give --config.")
    for row, plan in zip(result["rows"], result["plans"]):
        shares = ", ".join(f"{share:.1%} {form}" for form, share in row["flops"].items())
        done = sum(bool(r["handler"]) for r in plan["rows"])
        lines.append(f"{row['recipe']}: FLOPs of products {shares}; {done} of {len(plan['rows'])} modules convert.")
        lines += _not_converted(plan["rows"])
    return "\n".join([*lines, *(f"\n{plan}" for plan in plans)])
