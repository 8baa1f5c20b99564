"""The three products against float64 products of quantised operands, and what surrounds them.

The bound: with u = 2^-24 and K terms, an fp32 sum differs from the exact one by at most (K + 4) u sum|a||b| (the 4 are
the two scales, the bias and, for dequantised operands, their own rounding). A result in a shorter dtype is rounded once
more by the product and once more where scales of rows and columns follow it; a bf16 product also takes its bias in
bf16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowprec as lp
from lowprec.kernels import scale as scale_kernels
from lowprec.linear import Memory, Spec, apply_linear
from lowprec.recipe import Cast, Gemm, Recipe

RECIPES = lp.recipes()
U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _steady(recipe: Recipe) -> Recipe:
    """The recipe with its stochastic casts rounding to nearest and current scaling, to be comparable."""

    def calm(cast: Cast | None) -> Cast | None:
        return None if cast is None else cast.replace(rounding="nearest")

    gemms = {
        r: Gemm(calm(getattr(recipe, r).a), calm(getattr(recipe, r).b)) for r in ("output", "grad_input", "grad_weight")
    }
    return recipe.replace(delayed=None, **gemms)


def _quantised(x: Tensor, cast: Cast | None, recipe: Recipe) -> Tensor:
    """x [other, contraction] with its cast's values, in float64."""
    if cast is None:
        words = {"tf32": "tf32", "bf16": "bf16", "fp16": "fp16"}
        if recipe.compute == "fp32":
            return x.double()
        cast = Cast(words[recipe.compute], scale="none")
    return scale_kernels.dequantize(scale_kernels.quantize(x.contiguous(), cast), cast).double()


def _expected(x: Tensor, w: Tensor, g: Tensor, recipe: Recipe) -> dict[str, tuple[Tensor, Tensor]]:
    """Each product in float64, and the same of absolute values."""
    operands = {
        "output": (x, w, recipe.output),
        "grad_input": (g, w.t(), recipe.grad_input),
        "grad_weight": (g.t(), x.t(), recipe.grad_weight),
    }
    made = {}
    for role, (a, b, gemm) in operands.items():
        qa, qb = _quantised(a, gemm.a, recipe), _quantised(b, gemm.b, recipe)
        made[role] = qa @ qb.t(), qa.abs() @ qb.abs().t()
    return made


def _run(recipe: Recipe, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> dict[str, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    b = None if b is None else b.clone().requires_grad_()
    out = apply_linear(x, w, b, Spec.of(recipe, "cpu"))
    out.backward(g.to(out.dtype))
    assert x.grad is not None and w.grad is not None
    made = {"output": out.detach(), "grad_input": x.grad, "grad_weight": w.grad}
    if b is not None and b.grad is not None:
        made["grad_bias"] = b.grad
    return made


def _check(
    got: Tensor, wanted: Tensor, size: Tensor, terms: int, roundings: float, extra: Tensor | float = 0.0
) -> None:
    bound = (terms + 4) * 2.0**-24 * (size + extra) + roundings * (wanted.abs() + extra) + 1e-30
    excess = ((got.double() - wanted).abs() / bound).max()
    assert excess <= 1, f"{excess:.3g} times the bound"


@pytest.mark.parametrize("compute", ["own", "fp32"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(40, 48, 33), (35, 130, 17)])
def test_products_are_exact(name: str, compute: str, shape: tuple[int, int, int]) -> None:
    recipe = _steady(lp.recipe(name))
    if compute == "fp32":
        recipe = recipe.replace(compute="fp32")
    tokens, features, outs = shape
    torch.manual_seed(1)
    x, w = torch.randn(tokens, features), torch.randn(outs, features) * torch.rand(outs, 1)
    b, g = torch.randn(outs), torch.randint(-128, 129, (tokens, outs)) / 4096.0
    got = _run(recipe, x, w, b, g)
    step = 3 * U[got["output"].dtype] if got["output"].dtype != torch.float32 else 0.0
    between = (
        3 * U[torch.bfloat16] if recipe.compute == "bf16" else 3 * U[torch.float16] if recipe.compute == "fp16" else 0.0
    )
    terms = {"output": features, "grad_input": outs, "grad_weight": tokens}
    for role, (wanted, size) in _expected(x, w, g, recipe).items():
        extra: Tensor | float = 0.0
        if role == "output":
            wanted, extra = wanted + b.double(), b.double().abs().expand_as(size)
        _check(got[role], wanted, size, terms[role], step if role == "output" else between, extra)
    _check(got["grad_bias"], g.double().sum(0), g.double().abs().sum(0), tokens, 0.0)


def test_the_bound_catches_mistakes() -> None:
    """What the exactness test is worth: each of these mistakes exceeds the bound by far."""
    torch.manual_seed(1)
    x, w, g = torch.randn(64, 96) * torch.rand(64, 1) * torch.rand(96), torch.randn(80, 96), torch.randn(64, 80)
    cast = Cast("e4m3", scale="row")
    right = Recipe("r", output=Gemm(cast, cast), grad_input=Gemm(cast, cast), grad_weight=Gemm(cast, cast))
    got = _run(right, x, w, torch.randn(80), g)
    for wrong in (
        right.replace(output=Gemm(cast.replace(format="e5m2"), cast)),  # a cast on the wrong operand
        right.replace(output=Gemm(cast.replace(scale="column"), cast)),  # a wrong axis
        right,  # a dropped bias
    ):
        wanted, size = _expected(x, w, g, wrong)["output"]
        with pytest.raises(AssertionError, match="times the bound"):
            _check(got["output"], wanted, size, 96, 3 * U[torch.bfloat16])
    turned = _expected(x, w, g, right.replace(grad_weight=Gemm(cast.replace(scale="column"), cast)))["grad_weight"]
    with pytest.raises(AssertionError, match="times the bound"):
        _check(got["grad_weight"], *turned, 64, 0.0)


def test_int8_is_exact() -> None:
    """Scales of one: the int8 product gives integers exactly, far beyond what bf16 or fp32 sums could."""
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (70, 1000)).float()
    w = torch.randint(-127, 128, (50, 1000)).float()
    x[:, 0], w[:, 0] = 127, 127  # every row reaches the largest code, so its scale is 1
    cast = Cast("int8", scale="row")
    recipe = Recipe("r", compute="fp32", output=Gemm(cast, cast))
    spec = Spec.of(recipe, "cpu")
    assert spec.units[0].kind == "int8"
    exact = x.long() @ w.long().t()
    assert torch.equal(apply_linear(x, w, None, spec), exact.float())


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "mxfp8", "fp8-block", "int8", "nvfp4"])
def test_saved_codes_change_nothing(name: str) -> None:
    recipe = _steady(lp.recipe(name))
    torch.manual_seed(0)
    tensors = torch.randn(40, 64), torch.randn(48, 64), None, torch.randn(40, 48)
    codes, high = (_run(recipe.replace(saved=saved), *tensors) for saved in ("codes", "high"))
    for role in codes:
        assert torch.equal(codes[role], high[role]), role


def test_saved_codes_are_small() -> None:
    x, w = torch.randn(256, 512).bfloat16(), torch.randn(64, 512, requires_grad=True)
    kept: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        apply_linear(x, w, None, Spec.of(lp.recipe("mxfp8"), "cpu"))
    bytes_kept = sum(t.numel() * t.element_size() for t in kept if t is not w)
    assert bytes_kept <= x.numel() * (1 + 4 / 32)


def test_stochastic_streams() -> None:
    """The same seed and step give the same gradients; another step others; and their mean is the exact value."""
    recipe = lp.recipe("mxfp4")
    torch.manual_seed(0)
    x, w, g = torch.randn(32, 64), torch.randn(64, 64, requires_grad=True), torch.randn(32, 64).bfloat16()

    def gradient(step: int) -> Tensor:
        w.grad = None
        memory = Memory(seed=7, step=torch.tensor(step))
        apply_linear(x, w, None, Spec.of(recipe, "cpu"), memory).backward(g)
        assert w.grad is not None and int(memory.step) == step + 1  # type: ignore[arg-type]
        return w.grad.clone()

    assert torch.equal(gradient(3), gradient(3)) and not torch.equal(gradient(3), gradient(4))
    mean = torch.stack([gradient(step) for step in range(100)])
    high = _steady(recipe).replace(grad_weight=Gemm(None, recipe.grad_weight.b))
    nearest = _expected(x, w.detach(), g.float(), high)["grad_weight"][0]
    error = (mean.mean(0).double() - nearest).abs() / (mean.std(0) / 10 + nearest.abs().float() * 2**-8)
    assert error.mean() < 2


def test_shapes_and_dtypes() -> None:
    spec = Spec.of(lp.recipe("fp8"), "cpu")
    w = torch.randn(5, 7)
    for shape in [(7,), (3, 7), (2, 3, 7), (0, 7)]:
        out = apply_linear(torch.randn(shape), w, None, spec)
        assert out.shape == (*shape[:-1], 5) and out.dtype == torch.bfloat16
    x = torch.randn(6, 4, 7).transpose(0, 1).requires_grad_()  # not contiguous
    apply_linear(x, w.requires_grad_(), None, spec).float().sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and w.grad is not None


def test_a_weight_changed_behind_the_version_counter_is_seen() -> None:
    layer = nn.Linear(64, 64)
    lp.apply(layer, "fp8")
    x = torch.randn(4, 64)
    before = layer(x)
    assert torch.equal(layer(x), before) and layer._lowprec.cache  # the cast was kept
    layer.weight.data.mul_(2)
    assert not torch.equal(layer(x), before)
    with torch.no_grad():
        layer.weight.copy_(layer.weight / 2)
    assert torch.equal(layer(x), before)


def test_hadamard_must_be_on_both() -> None:
    cast = Cast("e2m1", hadamard=True)
    with pytest.raises(ValueError, match="must be on both operands"):
        lp.plan(nn.Linear(4, 4), Recipe("r", output=Gemm(cast, None)))
