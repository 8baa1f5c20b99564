"""Whatever comes in, the kernels answer with the reference's bits or with one plain error; they never crash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowprec.formats import format, formats
from lowprec.kernels import available, cast, scale
from lowprec.kernels.reference import cast as reference
from lowprec.kernels.reference import scale as reference_scale
from lowprec.kernels.reference.rounding import Rng
from lowprec.recipe import Cast

pytestmark = pytest.mark.skipif(not available("native")[0], reason="the native core is not built")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMES = [n for n in formats() if not n.startswith("own_")]
RNG = Rng(seed=3, offset=7)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGERS[x.element_size()])


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype], dims: int | None = None) -> Tensor:
    """Any shape, stride and bit pattern."""
    dtype = draw(st.sampled_from(dtypes))
    count = dims if dims is not None else draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wide = [max(2 * n, 1) for n in shape]
    if draw(st.booleans()) or dtype not in FLOATS:
        x = (torch.randn(wide, generator=generator) * draw(st.sampled_from([1.0, 1e-6, 1e5]))).to(dtype)
    else:
        integer = INTEGERS[torch.empty(0, dtype=dtype).element_size()]
        limits = torch.iinfo(integer)
        x = torch.randint(limits.min, limits.max, wide, generator=generator, dtype=integer).view(dtype)
    for i, n in enumerate(shape):
        x = x.narrow(i, draw(st.integers(0, x.shape[i] - n)), n)
    if len(shape) >= 2 and draw(st.booleans()):
        x = x.transpose(0, 1)
    if len(shape) >= 1 and draw(st.booleans()):
        x = x[::2]
    return x


@settings(max_examples=150, deadline=None)
@given(
    tensors(DTYPES),
    st.sampled_from(NAMES),
    st.sampled_from([*cast.ROUNDINGS, "sideways"]),
    st.sampled_from([*cast.OVERFLOWS, "wrap"]),
    st.sampled_from([*cast.NANS, "ignore"]),
)
def test_casts(x: Tensor, name: str, rounding: str, overflow: str, nan: str) -> None:
    fmt = format(name)
    try:
        codes = cast.encode(x, fmt, rounding, overflow, nan, RNG)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    assert torch.equal(bits(codes), bits(reference.encode(x, fmt, rounding, overflow, nan, RNG)))
    rounded = cast.round_to(x, fmt, rounding, overflow, RNG)
    assert torch.equal(bits(rounded), bits(reference.round_to(x, fmt, rounding, overflow, RNG)))
    for dtype in FLOATS:
        assert torch.equal(bits(cast.decode(codes, fmt, dtype)), bits(reference.decode(codes, fmt, dtype)))


@settings(max_examples=150, deadline=None)
@given(
    tensors(FLOATS, dims=2),
    st.sampled_from(["e4m3", "e5m2", "e2m1", "e2m3", "int8", "int4", "e4m3fnuz", "bf16", "fp16"]),
    st.sampled_from(["none", "tensor", "row", "column", "block"]),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.sampled_from(["fp32", "e8m0", "e4m3"]),
    st.sampled_from(["amax", "pow2", "floor", "ceil", "even", "rceil"]),
    st.sampled_from(list(cast.ROUNDINGS)),
    st.sampled_from(list(cast.OVERFLOWS)),
    st.sampled_from([-1, -2]),
)
def test_scaled_casts(
    x: Tensor,
    name: str,
    kind: str,
    block: tuple[int, int],
    scale_format: str,
    rule: str,
    rounding: str,
    overflow: str,
    axis: int,
) -> None:
    try:
        made = Cast(
            name,
            scale=kind,  # type: ignore[arg-type]
            block=block if kind == "block" else None,
            scale_format=scale_format,  # type: ignore[arg-type]
            rule=rule,  # type: ignore[arg-type]
            rounding=rounding,  # type: ignore[arg-type]
            overflow=overflow,  # type: ignore[arg-type]
        )
        parts = scale.quantize(x, made, axis, None, RNG, True)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    expected = reference_scale.quantize(x, scale.plan_of(made), axis, None, RNG, True)
    for ours, theirs in zip(parts, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(bits(ours), bits(theirs))
    assert scale.dequantize(parts, made, axis, torch.bfloat16).shape == x.shape
