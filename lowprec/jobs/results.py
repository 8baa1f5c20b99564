"""From the lines of a run to the rows of the table, and a verdict in words.

Speed: units a second at the median step; ratios are medians over pairs of steps that were neighbours in time. Loss: the
last validation, its difference from the baseline paired by seed, with the standard deviation of those differences over
seeds. A verdict weighs the difference against both a bound and that spread:

    keeps    within 1%, or within two spreads of zero
    close    within 3%
    loses    more than 3%
    fails    an error, or a loss that is not finite
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lowprec.jobs.engine import PEERS
from lowprec.jobs.rundir import RunDirectory

__all__ = ["CLOSE", "KEEPS", "sentence", "summarise"]

KEEPS, CLOSE = 0.01, 0.03
_Rows = list[dict[str, Any]]


def summarise(directory: RunDirectory, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """The result of a run as plain values: the rows of the table, the sentence on top, where it was measured."""
    run = run or directory.read_json("run.json")
    by_recipe: dict[str, _Rows] = {name: [] for name in run["settings"]["recipes"]}
    for line in directory.lines("metrics.jsonl"):
        by_recipe.setdefault(line["recipe"], []).append(line)
    flushed = _statistics(directory.lines("statistics.jsonl"))
    names = list(by_recipe)
    baseline = next((n for n in ("fp32", "torch-fp32") if n in names), names[0])
    rows = [_row(name, by_recipe, baseline, flushed.get(name)) for name in names]
    done = max(
        (line["step"] + 1 for lines in by_recipe.values() for line in lines if line["kind"] == "step"), default=0
    )
    result = {
        "kind": run["kind"],
        "job": run["job"],
        "about": run["about"],
        "unit": run["unit"],
        "steps": done,
        "seeds": list(run["settings"]["seeds"]),
        "baseline": baseline,
        "rows": rows,
        "machine": run["machine"],
    }
    return {**result, "sentence": sentence(result)}


def _row(name: str, by_recipe: dict[str, _Rows], baseline: str, counts: tuple[float, float] | None) -> dict[str, Any]:
    lines = by_recipe[name]
    steps = [line for line in lines if line["kind"] == "step"]
    timed = [line for line in steps if line["timed"] and line["seconds"]]
    memory = next((line for line in lines if line["kind"] == "memory"), None)
    coverage = next((line for line in lines if line["kind"] == "coverage"), None)
    failure = next((line for line in lines if line["kind"] == "failure"), None)
    rate = statistics.median([line["units"] / line["seconds"] for line in timed]) if timed else None
    losses, differences = _losses(lines), _differences(lines, by_recipe[baseline])
    loss = statistics.fmean(losses.values()) if losses else None
    broken = any(line["loss"] is None for line in steps) or any(value != value for value in losses.values())
    difference = statistics.fmean(differences) if differences else None
    spread = statistics.stdev(differences) if len(differences) > 1 else None
    row: dict[str, Any] = {
        "recipe": name,
        "peer": name in PEERS,
        "rate": rate,
        "vs_torch_fp32": _ratio(timed, by_recipe.get("torch-fp32", [])),
        "vs_torch_bf16": _ratio(timed, by_recipe.get("torch-bf16", [])),
        "loss": None if broken else loss,
        "difference": None if broken or name == baseline else difference,
        "spread": None if name == baseline else spread,
        "bytes_a_parameter": _bytes(memory),
        "bytes": {k: memory[k] for k in ("weights", "masters", "gradients", "states")} if memory else None,
        "peak_bytes": memory["peak"] if memory else None,
        "coverage": coverage["shares"] if coverage else None,
        "low_share": coverage["low"] if coverage else None,
        "flushed": counts[0] if counts else None,
        "saturated": counts[1] if counts else None,
        "skipped_steps": sum(bool(line["skipped"]) for line in steps),
        "error": failure["error"] if failure else "the loss became NaN or infinite" if broken else None,
    }
    return {**row, "verdict": _verdict(row, name == baseline)}


def _bytes(memory: dict[str, Any] | None) -> float | None:
    if memory is None or not memory["parameters"]:
        return None
    total = sum(memory[role] for role in ("weights", "masters", "gradients", "states"))
    return float(total / memory["parameters"])


def _losses(lines: _Rows) -> dict[int, float]:
    """The last validation loss of each seed."""
    last: dict[int, tuple[int, float]] = {}
    for line in lines:
        if line["kind"] == "validation" and line["step"] >= last.get(line["seed"], (-1, 0.0))[0]:
            last[line["seed"]] = (line["step"], math.nan if line["loss"] is None else line["loss"])
    return {seed: loss for seed, (_, loss) in last.items()}


def _differences(lines: _Rows, base: _Rows) -> list[float]:
    own, other = _losses(lines), _losses(base)
    return [own[seed] / other[seed] - 1 for seed in own if other.get(seed)]


def _ratio(timed: _Rows, peer: _Rows) -> float | None:
    """How many times as fast as the peer: the median over steps both made at the same time."""
    times = {(line["seed"], line["step"]): line["seconds"] for line in peer if line["kind"] == "step" and line["timed"]}
    pairs = [times[key] / line["seconds"] for line in timed if (key := (line["seed"], line["step"])) in times]
    return statistics.median(pairs) if pairs else None


def _statistics(lines: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Percent of elements that were flushed to zero and saturated, over everything that was watched."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for line in lines:
        found = sums[line["recipe"]]
        found[0] += line["flushed"]
        found[1] += line["saturated"]
        found[2] += line["elements"]
    return {name: (100 * f / n, 100 * s / n) for name, (f, s, n) in sums.items() if n}


def _verdict(row: dict[str, Any], is_baseline: bool) -> str:
    if row["error"]:
        return "fails"
    if is_baseline:
        return "base"
    if row["peer"] or row["difference"] is None:
        return ""
    worse = row["difference"]
    if worse <= KEEPS or (row["spread"] is not None and worse <= 2 * row["spread"] and worse <= CLOSE):
        return "keeps"
    return "close" if worse <= CLOSE else "loses"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}%"


def sentence(result: dict[str, Any]) -> str:
    """The verdict on everything in one sentence."""
    if result["kind"] == "train":
        row = result["rows"][0]
        ended = "no validation yet" if row["loss"] is None else f"validation loss {row['loss']:.3f}"
        return f"{row['recipe']} on {result['job']}: {ended} after {result['steps']} steps."
    rows = [row for row in result["rows"] if not row["peer"]]
    good = [row for row in rows if row["verdict"] in ("keeps", "base") and row["rate"]]
    if not good:
        return "No recipe kept the loss of the baseline here."
    fastest = max(good, key=lambda row: row["rate"])
    ratio = fastest["vs_torch_fp32"]
    speed = f" at {ratio:.2f} times the speed of torch fp32" if ratio else ""
    change = f" (loss {_percent(fastest['difference'])})" if fastest["difference"] is not None else ""
    text = f"{fastest['recipe']} is the fastest recipe that keeps the loss of {result['baseline']} here{speed}{change}"
    held = [row for row in good if row["bytes_a_parameter"]]
    if held:
        smallest = min(held, key=lambda row: row["bytes_a_parameter"])
        if smallest["recipe"] != fastest["recipe"]:
            text += f"; {smallest['recipe']} needs least memory, {smallest['bytes_a_parameter']:.1f} bytes a parameter"
    lost = [row["recipe"] for row in rows if row["verdict"] in ("loses", "fails")]
    if lost:
        text += f"; {', '.join(lost)} {'does' if len(lost) == 1 else 'do'} not keep it"
    return text + "."
