"""What an optimizer's step costs: time, bytes a parameter and share of a copy's bandwidth, beside its peers.

Two sets of parameters: a few large tensors, where memory speed decides, and thousands of small ones, where overhead
does. All runners hold their own parameters and gradients, take turns, and are counted by their best time.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowprec.optim import AdamW

__all__ = ["BIG", "SMALL", "measure"]

BIG, SMALL = (8, (4096, 1024)), (2000, (4096,))
Runner = Callable[[], Any]
# name -> (dtype of the weights, settings, target over torch's fused AdamW)
OURS: dict[str, tuple[torch.dtype, dict[str, Any], float | None]] = {
    "fp32": (torch.float32, {}, 1.0),
    "8bit states": (torch.float32, {"states": "8bit"}, 0.7),
    "fp8 states": (torch.float32, {"states": "fp8"}, 0.7),
    "4bit states": (torch.float32, {"states": "4bit"}, None),
    "fp8 + fp16 states": (torch.float32, {"states": ("fp8", "fp16")}, None),
    "bf16, bf16 states, stochastic": (torch.bfloat16, {"states": "bf16", "update": "stochastic"}, 0.6),
    "bf16, bf16 states, kahan": (torch.bfloat16, {"states": "bf16", "update": "kahan"}, None),
    "bf16+16, 8bit states": (torch.bfloat16, {"states": "8bit", "master": "bf16+16"}, None),
}


def _params(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for _ in range(count)]
    for p in made:
        p.grad = (torch.randn(shape) * 1e-3).to(dtype)
    return made


def _best(run: Runner, seconds: float, least: int = 3) -> float:
    run()
    best, start, done = float("inf"), time.perf_counter(), 0
    while done < least or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        best, done = min(best, time.perf_counter() - before), done + 1
    return best


def _bytes(optimizer: torch.optim.Optimizer, elements: int) -> float:
    """Bytes a parameter of weights, gradients and states."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(_size(t) for t in kept if isinstance(t, torch.Tensor) and t.ndim)
    return total / elements


def _size(t: torch.Tensor) -> int:
    inner = [getattr(t, name) for name in ("codes", "scale", "_data", "_scale") if hasattr(t, name)]
    tensors = [x for x in inner if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors) if tensors else t.numel() * t.element_size()


def _peers(big: bool) -> dict[str, tuple[torch.dtype, Callable[[list[Any]], torch.optim.Optimizer]]]:
    found: dict[str, tuple[torch.dtype, Callable[[list[Any]], torch.optim.Optimizer]]] = {
        "torch foreach": (torch.float32, lambda p: torch.optim.AdamW(p, foreach=True)),
    }
    if big and importlib.util.find_spec("bitsandbytes"):
        peer: Any = importlib.import_module("bitsandbytes.optim")
        found["bitsandbytes AdamW8bit"] = (torch.float32, lambda p: peer.AdamW8bit(p))
    if big and importlib.util.find_spec("torchao"):
        ao: Any = importlib.import_module("torchao.optim")
        found["torchao AdamW8bit"] = (torch.float32, lambda p: ao.AdamW8bit(p))
        found["torchao AdamWFp8"] = (torch.float32, lambda p: ao.AdamWFp8(p))
        found["torchao bf16 stochastic"] = (torch.bfloat16, lambda p: ao._AdamW(p, bf16_stochastic_round=True))
    return found


def _copy_rate(elements: int) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.randn(elements)
    target = torch.empty_like(source)
    return 8 * elements / _best(lambda: target.copy_(source), 0.3)


def measure(threads: int, seconds: float, peers: bool, scale: float = 1.0) -> dict[str, Any]:
    """Time every setting on both sets of parameters.

    Args:
        threads: of every runner.
        seconds: for each measurement.
        peers: also torchao and bitsandbytes (they take a second a step on a CPU).
        scale: shrinks the number of tensors, for a quick look.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sets = [_set(name, size, seconds, peers, scale) for name, size in (("big", BIG), ("small", SMALL))]
    finally:
        torch.set_num_threads(before)
    times = [{row["name"]: row["ns_per_parameter"] for row in s["rows"]} for s in sets]
    return {
        "threads": threads,
        "sets": sets,
        "small_over_big": {name: t / times[0][name] for name, t in times[1].items() if name in times[0]},
    }


def _set(name: str, size: tuple[int, tuple[int, ...]], seconds: float, peers: bool, scale: float) -> dict[str, Any]:
    count, shape = max(1, round(size[0] * scale)), size[1]
    elements = count * torch.Size(shape).numel()
    rate = _copy_rate(min(elements, 1 << 25))
    rows: list[dict[str, Any]] = []
    fused = _row("torch fused", torch.float32, lambda p: torch.optim.AdamW(p, fused=True), count, shape, seconds, rate)
    rows.append(fused)
    for label, (dtype, options, target) in OURS.items():
        if name == "small" and label not in ("fp32", "bf16, bf16 states, stochastic"):
            continue
        row = _row(label, dtype, lambda p, o=options: AdamW(p, **o), count, shape, seconds, rate)  # type: ignore[misc]
        rows.append({**row, "target": target if name == "big" else None})
    for label, (dtype, make) in (_peers(name == "big") if peers else {}).items():
        rows.append(_row(label, dtype, make, count, shape, min(seconds, 0.1), rate))
    for row in rows:
        row["over_fused"] = row["ms"] / fused["ms"]
    return {"name": name, "tensors": count, "shape": list(shape), "copy_gbs": rate / 1e9, "rows": rows}


def _row(
    label: str,
    dtype: torch.dtype,
    make: Callable[[list[Any]], torch.optim.Optimizer],
    count: int,
    shape: Sequence[int],
    seconds: float,
    rate: float,
) -> dict[str, Any]:
    params = _params(count, tuple(shape), dtype)
    elements = sum(p.numel() for p in params)
    try:
        optimizer = make(params)
        best = _best(optimizer.step, seconds)
    except (RuntimeError, ImportError, AttributeError) as error:  # a peer that this machine cannot run
        return {"name": label, "ms": float("nan"), "ns_per_parameter": float("nan"), "bytes": float("nan"),
                "share_of_copy": float("nan"), "error": str(error).splitlines()[0]}  # fmt: skip
    held = _bytes(optimizer, elements)
    grad = params[0].element_size()
    moved = (2 * (held - grad) + grad) * elements  # everything read and written once, the gradient read
    del optimizer, params
    gc.collect()
    return {
        "name": label,
        "ms": best * 1e3,
        "ns_per_parameter": best * 1e9 / elements,
        "bytes": held,
        "share_of_copy": moved / best / rate,
    }
