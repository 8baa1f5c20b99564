"""What a recipe costs in loss: the same run under every recipe and several seeds, against fp32.

Speed is not measured here, so the runs need not take turns: every (recipe, seed) is a process of its own, as many at a
time as there are cores for, and the order is by seed, so that stopping early leaves whole seeds. A recipe's difference
is paired with fp32 of the same seed; what the table gives is the mean of the differences and their spread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BOUNDS", "DEFAULT", "Task", "run", "table"]

# What the loss may rise by, in percent of fp32's (mean over seeds). Recipes without a row have no target.
BOUNDS: dict[str, float] = {
    "bf16": 0.3, "fp16": 0.3,
    "fp8": 1.0, "fp8-delayed": 1.0, "fp8-rowwise": 1.0, "fp8-block": 1.0, "fp8-block-fp32": 1.0,
    "mxfp8": 1.0, "int8": 1.0, "int8-switchback": 1.0, "int8-block": 1.0,
    "nvfp4": 3.0, "mxfp4": 3.0,
    "msamp-O2": 0.5, "fp32 states=8bit|8bit": 0.5, "fp32 states=4bit|4bit": 1.0,
}  # fmt: skip
DEFAULT = ("fp32", *BOUNDS)


@dataclass(frozen=True)
class Task:
    """One training run."""

    recipe: str
    seed: int
    model: str
    size: str
    steps: int
    threads: int
    device: str


def _train(task: Task) -> dict[str, Any]:
    """Train and give back the last validation loss (runs in its own process)."""
    import torch

    from lowprec import workloads
    from lowprec.jobs import results
    from lowprec.jobs.compare import Comparison, Settings
    from lowprec.jobs.engine import Hyper
    from lowprec.jobs.rundir import RunDirectory

    torch.set_num_threads(task.threads)
    work = workloads.load(task.model, None, task.size, None)
    hyper = Hyper(lr=work.lr, steps=task.steps, warmup=min(10, max(1, task.steps // 5)))
    settings = Settings((task.recipe,), hyper, (task.seed,), eval_every=task.steps, observe=0, device=task.device)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run", create=True)
        comparison = Comparison(work, settings, directory, lambda line: None)
        comparison.begin()
        comparison.run(save_every=float("inf"))
        row = results.summarise(directory)["rows"][0]
    return {"loss": row["loss"], "error": row["error"], "seconds": time.monotonic() - start}


def run(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Run the tasks, ``jobs`` at a time, and give each result as it arrives."""
    context = multiprocessing.get_context("spawn")
    with _threads_of_children(tasks[0].threads), ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(_train, task): task for task in tasks}
        for done in as_completed(waiting):
            task = waiting[done]
            try:
                yield task, done.result()
            except Exception as error:
                yield task, {"loss": None, "error": f"{type(error).__name__}: {error}", "seconds": 0.0}


@contextlib.contextmanager
def _threads_of_children(threads: int) -> Iterator[None]:
    """Let a child's OpenMP pool start with its own share of the cores."""
    before = os.environ.get("OMP_NUM_THREADS")  # a child reads it as it loads OpenMP
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def table(results: dict[tuple[str, int], dict[str, Any]], baseline: str = "fp32") -> list[dict[str, Any]]:
    """Rows of the table: mean loss, mean and spread of the paired differences in percent, bound, verdict."""
    recipes = dict.fromkeys(recipe for recipe, _ in results)
    base = {seed: found["loss"] for (recipe, seed), found in results.items() if recipe == baseline and found["loss"]}
    rows = []
    for recipe in recipes:
        own = {seed: found for (name, seed), found in results.items() if name == recipe}
        losses = [found["loss"] for found in own.values() if found["loss"] is not None]
        paired = [100 * (f["loss"] / base[s] - 1) for s, f in own.items() if f["loss"] is not None and base.get(s)]
        errors = [found["error"] for found in own.values() if found["error"]]
        mean = statistics.fmean(paired) if paired else None
        bound = BOUNDS.get(recipe)
        met = None if mean is None or bound is None else mean <= bound and not errors
        rows.append(
            {
                "recipe": recipe,
                "seeds": len(losses),
                "loss": statistics.fmean(losses) if losses else None,
                "difference_percent": mean,
                "spread_percent": statistics.stdev(paired) if len(paired) > 1 else None,
                "each_percent": paired,
                "bound_percent": bound,
                "met": met,
                "error": errors[0] if errors else None,
            }
        )
    return rows
