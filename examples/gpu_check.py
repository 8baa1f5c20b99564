"""Try every recipe on a GPU: what computes it, whether hardware agrees with emulation, and what it costs.

    python examples/gpu_check.py [--size 4096] [--json FILE]

(1) Every recipe trains a small model for a few steps on the GPU, beside the same run on the CPU. (2) Every product that
runs in FP8 units, against the emulated one and against float64 products of the same quantised operands. (3) The time of
a linear layer's three products at bf16 and under FP8 recipes, and of the bare products. Each line is tried for itself:
one that fails prints its error and the next goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowprec as lp
from lowprec import products, units
from lowprec.linear import apply_linear
from lowprec.recipe import Gemm
from lowprec.spec import ROLES, Spec

RESULTS: list[dict[str, Any]] = []


def note(table: str, **values: Any) -> None:
    """Print a line and keep it."""
    RESULTS.append({"table": table, **values})
    words = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
    print(f"[{table}]", "  ".join(words), flush=True)


def tried(table: str, name: str, run: Callable[[], None]) -> None:
    """Run one check; print what went wrong and go on."""
    try:
        run()
    except Exception as error:
        note(table, name=name, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        traceback.print_exc(limit=-3)


def small_model() -> nn.Module:
    """Two blocks of what transformers are made of, every dimension a multiple of 16."""
    torch.manual_seed(0)
    block = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)]
    return nn.Sequential(*block, *copy.deepcopy(block), nn.Linear(64, 16))


def train(model: nn.Module, device: str, steps: int = 20) -> list[float]:
    """Fit a fixed random target; the losses."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 64, generator=generator).to(device), torch.randn(64, 16, generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check_recipe(name: str) -> None:
    """One recipe on the GPU beside the CPU."""
    on_gpu = small_model().cuda()
    plan = lp.plan(on_gpu, name)
    lp.apply(on_gpu, plan)
    gpu, cpu = train(on_gpu, "cuda"), train(lp.apply(small_model(), name), "cpu")
    carrier = plan.converted[0].carrier if plan.converted else "op policy"
    note("recipes", name=name, first=gpu[0], last=gpu[-1], cpu_last=cpu[-1], falls=gpu[-1] < gpu[0], carrier=carrier)


def check_product(name: str, role: str) -> None:
    """One product of a recipe in FP8 units, against its emulation and float64."""
    gemm: Gemm = getattr(lp.recipe(name), role)
    usable, why = units.usable(gemm, "cuda")
    if not usable:
        note("products", name=name, role=role, hardware=False, why=why)
        return
    torch.manual_seed(2)
    x, w = torch.randn(512, 1024, device="cuda"), torch.randn(768, 1024, device="cuda")
    made, exact = {}, torch.zeros(())
    for hardware in (True, False):
        unit = products.engine(gemm, "bf16", "cuda", "fp32", hardware)
        sides = [products.prepare(t, c, -1, unit, "bf16")[0] for t, c in ((x, gemm.a), (w, gemm.b))]
        made[unit.kind] = products.product(sides[0], sides[1], unit, torch.bfloat16).double()
        full = [o.values.double() if o.scale is None else o.values.double() * o.scale.reshape(-1, 1) for o in sides]
        exact = full[0] @ full[1].t()
    size = float(exact.abs().max())
    errors = {f"{kind}_error": float((value - exact).abs().max()) / size for kind, value in made.items()}
    differ = float((made["fp8"] != made["bf16"]).double().mean())
    note("products", name=name, role=role, hardware=True, **errors, differ=differ)


def seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Best of several timings on the GPU."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def time_layers(size: int) -> None:
    """A linear layer forward and backward."""
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(size, size, device="cuda", requires_grad=True)
    g = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    flops = 6 * size**3 / 1e12

    def plain() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            nn.functional.linear(x, w).backward(g)

    base = seconds(plain)
    note("layer", name="torch autocast bf16", milliseconds=base * 1e3, tflops=flops / base, ratio=1.0)
    for name in ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "int8"):

        def layer(name: str = name) -> None:
            spec = Spec.of(lp.recipe(name), "cuda")
            t = seconds(lambda: apply_linear(x, w, None, spec).backward(g), 3)
            kinds = ",".join(unit.kind for unit in spec.units)
            note("layer", name=name, milliseconds=t * 1e3, tflops=flops / t, ratio=base / t, engines=kinds)

        tried("layer", name, layer)


def bare_products(size: int) -> None:
    """bf16 and FP8 products alone, with every scaling torch offers on this GPU."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3 / 1e12

    def timed(name: str, run: Callable[[], Tensor], **more: Any) -> None:
        t = seconds(run)
        note("bare", name=name, milliseconds=t * 1e3, tflops=flops / t, **more)

    timed("bf16", lambda: a @ b.t())
    one, two = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    for name, s in (("fp8 tensor", torch.ones((), device="cuda")), ("fp8 row", torch.ones(size, device="cuda"))):

        def scaled(s: Tensor = s) -> Tensor:
            return units.scaled_product(one, s, two, s, torch.bfloat16)

        tried("bare", name, lambda name=name, scaled=scaled: timed(name, scaled))
    call = getattr(torch.nn.functional, "scaled_mm", None)
    kinds = getattr(torch.nn.functional, "ScalingType", None)
    if call is None or kinds is None:
        note("bare", name="blockwise", error="torch.nn.functional.scaled_mm is not there")
        return
    token = torch.ones(size // 128, size, device="cuda").t()  # one a row and 128 of k, rows contiguous
    square = torch.ones(size // 128, size // 128, device="cuda")
    cases = {
        "fp8 1x128 x 128x128": (square, kinds.BlockWise128x128),
        "fp8 1x128 x 1x128": (token, kinds.BlockWise1x128),
    }
    for name, (scale_b, kind_b) in cases.items():

        def block(name: str = name, scale_b: Tensor = scale_b, kind_b: Any = kind_b) -> None:
            def run() -> Tensor:
                made = call(one, two.t(), token, kinds.BlockWise1x128, scale_b, kind_b, output_dtype=torch.bfloat16)
                assert isinstance(made, Tensor)
                return made

            got, wanted = run().float(), one.float() @ two.float().t()
            timed(name, run, error=float((got - wanted).abs().max() / wanted.abs().max()))

        tried("bare", name, block)


def main() -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Try every recipe on a GPU.")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the timed products")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here (torch.cuda.is_available() is False); nothing was checked.")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    note("machine", gpu=name, capability=f"{capability[0]}.{capability[1]}", torch=torch.__version__)
    tried("bare", "all", lambda: bare_products(options.size))
    tried("layer", "all", lambda: time_layers(options.size))
    for recipe in ("fp8", "fp8-rowwise", "msamp-O1", "fp8-block", "mxfp8"):
        for role in ROLES:
            tried("products", recipe, lambda r=recipe, p=role: check_product(r, p))  # type: ignore[misc]
    for recipe in lp.recipes():
        tried("recipes", recipe, lambda r=recipe: check_recipe(r))  # type: ignore[misc]
    if options.json:
        Path(options.json).write_text(json.dumps(RESULTS, indent=1))
    failed = [row for row in RESULTS if "error" in row and not isinstance(row["error"], float)]
    print(f"{len(RESULTS)} lines, {len(failed)} failed")


if __name__ == "__main__":
    main()
