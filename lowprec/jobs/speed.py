"""How fast and how large a training step is under each recipe, next to torch's own ways, in one run.

Contestants take their steps in turn, round by round, so that a machine that slows down slows all of them; a figure is
the median over rounds, and a ratio compares medians of the same run. torch's contestants run as torch ships: fp32,
autocast to bf16, the same compiled, torchao's emulated float8; each with its fused AdamW. One more row gives autocast
the memory setting that lowprec uses (`lowprec.heap`), so that its share can be told from the rest. Within a round those
with the C library's own setting go first; after the setting changes, the next one takes a step that is not timed, so
that none pays for the memory another gave back.

The breakdown sorts the profiler's self times of one step into products, casts, attention, loss, norms, optimizer and
the rest. The limit beside it is the time of the linear layers' products alone, at the same shapes, in bf16 and int8.
Memory is measured in a process of its own: resident bytes at rest and at the peak of one step.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec.errors import unknown_name
from lowprec.heap import keep_heap
from lowprec.workloads import cnn, gpt

__all__ = ["MODELS", "PEERS", "RECIPES", "breakdown", "limits", "memory", "race"]

MODELS = {"gpt": "design", "gpt-small": "small", "cnn": "small"}
PEERS = ("torch-bf16", "torch-bf16-heap", "torch-bf16-compiled", "torch-fp32", "torchao-fp8")
RECIPES = (
    "bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4",
    "mxint8", "nvfp4", "int8", "int8-switchback",
)  # fmt: skip

Step = Callable[[], Any]


class Job(NamedTuple):
    """A fresh model with a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor
    samples: int


def _keeps_heap(name: str) -> bool:
    """Whether a contestant runs with freed memory kept: every recipe, and the one peer that is there to show it."""
    return name not in PEERS or name.endswith("heap")


def job(name: str) -> Job:
    """The model of a name, and one batch of random input."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "cnn":
        batch = cnn.SIZES[MODELS[name]].batch
        x = torch.randn(batch, 1, 8, 8, generator=generator)
        return Job(cnn.CNN.of_size(MODELS[name]), x, torch.randint(0, 10, (batch,), generator=generator), batch)
    size = gpt.SIZES[MODELS[name]]
    tokens = torch.randint(0, size.vocab, (size.batch, size.context + 1), generator=generator)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Job(gpt.GPT.of_size(MODELS[name]), x, y, x.numel())


def contestant(name: str, model_name: str) -> tuple[Step, Job]:
    """One training step of a peer or a recipe, as a function without arguments."""
    made = job(model_name)
    if name in PEERS:
        return _torch_step(name, made), made
    import lowprec as lp

    optimizer: Any = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
    _, optimizer = lp.prepare(made.model, optimizer, name)

    def step() -> float:
        optimizer.zero_grad()
        loss = made.model(made.x, made.y)
        optimizer.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return step, made


def _torch_step(name: str, made: Job) -> Step:
    model: Any = made.model
    if name == "torchao-fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    low = name != "torch-fp32"
    called = torch.compile(model) if name.endswith("compiled") else model

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = called(made.x, made.y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def race(names: Iterable[str], model_name: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Median seconds a step of every contestant, and its ratios to autocast bf16 and fp32."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    samples = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            rows[name] = {"name": name, "error": None, "loss": None, "seconds": []}
            try:
                step, made = contestant(name, model_name)
                samples = made.samples
                for _ in range(2):
                    step()
                steps[name] = step
            except Exception as error:  # one contestant's failure is its row's, not the table's
                rows[name]["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"ready: {name}")
        held: bool | None = None
        for _ in range(rounds):
            for name, step in sorted(steps.items(), key=lambda item: _keeps_heap(item[0])):
                if held is not _keeps_heap(name):
                    held = _keeps_heap(name)
                    keep_heap(held)
                    step()
                begin = time.perf_counter()
                rows[name]["loss"] = step()
                rows[name]["seconds"].append(time.perf_counter() - begin)
    for row in rows.values():
        taken = row.pop("seconds")
        row["step_ms"] = statistics.median(taken) * 1e3 if taken else None
        row["best_ms"] = min(taken) * 1e3 if taken else None
        row["per_second"] = samples / statistics.median(taken) if taken else None
    for key, base in (("vs_torch_bf16", "torch-bf16"), ("vs_torch_fp32", "torch-fp32")):
        reference = rows.get(base, {}).get("step_ms")
        for row in rows.values():
            row[key] = reference / row["step_ms"] if reference and row["step_ms"] else None
    return list(rows.values())


# -- where the time goes -------------------------------------------------------------------------------------------

# the first kind whose words occur in a profiler event's name
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attention", "aten::bmm", "aten::baddbmm")),
    ("products", ("aten::mm", "aten::addmm", "_int_mm", "convolution", "mkldnn_linear")),
    ("loss", ("cross_entropy", "log_softmax", "nll_loss", "LogSoftmax", "NllLoss")),
    ("norms", ("norm",)),
    ("optimizer", ("Optimizer", "_fused_adamw", "_foreach", "lowprec::optim")),
    ("casts", ("copy_", "_to_copy", "lowprec::linear", "_Linear", "lowprec::", "aten::mul", "aten::div", "aten::sum")),
)


def _kind(event: str) -> str:
    return next((kind for kind, words in KINDS if any(word in event for word in words)), "other")


def breakdown(name: str, model_name: str) -> dict[str, float]:
    """Milliseconds of one step by kind, from the profiler's self times."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep_heap(_keeps_heap(name))
        step, _ = contestant(name, model_name)
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
    sums = dict.fromkeys(("products", "casts", "attention", "loss", "norms", "optimizer", "other"), 0.0)
    for event in seen.key_averages():
        sums[_kind(event.key)] += event.self_cpu_time_total / 1e3
    return sums


def limits(model_name: str) -> dict[str, float]:
    """Milliseconds of the linear layers' products alone, outputs in place: the least a step can take."""
    made = job(model_name)
    shapes: list[tuple[int, int, int]] = []

    def note(module: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        shapes.append((inputs[0].numel() // module.in_features, module.in_features, module.out_features))

    for module in made.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    with torch.no_grad():
        made.model(made.x, made.y)
    counts = {shape: shapes.count(shape) for shape in shapes}
    totals = {"bf16": 0.0, "int8": 0.0}
    for (rows, inner, outer), count in counts.items():
        for m, k, n in ((rows, inner, outer), (rows, outer, inner), (outer, rows, inner)):
            for kind in totals:
                totals[kind] += count * _product_ms(m, k, n, kind)
    return totals


def _product_ms(m: int, k: int, n: int, kind: str) -> float:
    if kind == "int8":
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (n, k)))
        product, out = torch._int_mm, torch.empty(m, n, dtype=torch.int32)
    else:
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        product, out = torch.mm, torch.empty(m, n, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        product(a, b.t(), out=out)
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


# -- memory --------------------------------------------------------------------------------------------------------


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell a process's resident memory")


def measure_here(name: str, model_name: str) -> dict[str, int]:
    """Resident bytes of this process before a step and at its peak, after two steps of warming up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep_heap(_keeps_heap(name))
        step, _ = contestant(name, model_name)
        step()
        step()
        gc.collect()
        rest = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step()
    return {"rest": rest, "peak": _resident("VmHWM")}


def memory(name: str, model_name: str) -> dict[str, int]:
    """The same in a process of its own."""
    code = (
        "import json, sys; from lowprec.jobs import speed; "
        "print(json.dumps(speed.measure_here(sys.argv[1], sys.argv[2])))"
    )
    done = subprocess.run([sys.executable, "-c", code, name, model_name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"measuring {name} failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
