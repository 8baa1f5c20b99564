"""A run folder with made-up numbers, for tests of the table and the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lowprec.jobs import machine
from lowprec.jobs.rundir import RunDirectory

RECIPES = ("torch-fp32", "torch-bf16", "fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8", "msamp-O2")
SECONDS = (1.0, 0.5, 0.95, 0.4, 0.45, 0.44, 0.46, 0.29, 0.47)
WORSE = (0.0, 0.001, 0.0, 0.0, 0.003, 0.002, 0.05, 0.004, 0.006)
MODULES = [f"blocks.{i}.{part}" for i in range(3) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]


def make(path: Path, steps: int = 60, seeds: int = 2, failed: str = "") -> RunDirectory:
    """Write a comparison's files."""
    directory = RunDirectory(path)
    settings: dict[str, Any] = {"recipes": list(RECIPES), "seeds": list(range(seeds)), "hyper": {"steps": steps}}
    about = {"kind": "compare", "job": "gpt-made", "about": "a made-up GPT", "unit": "tokens"}
    directory.write_json("run.json", {**about, "settings": settings, "machine": machine.facts()})
    plan = [
        {"name": m, "cls": "Linear", "handler": "linear", "output": "e4m3 e4m3", "grad_input": "e5m2 e4m3",
         "grad_weight": "e5m2 e4m3", "carrier": "bf16 GEMM", "note": ""}
        for m in MODULES
    ]  # fmt: skip
    plan.append({"name": "lm_head", "cls": "Linear", "handler": "", "note": "skipped by 'lm_head' <here>"})
    directory.write_json("plans.json", {name: {"recipe": name, "rows": plan} for name in RECIPES[3:]})
    for index, name in enumerate(RECIPES):
        for seed in range(seeds):
            _trial(directory, name, index, seed, steps, failed)
    directory.close()
    return directory


def _trial(directory: RunDirectory, name: str, index: int, seed: int, steps: int, failed: str) -> None:
    for step in range(steps):
        common = {"recipe": name, "seed": seed, "step": step}
        if name == failed and step == 5:
            directory.append("metrics.jsonl", {"kind": "failure", **common, "error": "no such luck"})
            return
        loss = (2.5 + 3 * math.exp(-step / 20) + 0.02 * seed) * (1 + WORSE[index])
        scale = 65536.0 * 2 ** (step // 30) if name == "msamp-O2" else None
        row = {"loss": loss, "seconds": SECONDS[index], "timed": step > 1, "units": 1024, "lr": 1e-3, "skipped": False}
        row |= {"grad_norm": 1 + math.sin(step / 5) ** 2, "loss_scale": scale, "reason": ""}
        if name == "fp8" and step == 7:
            row |= {"skipped": True, "reason": "Inf in blocks.0.mlp.up.weight"}
        directory.append("metrics.jsonl", {"kind": "step", **common, **row})
        if step == 1 and seed == 0:
            held = {"weights": 400, "masters": 0, "gradients": 400, "states": 800}
            if name == "msamp-O2":
                held = {"weights": 200, "masters": 0, "gradients": 100, "states": 300}
            directory.append("metrics.jsonl", {"kind": "memory", **common, "parameters": 100, "peak": 2**28, **held})
            directory.append("metrics.jsonl", {"kind": "coverage", **common, "low": 0.97, "shares": {name: 0.97}})
        if step % 20 == 19:
            directory.append("metrics.jsonl", {"kind": "validation", **common, "loss": loss})
        if seed == 0 and index > 3 and step % 5 == 2:
            _watched(directory, common)


def _watched(directory: RunDirectory, common: dict[str, Any]) -> None:
    for role in ("input", "weight", "grad_output"):
        for i, module in enumerate(MODULES):
            flushed = 10 * i * (role == "grad_output")
            counts = {"elements": 10000, "flushed": flushed, "saturated": i % 3, "nonfinite": 0}
            scales = {"amax": 2.0**-i, "scale": 2.0 ** -(i + 8)}
            directory.append("statistics.jsonl", {**common, "module": module, "role": role, **counts, **scales})
