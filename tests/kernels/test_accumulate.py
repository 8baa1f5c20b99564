"""Tensor-core sums against a slow model of its own, written with Python integers; native against the reference."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowprec as lp
from lowprec.kernels import accumulate, available, use
from lowprec.recipe import ACCUMULATORS

MODELS = [*ACCUMULATORS.values(), lp.Accumulator(1, 1, 1), lp.Accumulator(7, 3, 2, 21), lp.Accumulator(256, 40, 23)]


def _exponent(x: Fraction, least: int) -> int:
    """floor(log2 |x|), but no less than `least`."""
    e = x.numerator.bit_length() - x.denominator.bit_length() if x > 0 else 0
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    while abs(x) < Fraction(2) ** e:
        e -= 1
    return max(e, least)


def _truncate(x: Fraction, quantum: Fraction) -> Fraction:
    return math.trunc(x / quantum) * quantum


def slow(a: list[float], b: list[float], model: lp.Accumulator, least: tuple[int, int]) -> float:
    """One element of the product by exact rational arithmetic."""
    total, high = Fraction(0), torch.zeros((), dtype=torch.float32)
    for start in range(0, len(a), model.k_step):
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a[start : start + model.k_step], b[start:])]
        pairs = [(x, y) for x, y in pairs if x and y]
        tops = [_exponent(x, least[0]) + _exponent(y, least[1]) for x, y in pairs]
        tops += [_exponent(total, -126)] if total else []
        if tops:
            grid = Fraction(2) ** (max(tops) - model.fraction_bits)
            total = _truncate(total, grid) + sum((_truncate(x * y, grid) for x, y in pairs), Fraction(0))
        if total:
            total = _truncate(total, Fraction(2) ** (_exponent(total, -126) - model.output_mantissa))
        if model.promote_every and (start + model.k_step) % model.promote_every == 0:
            high = high + torch.tensor(float(total), dtype=torch.float32)
            total = Fraction(0)
    return float(high + torch.tensor(float(total), dtype=torch.float32)) if model.promote_every else float(total)


def _operands(kind: str, rows: int, depth: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=g)
    if kind == "wide":
        x = x * 2.0 ** torch.randint(-12, 12, (rows, depth), generator=g)
    if kind == "tiny":
        x = x * 2.0**-8
    if kind == "positive":
        x = x.abs()
    return x


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "positive"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_model_against_exact_arithmetic(model: lp.Accumulator, kind: str, backend: str) -> None:
    if not available(backend)[0]:
        pytest.skip(available(backend)[1])
    for name, depth in (("e4m3", 97), ("bf16", 40), ("fp16", 33)):
        a = lp.round_to(_operands(kind, 3, depth, 1), name)
        b = lp.round_to(_operands(kind, 5, depth, 2), name)
        a[0, ::3] = 0.0
        least = (accumulate.least_exponent(name),) * 2
        with use(backend):
            made = accumulate.matmul(a, b, model, least=least)
        expected = [[slow(x, y, model, least) for y in b.tolist()] for x in a.tolist()]
        assert made.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 35),
    depth=st.integers(0, 150),
    model=st.sampled_from(MODELS),
    seed=st.integers(0, 2**16),
)
def test_native_is_the_reference(rows: int, columns: int, depth: int, model: lp.Accumulator, seed: int) -> None:
    if not available("native")[0]:
        pytest.skip(available("native")[1])
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(0, 60, (), generator=g))
    a = (
        torch.randn(rows, depth, generator=g) * 2.0 ** torch.randint(-size, size + 1, (rows, depth), generator=g)
    ).bfloat16()
    b = (
        torch.randn(columns, depth, generator=g) * 2.0 ** torch.randint(-size, size + 1, (columns, depth), generator=g)
    ).bfloat16()
    if seed % 5 == 0 and rows and columns and depth:
        a[0, 0], b[-1, -1] = float("inf"), float("nan")
    with use("native"):
        one = accumulate.matmul(a, b, model)
    with use("reference"):
        two = accumulate.matmul(a, b, model)
    assert torch.equal(one.isnan(), two.isnan())
    assert torch.equal(
        one.nan_to_num(7.0, 9.0, -9.0).view(torch.int32), two.nan_to_num(7.0, 9.0, -9.0).view(torch.int32)
    )


def test_threads_do_not_matter() -> None:
    a, b = torch.randn(40, 200).bfloat16(), torch.randn(50, 200).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = accumulate.matmul(a, b, "hopper-fp8")
        torch.set_num_threads(2)
        assert torch.equal(one, accumulate.matmul(a, b, "hopper-fp8"))
    finally:
        torch.set_num_threads(before)


def test_sums_beyond_fp32_are_infinite_and_stay_so() -> None:
    a = torch.tensor([[3e38, 3e38, -3e38, -3e38]])
    model = lp.Accumulator(1, 24, 23)
    for backend in ("native", "reference"):
        with use(backend):
            assert accumulate.matmul(a, torch.full((1, 4), 2.0), model).item() == math.inf


def test_published_errors_of_long_sums() -> None:
    """e4m3, K = 4096, uniform in [0, 1): the largest relative error of each way to add."""
    g = torch.Generator().manual_seed(0)
    a, b = (lp.round_to(torch.rand(48, 4096, generator=g), "e4m3") for _ in range(2))
    exact = a.double() @ b.double().T
    least = (accumulate.least_exponent("e4m3"),) * 2

    def error(name: str) -> tuple[float, float]:
        made = accumulate.matmul(a, b, name, least=least).double()
        relative = (made - exact) / exact
        return float(relative.abs().max()), float(relative.max())

    worst, above = error("hopper-fp8")
    assert worst == pytest.approx(6.9e-2, rel=0.1) and above <= 0  # a bias: never above
    assert error("hopper-fp8-promoted")[0] == pytest.approx(5.7e-4, rel=0.15)
    assert error("blackwell-fp8")[0] == pytest.approx(8.5e-7, rel=0.4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: accumulate.matmul(torch.ones(1, 2), torch.ones(1, 2), "hoper"), "did you mean 'hopper'"),
        (lambda: accumulate.matmul(torch.ones(1, 2), torch.ones(1, 3), "hopper"), "expected matrices"),
        (lambda: accumulate.matmul(torch.ones(2), torch.ones(1, 2), "hopper"), "expected matrices"),
        (lambda: accumulate.matmul(torch.ones(1, 2).double(), torch.ones(1, 2), "hopper"), "fp32, bf16 or fp16"),
    ],
)
def test_plain_errors(call: object, sentence: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_recipe_sums_its_products_so() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 8, bias=False)
    x = torch.rand(4, 512)
    weight = layer.weight.detach().abs()
    layer.weight.data = weight
    lp.apply(layer, "fp8 accumulate=hopper-fp8 grad_input=- grad_weight=-")
    y = layer(x)
    scale_x, scale_w = x.abs().max() / 448, weight.max() / 448
    a, b = lp.round_to(x / scale_x, "e4m3"), lp.round_to(weight / scale_w, "e4m3")
    raw = torch.tensor([[slow(p, q, ACCUMULATORS["hopper-fp8"], (-6, -6)) for q in b.tolist()] for p in a.tolist()])
    expected = (raw * scale_x * scale_w).bfloat16()
    torch.testing.assert_close(y.detach(), expected, rtol=2**-7, atol=0)
    assert float(((raw - a @ b.T) / raw).abs().max()) > 2**-8  # and plain sums would be seen
