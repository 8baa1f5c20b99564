"""Native scaled casts equal the reference bit for bit: cast x axis x dtype x shape x instruction set x threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowprec.kernels import available, native_core, scale
from lowprec.kernels.reference import scale as reference
from lowprec.kernels.reference.rounding import Rng
from lowprec.kernels.scale import plan_of
from lowprec.recipe import Cast

pytestmark = pytest.mark.skipif(not available("native")[0], reason="the native core is not built")

ISAS = native_core().isas() if available("native")[0] else []
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
RNG = Rng(seed=77, step=2, tensor=3, offset=5)

CASTS = {
    "fp8 tensor": Cast("e4m3"),
    "e5m2 tensor pow2": Cast("e5m2", rule="pow2"),
    "e4m3 row": Cast("e4m3", scale="row"),
    "e4m3 column": Cast("e4m3", scale="column", rule="pow2"),
    "deepseek 1x128": Cast("e4m3", scale="block", block=(1, 128)),
    "deepseek 1x128 ue8m0": Cast("e4m3", scale="block", block=(1, 128), scale_format="e8m0", rule="pow2"),
    "deepseek 128x128": Cast("e4m3", scale="block", block=(128, 128), scale_format="e8m0", rule="pow2"),
    "mxfp8": Cast("e4m3", scale="block", block=(1, 32), scale_format="e8m0", rule="rceil"),
    "mxfp8 floor": Cast("e5m2", scale="block", block=(1, 32), scale_format="e8m0", rule="floor"),
    "mxfp6 even": Cast("e2m3", scale="block", block=(1, 32), scale_format="e8m0", rule="even"),
    "mxfp4 ceil": Cast("e2m1", scale="block", block=(1, 32), scale_format="e8m0", rule="ceil"),
    "mxfp4 stochastic": Cast("e2m1", scale="block", block=(1, 32), scale_format="e8m0", rounding="stochastic"),
    "mxint8": Cast("mxint8", scale="block", block=(1, 32), scale_format="e8m0", rule="rceil"),
    "nvfp4": Cast("e2m1", scale="block", block=(1, 16), scale_format="e4m3"),
    "nvfp4 square": Cast("e2m1", scale="block", block=(16, 16), scale_format="e4m3", min_block_scale=2.0**-6),
    "nvfp4 stochastic": Cast("e2m1", scale="block", block=(1, 16), scale_format="e4m3", rounding="stochastic"),
    "nvfp4 hadamard": Cast("e2m1", scale="block", block=(1, 16), scale_format="e4m3", hadamard=True),
    "int8 row": Cast("int8", scale="row"),
    "int8 block": Cast("int8", scale="block", block=(1, 128), scale_format="e8m0", rule="pow2"),
    "int4 square": Cast("int4", scale="block", block=(32, 32), scale_format="e8m0", rule="pow2"),
    "int8 asymmetric": Cast("int8", symmetric=False),
    "int1": Cast("int1", scale="row"),
    "fnuz": Cast("e4m3fnuz", scale="row"),
    "bf16 none": Cast("bf16", scale="none"),
    "e4m3 none": Cast("e4m3", scale="none"),
    "int8 none": Cast("int8", scale="none"),
    "fp16 row": Cast("fp16", scale="row"),
    "bf16 pow2": Cast("bf16", rule="pow2"),
    "odd block": Cast("e4m3", scale="block", block=(3, 7), rule="pow2"),
    "wide block": Cast("e4m3", scale="block", block=(1, 1500), rule="pow2"),
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native_core().isa()
    assert native_core().set_isa(request.param)
    yield request.param
    native_core().set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(a: object, b: object, what: str) -> None:
    if isinstance(a, tuple) and isinstance(b, tuple):
        for name, left, right in zip(a._fields, a, b, strict=True):  # type: ignore[attr-defined]
            same(left, right, f"{what}.{name}")
        return
    assert (a is None) == (b is None), what
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    left, right = (t.contiguous().view(INTEGERS[t.element_size()]) for t in (a, b))
    wrong = (left != right).nonzero()
    at = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert len(wrong) == 0, f"{what}: {len(wrong)} of {a.numel()} differ, first at {at}: {a[at]} and {b[at]}"


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0, special: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-12, 12, (rows, 1), generator=generator)
    )
    if special and rows > 5 and columns > 40:
        x[1] = 0
        x[2, :33] = 0
        x[3] *= 1e-30
        x[4, :20] = 2.0**-140
        x[0, 3] = -0.0
    return x.to(dtype)


def compare(x: Tensor, cast: Cast, axis: int, given: Tensor | None = None) -> None:
    plan = plan_of(cast)
    for counters in (False, True):
        arguments = (x, plan, axis, given, RNG, counters)
        native, expected = scale.native.quantize(*arguments), reference.quantize(*arguments)
        same(native, expected, f"quantize {cast} axis {axis} counters {counters}")
    for dtype in (torch.bfloat16, torch.float32):
        same(
            scale.native.dequantize(native, plan, axis, dtype),
            reference.dequantize(expected, plan, axis, dtype),
            "back",
        )
        if scale.folds(cast, dtype) == "":
            for counters in (False, True):
                arguments = (x, plan, axis, given, dtype, RNG, counters)
                a, b = scale.native.carrier(*arguments), reference.carrier(*arguments)
                same(a, b, f"carrier {cast} axis {axis} {dtype} counters {counters}")
            a, b = (m.carrier_from_codes(expected, plan, axis, dtype) for m in (scale.native, reference))
            same(a, b, f"carrier_from_codes {cast} axis {axis} {dtype}")


@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str, isa: str) -> None:
    inputs = [((7, 130), torch.float32), ((130, 65), torch.bfloat16), ((33, 17), torch.float16)]
    for axis, (shape, dtype) in itertools.product((-1, -2), inputs[:3] if isa == ISAS[-1] else inputs[:1]):
        compare(matrix(*shape, dtype), CASTS[name], axis)


@pytest.mark.parametrize("name", CASTS)
def test_nan_and_inf(name: str) -> None:
    for axis, value in itertools.product((-1, -2), (math.inf, -math.inf, math.nan)):
        x = matrix(40, 70, torch.float32)
        x[20, 35] = value
        compare(x, CASTS[name], axis)


@pytest.mark.parametrize("rows", [1, 17, 129])
@pytest.mark.parametrize("columns", [0, 1, 15, 33, 1025])
def test_ragged(rows: int, columns: int) -> None:
    for name in ("e4m3 row", "deepseek 128x128", "nvfp4", "mxfp4 stochastic"):
        for axis in (-1, -2):
            compare(matrix(rows, columns, torch.float32, special=False), CASTS[name], axis)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-37, 3e38])
def test_far_scales(magnitude: float, isa: str) -> None:
    x = matrix(33, 70, torch.float32, special=False)
    x = (x / x.abs().max()).double().mul(magnitude).float()
    for name in (
        "fp8 tensor",
        "e5m2 tensor pow2",
        "mxfp8",
        "mxint8",
        "nvfp4",
        "int8 row",
        "mxfp4 stochastic",
        "int8 block",
    ):
        for axis in (-1, -2):
            compare(x, CASTS[name], axis)


@pytest.mark.parametrize("rounding", ["nearest-away", "toward-zero", "up", "down", "stochastic"])
@pytest.mark.parametrize("overflow", ["saturate", "keep-inf", "ieee"])
def test_roundings_and_overflows(rounding: str, overflow: str, isa: str) -> None:
    names = ("fp8 tensor", "mxfp8 floor", "nvfp4", "int8 block", "fnuz", "fp16 row", "e4m3 none")
    for name in names if isa == ISAS[-1] else names[:2]:
        cast = CASTS[name].replace(rounding=rounding, overflow=overflow)
        x = matrix(34, 70, torch.float32)
        compare(x, cast, -1)
        x[9, 9] = math.inf
        compare(x, cast, -2)


@pytest.mark.parametrize("name", ["fp8 tensor", "e5m2 tensor pow2", "e4m3 row", "int8 row", "mxfp8", "int8 block"])
def test_given_scales(name: str) -> None:
    cast = CASTS[name]
    for axis, factor, value in itertools.product((-1, -2), (0.25, 8.0, 0.3), (1.0, math.inf)):
        x = matrix(34, 130, torch.bfloat16)
        given = reference.quantize(x, plan_of(cast), axis).scale
        assert given is not None
        if given.dtype == torch.float32:
            given = given * factor
        x[30, 100] = value
        compare(x, cast, axis, given)


@pytest.mark.parametrize("name", CASTS)
def test_threads(name: str, threads: None) -> None:
    cast, x = CASTS[name], matrix(300, 777, torch.float32)
    for axis in (-1, -2):
        torch.set_num_threads(1)
        one = scale.native.quantize(x, plan_of(cast), axis, None, RNG, True)
        torch.set_num_threads(2)
        same(scale.native.quantize(x, plan_of(cast), axis, None, RNG, True), one, name)
        same(one, reference.quantize(x, plan_of(cast), axis, None, RNG, True), name)


def test_carrier_both() -> None:
    x = matrix(70, 130, torch.bfloat16)
    for a, b in [
        ("mxfp8", "mxfp8"),
        ("fp8 tensor", "fp8 tensor"),
        ("e4m3 row", "e4m3 row"),
        ("nvfp4 square", "nvfp4 square"),
    ]:
        arguments = (x, plan_of(CASTS[a]), plan_of(CASTS[b]), None, None, torch.bfloat16, None, True)
        for native, expected in zip(
            scale.native.carrier_both(*arguments), reference.carrier_both(*arguments), strict=True
        ):
            same(native, expected, a)


def test_strided_input() -> None:
    x = matrix(64, 300, torch.float32)
    for view in (x[:, ::2], x.t(), x[5:50, 7:200], x[:1].expand(40, 300)):
        for name in ("mxfp8", "fp8 tensor", "deepseek 1x128"):
            compare(view, CASTS[name], -1)
