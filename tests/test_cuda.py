"""The same bits on a GPU: every cast and every scaled cast on CUDA against the CPU reference.

Skipped where there is no GPU. `python tests/test_cuda.py` runs the checks without pytest, for a machine that has a GPU
and little else.
"""

from __future__ import annotations

import itertools

import torch

from lowprec import kernels
from lowprec.casting import Cast
from lowprec.formats import format as lookup
from lowprec.formats import formats
from lowprec.kernels import cast, scale
from lowprec.kernels.cast import OVERFLOWS, ROUNDINGS, Rng

CASTS = [
    "e4m3", "e5m2:tensor:pow2", "e4m3:row", "e4m3:1x128:e8m0:pow2", "e4m3:128x128:e8m0:pow2", "e4m3:1x128",
    "e4m3:1x32:e8m0:rceil", "e4m3:1x32:e8m0:floor", "e2m3:1x32:e8m0:even", "e2m1:1x32:e8m0:ceil", "e2m1:1x16:e4m3",
    "e2m1:16x16:e4m3", "int8:row", "int8:column", "int4:1x32", "mxint8:1x32:e8m0:rceil",
]  # fmt: skip


def _structured(n: int = 1 << 12) -> torch.Tensor:
    """Every fp32 exponent with random mantissas, neighbourhoods of powers of two, and the specials."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32)
    powers = (torch.arange(256, dtype=torch.int32) << 23).repeat_interleave(3) + torch.tensor([-1, 0, 1]).repeat(
        256
    ).int()
    specials = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, -(2**31), 0], dtype=torch.int64).to(torch.int32)
    return torch.cat([bits, powers, specials]).view(torch.float32)


def _same(got: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    if expected is None or got is None:
        assert got is None and expected is None, what
        return
    g, e = got.cpu(), expected.cpu()
    assert g.dtype == e.dtype and g.shape == e.shape, f"{what}: {g.dtype} {g.shape} against {e.dtype} {e.shape}"
    if g.is_floating_point():
        g, e = torch.nan_to_num(g.double(), nan=1e99), torch.nan_to_num(e.double(), nan=1e99)
    else:
        g, e = g.to(torch.int64), e.to(torch.int64)
    wrong = int((g != e).sum())
    assert wrong == 0, f"{what}: {wrong} of {e.numel()} differ"


def check_casts() -> int:
    """encode, round_to and decode of every format, rounding and overflow mode; returns how many were compared."""
    x, count = _structured(), 0
    for name, rounding, overflow in itertools.product(formats(), ROUNDINGS, OVERFLOWS):
        fmt, rng = lookup(name), Rng(3, step=5, tensor=2) if rounding == "stochastic" else None
        with kernels.use("reference"):
            expected = cast.encode(x, fmt, rounding, overflow, "zero", rng)
        got = cast.encode(x.cuda(), fmt, rounding, overflow, "zero", rng)
        _same(got, expected, f"encode {name} {rounding} {overflow}")
        _same(cast.decode(got, fmt), cast.decode(expected, fmt), f"decode {name}")
        count += 1
    return count


def check_scaled_casts() -> int:
    """quantize and dequantize of every granularity, both axes, clean and with a NaN; returns how many were compared."""
    generator, count = torch.Generator().manual_seed(1), 0
    base = torch.randn(130, 67, generator=generator) * torch.logspace(-6, 3, 67)
    broken = base.clone()
    broken[3, 5], broken[64, 31] = float("nan"), float("inf")
    for text, axis, x, dtype in itertools.product(CASTS, (-1, -2), (base, broken), (torch.float32, torch.bfloat16)):
        c, what = Cast.parse(text), f"{text} axis {axis} {dtype}"
        with kernels.use("reference"):
            expected = scale.quantize(x.to(dtype), c, axis, counters=True)
        got = scale.quantize(x.to(dtype).cuda(), c, axis, counters=True)
        for field, g, e in zip(expected._fields, got, expected):
            _same(g, e, f"{what} {field}")
        _same(scale.dequantize(got, c, axis), scale.dequantize(expected, c, axis), f"{what} values")
        count += 1
    return count


if __name__ == "__main__":
    print("device:", torch.cuda.get_device_name(), "torch", torch.__version__)
    print("casts compared:", check_casts(), "all equal")
    print("scaled casts compared:", check_scaled_casts(), "all equal")
else:
    import pytest

    needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

    @needs_gpu
    def test_casts_give_the_bits_of_the_cpu() -> None:
        assert check_casts() > 300

    @needs_gpu
    def test_scaled_casts_give_the_bits_of_the_cpu() -> None:
        assert check_scaled_casts() > 100
