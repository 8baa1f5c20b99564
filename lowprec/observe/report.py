"""The report: a run folder as one HTML file that needs no network.

The page is made of four parts that stay apart: what is said (tables and sentences, written here, so that it reads
without scripts and by a screen reader), what is drawn (`report.js`, from the data in the page), how it looks
(`report.css`: light and dark, phone and paper), and plotly itself, which is put in whole. Nothing is fetched, so the
file can be mailed and opened in ten years.

Everything comes from the run's own files; `lowprec report RUN` makes the page anew at any time, also of a run that was
interrupted.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lowprec.errors import missing_extra
from lowprec.jobs import machine, results
from lowprec.jobs.rundir import RunDirectory, atomic, jsonable
from lowprec.jobs.table import number

__all__ = ["check", "collect", "render", "write"]

POINTS = 400  # a curve is thinned to about that many points
HERE = Path(__file__).parent


def check() -> None:
    """Raise now, not after hours of training, where the page could not be made."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise missing_extra("plotly", "report", "the report page") from None


def write(run: str | Path, path: str | Path) -> None:
    """Write the report of a run folder.

    Args:
        run: the folder `lowprec compare` or `lowprec train` wrote.
        path: the HTML file.
    """
    check()
    directory = RunDirectory(run, create=False)
    page = render(collect(directory))
    atomic(Path(path), lambda place: place.write_text(page, encoding="utf-8"))


# -- the data ----------------------------------------------------------------------------------------------------------


def collect(directory: RunDirectory) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    run = directory.read_json("run.json")
    if run["kind"] == "train":
        run = {**run, "settings": {**run["settings"], "recipes": [run["settings"]["recipe"]]}}
        run["settings"]["seeds"] = [run["settings"]["seed"]]
    lines = list(directory.lines("metrics.jsonl"))
    if not lines:
        raise ValueError(f"{directory.path} has no metrics yet; let the run make a step first.")
    result = results.summarise(directory, run)
    plans = directory.read_json("plans.json") if directory.file("plans.json").exists() else {}
    by_recipe: dict[str, list[dict[str, Any]]] = {name: [] for name in run["settings"]["recipes"]}
    for line in lines:
        by_recipe.setdefault(line["recipe"], []).append(line)
    return jsonable(  # type: ignore[no-any-return]
        {
            **result,
            "settings": run["settings"],
            "curves": {name: _curves(rows) for name, rows in by_recipe.items()},
            "history": {name: _history(rows) for name, rows in by_recipe.items()},
            "heat": _heat(directory.lines("statistics.jsonl")),
            "plans": plans,
            "commands": _commands(run, directory),
        }
    )


def _thin(values: Sequence[Any]) -> list[int]:
    """Indices of about `POINTS` of them, the first and the last included."""
    if len(values) <= POINTS:
        return list(range(len(values)))
    stride = (len(values) - 1) / (POINTS - 1)
    return sorted({round(i * stride) for i in range(POINTS)})


def _band(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Mean, least and largest over the seeds at every step."""
    at: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["loss"] is not None:
            at[row["step"]].append(row["loss"])
    steps = sorted(at)
    steps = [steps[i] for i in _thin(steps)]
    return {
        "steps": steps,
        "mean": [round(statistics.fmean(at[s]), 5) for s in steps],
        "low": [round(min(at[s]), 5) for s in steps],
        "high": [round(max(at[s]), 5) for s in steps],
    }


def _curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {kind: _band(row for row in rows if row["kind"] == kind) for kind in ("step", "validation")}


def _history(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gradient norm, loss scale and skipped steps of the first seed."""
    steps = [row for row in rows if row["kind"] == "step"]
    steps = [row for row in steps if row["seed"] == steps[0]["seed"]]
    kept = [steps[i] for i in _thin(steps)]
    return {
        "steps": [row["step"] for row in kept],
        "grad_norm": [row["grad_norm"] for row in kept],
        "loss_scale": [row["loss_scale"] for row in kept],
        "skipped": [{"step": row["step"], "reason": row["reason"]} for row in steps if row["skipped"]],
    }


def _heat(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """recipe -> role -> {modules, steps, and a matrix for each statistic}."""
    cells: dict[str, dict[str, dict[tuple[str, int], dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        cells[line["recipe"]][line["role"]][line["module"], line["step"]] = line
    return {recipe: {role: _matrices(found) for role, found in roles.items()} for recipe, roles in cells.items()}


def _matrices(found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    modules = list(dict.fromkeys(module for module, _ in found))
    steps = sorted({step for _, step in found})

    def matrix(value: Any) -> list[list[Any]]:
        return [[value(found[m, s]) if (m, s) in found else None for s in steps] for m in modules]

    return {
        "modules": modules,
        "steps": steps,
        "flushed": matrix(lambda row: _share(row, "flushed")),
        "saturated": matrix(lambda row: _share(row, "saturated")),
        "scale": matrix(lambda row: _log2(row.get("scale"))),
        "amax": matrix(lambda row: _log2(row.get("amax"))),
    }


def _share(row: dict[str, Any], key: str) -> float | None:
    return round(100 * row[key] / row["elements"], 4) if row.get("elements") else None


def _log2(value: float | None) -> float | None:
    return round(math.log2(value), 3) if value is not None and 0 < value < math.inf else None


def _commands(run: dict[str, Any], directory: RunDirectory) -> list[dict[str, str]]:
    return [
        {"what": "Make this run again", "command": run["machine"]["command"]},
        {"what": "Make this page again", "command": f"lowprec report {directory.path} --out report.html"},
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def render(data: dict[str, Any]) -> str:
    """The page for `collect`'s data."""
    from plotly.offline import get_plotlyjs

    parts = {
        "title": f"lowprec {data['kind']}: {data['job']}",
        "sentence": data["sentence"],
        "about": f"{data['about'] or data['job']}; {data['steps']} steps, seeds {len(data['seeds'])}.",
        "machine": machine.describe(data["machine"]),
    }
    raw = {
        "css": (HERE / "report.css").read_text(),
        "js": (HERE / "report.js").read_text(),
        "plotly": get_plotlyjs(),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "table": _table(data),
        "plans": "".join(_plan(name, plan) for name, plan in data["plans"].items()) or "<p>No recipe was applied.</p>",
        "facts": _facts(data["machine"]),
        "commands": "".join(
            f"<li>{html.escape(c['what'])}: <code>{html.escape(c['command'])}</code></li>" for c in data["commands"]
        ),
        "curves_words": html.escape(_curves_in_words(data)),
        "tradeoff_words": html.escape(_tradeoff_in_words(data)),
    }
    page = (HERE / "report.html").read_text()
    for key, value in {**{k: html.escape(v) for k, v in parts.items()}, **raw}.items():
        page = page.replace("{{" + key + "}}", value)
    return page


def _cells(row: dict[str, Any], unit: str) -> list[tuple[str, str]]:
    """Heading and text of every cell of a row."""
    spread = "" if row["spread"] is None else f" ±{100 * row['spread']:.2f}"
    difference = "–" if row["difference"] is None else f"{100 * row['difference']:+.2f}{spread} %"
    peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    low = None if row["low_share"] is None else 100 * row["low_share"]
    counts = "–" if row["flushed"] is None else f"{row['flushed']:.3f} / {row['saturated']:.3f}"
    return [
        (f"{unit}/s", number(row["rate"], 0)),
        ("× torch fp32", number(row["vs_torch_fp32"])),
        ("× torch bf16", number(row["vs_torch_bf16"])),
        ("validation loss", number(row["loss"], 4)),
        ("difference", difference),
        ("bytes / parameter", number(row["bytes_a_parameter"], 2)),
        ("peak MiB", number(peak, 0)),
        ("GEMMs in low precision", number(low, 0, " %")),
        ("flushed / saturated %", counts),
    ]


def _table(data: dict[str, Any]) -> str:
    """The summary as an HTML table."""
    heads = [head for head, _ in _cells(data["rows"][0], data["unit"])]
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in ["recipe", "verdict", *heads])
    body = ""
    for row in data["rows"]:
        cells = "".join(f"<td>{html.escape(text)}</td>" for _, text in _cells(row, data["unit"]))
        verdict = row["verdict"] or "peer"
        why = f'<span class="why">{html.escape(row["error"])}</span>' if row["error"] else ""
        chip = f'<td><span class="chip {verdict}">{verdict}</span>{why}</td>'
        body += f'<tr><th scope="row">{html.escape(row["recipe"])}</th>{chip}{cells}</tr>'
    caption = f"Baseline of the loss: {data['baseline']}. Speeds are medians of ratios of neighbouring steps."
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _plan(name: str, plan: dict[str, Any]) -> str:
    """One recipe's plan, folded."""
    heads = ("module", "class", "handler", "output", "grad_input", "grad_weight", "computed by / why not")
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    body = ""
    for row in plan["rows"]:
        words = "; ".join(str(row[k]) for k in ("carrier", "note") if row.get(k))
        keys = ("cls", "handler", "output", "grad_input", "grad_weight")
        cells = "".join(f"<td>{html.escape(str(row.get(k) or '–'))}</td>" for k in keys)
        body += (
            f'<tr><th scope="row">{html.escape(row["name"] or "(model)")}</th>{cells}<td>{html.escape(words)}</td></tr>'
        )
    done = sum(1 for row in plan["rows"] if row.get("handler"))
    title = f"{html.escape(name)}: {done} of {len(plan['rows'])} modules converted"
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="Plan of {html.escape(name)}">'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<details><summary>{title}</summary>{region}{table}</div></details>"


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(k.replace("_", " "))}</th><td>{html.escape(str(v))}</td></tr>'
        for k, v in facts.items()
        if v is not None
    )
    return f"<table>{rows}</table>"


def _curves_in_words(data: dict[str, Any]) -> str:
    ends = [f"{row['recipe']} {row['loss']:.3f}" for row in data["rows"] if row["loss"] is not None]
    return "Line chart of the loss over the steps. Final validation loss: " + ", ".join(ends) + "."


def _tradeoff_in_words(data: dict[str, Any]) -> str:
    points = [
        f"{row['recipe']} {number(row['vs_torch_fp32'])} times torch fp32, "
        f"{number(row['bytes_a_parameter'], 1)} bytes a parameter"
        for row in data["rows"]
        if row["rate"] is not None
    ]
    return "Scatter of speed against change of loss, the larger the dot the more bytes. " + "; ".join(points) + "."
