"""What `lowprec bench kernels` measures: public calls, and the same work by torch, ml_dtypes and torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowprec.formats import format
from lowprec.jobs import machine
from lowprec.jobs.timing import race
from lowprec.kernels import available, cast, native_core, scale
from lowprec.kernels.cast import Rng
from lowprec.quantize import decode, encode, round_to
from lowprec.recipe import Cast

__all__ = ["measure"]

SIZES = ((4096, 4096), (512, 512))
SMALL = 1024
PEERS = ("torch", "ml_dtypes", "torchao")
BLOCKS = {
    "1x128": Cast("e4m3", scale="block", block=(1, 128)),
    "1x128 ue8m0": Cast("e4m3", scale="block", block=(1, 128), scale_format="e8m0", rule="pow2"),
    "128x128 ue8m0": Cast("e4m3", scale="block", block=(128, 128), scale_format="e8m0", rule="pow2"),
    "mxfp8 1x32": Cast("e4m3", scale="block", block=(1, 32), scale_format="e8m0", rule="rceil"),
    "nvfp4 1x16": Cast("e2m1", scale="block", block=(1, 16), scale_format="e4m3"),
}
Runner = Callable[[], Any]


def _jobs(x: Tensor) -> dict[str, tuple[float, float | None, dict[str, Runner]]]:
    """Name -> (bytes an element, target share, runners; the first is ours)."""
    half, codes = x.bfloat16(), encode(x, "e4m3")
    jobs: dict[str, tuple[float, float | None, dict[str, Runner]]] = {}
    for name in ("e4m3", "e5m2", "e4m3fnuz", "e3m4", "e8m0", "int8", "e2m3"):
        source = x.abs() if name == "e8m0" else x
        jobs[f"encode fp32 to {name}"] = 5, 0.75, {"ours": partial(encode, source, name)}
    jobs["encode bf16 to e4m3"] = 3, 0.75, {"ours": lambda: encode(half, "e4m3")}
    jobs["encode bf16 to e5m2"] = 3, 0.75, {"ours": lambda: encode(half, "e5m2")}
    jobs["decode e4m3 to bf16"] = 3, 0.85, {"ours": lambda: decode(codes, "e4m3", dtype=torch.bfloat16)}
    jobs["decode e4m3 to fp32"] = 5, 0.85, {"ours": lambda: decode(codes, "e4m3", dtype=torch.float32)}
    jobs["amax fp32"] = 4, 0.9, {"ours": lambda: cast.amax(x)}
    stochastic: Runner = lambda: cast.encode(x, format("bf16"), "stochastic", rng=Rng(1))  # noqa: E731
    jobs["fp32 to bf16, stochastic"] = 6, 0.6, {"ours": stochastic}
    for name, block in BLOCKS.items():
        jobs[f"quantise {name}"] = 5, 0.6, {"ours": partial(scale.quantize, x, block)}
    return jobs


def _add_peers(jobs: dict[str, tuple[float, float | None, dict[str, Runner]]], x: Tensor) -> None:
    """The same work by others, where they are installed and can do it."""
    half, fp8 = x.bfloat16(), x.to(torch.float8_e4m3fn)
    jobs["encode fp32 to e4m3"][2]["torch"] = lambda: x.to(torch.float8_e4m3fn)
    jobs["encode fp32 to e5m2"][2]["torch"] = lambda: x.to(torch.float8_e5m2)
    jobs["encode fp32 to e4m3fnuz"][2]["torch"] = lambda: x.to(torch.float8_e4m3fnuz)
    jobs["encode bf16 to e4m3"][2]["torch"] = lambda: half.to(torch.float8_e4m3fn)
    jobs["decode e4m3 to bf16"][2]["torch"] = lambda: fp8.to(torch.bfloat16)
    jobs["decode e4m3 to fp32"][2]["torch"] = lambda: fp8.to(torch.float32)
    jobs["amax fp32"][2]["torch"] = lambda: torch.aminmax(x)
    try:
        import ml_dtypes

        array, small = x.numpy(), fp8.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        jobs["encode fp32 to e4m3"][2]["ml_dtypes"] = lambda: array.astype(ml_dtypes.float8_e4m3fn)
        jobs["decode e4m3 to fp32"][2]["ml_dtypes"] = lambda: small.astype("float32")
    except ImportError:
        pass
    try:
        from torchao.optim.quant_utils import _fp32_to_bf16_sr
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        jobs["fp32 to bf16, stochastic"][2]["torchao"] = lambda: _fp32_to_bf16_sr(x)
        jobs["quantise mxfp8 1x32"][2]["torchao"] = lambda: to_mx(x, torch.float8_e4m3fn, 32)
    except ImportError:
        pass


def _small() -> dict[str, Runner]:
    x = torch.randn(SMALL)
    matrix, codes = x.view(8, 128), encode(x, "e4m3")
    mx, row = BLOCKS["mxfp8 1x32"], Cast("e4m3", scale="row")
    return {
        "encode e4m3": lambda: encode(x, "e4m3"),
        "decode e4m3": lambda: decode(codes, "e4m3"),
        "round_to e4m3": lambda: round_to(x, "e4m3"),
        "amax": lambda: cast.amax(x),
        "quantise mxfp8": lambda: scale.quantize(matrix, mx),
        "quantise per row": lambda: scale.quantize(matrix, row),
    }


def measure(threads: int, seconds: float, peers: bool) -> dict[str, Any]:
    """Run everything on `threads` threads; see the command's he"""
    usable, reason = available("native")
    if not usable:
        raise ValueError(f"bench kernels measures the native core: {reason}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    keep = getattr(native_core(), "keep_heap", lambda on: None)
    keep(True)  # memory of earlier outputs is used again, for us and for our peers alike
    try:
        sizes = [_measure_size(shape, seconds, peers) for shape in SIZES]
        small = race(_small(), seconds)
    finally:
        keep(False)
        torch.set_num_threads(before)
    return {
        "kind": "bench kernels",
        "machine": machine.facts(),
        "instruction_set": native_core().isa(),
        "threads": threads,
        "peers": list(PEERS) if peers else [],
        "sizes": sizes,
        "small_elements": SMALL,
        "small": {name: round(1e6 * best, 2) for name, best in small.items()},
    }


def _measure_size(shape: tuple[int, int], seconds: float, peers: bool) -> dict[str, Any]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    source, target = x.numpy(), y.numpy()

    def memcpy() -> None:
        target[...] = source

    jobs = _jobs(x)
    if peers:
        _add_peers(jobs, x)
    times: dict[str, dict[str, float]] = {}
    for name, (_, _, runners) in jobs.items():
        times[name] = race({"copy": lambda: y.copy_(x), "memcpy": memcpy, **runners}, seconds)
    copy = max(8 * x.numel() / min(best["copy"], best["memcpy"]) / 1e9 for best in times.values())
    rows = []
    for name, (size, wanted, runners) in jobs.items():
        speed = {who: size * x.numel() / times[name][who] / 1e9 for who in runners}
        row: dict[str, Any] = {"name": name, "target": wanted, "us": 1e6 * times[name]["ours"], "gbs": speed["ours"]}
        row["share"] = speed["ours"] / copy
        row["peers"] = {who: value / copy for who, value in speed.items() if who != "ours"}
        rows.append(row)
    return {"elements": x.numel(), "copy_gbs": copy, "rows": rows}
