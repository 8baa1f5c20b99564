"""Tensor-core sums in plain torch: the readable definition.

One instruction takes `k_step` products and the sum so far, c. With exponents taken from the operands as they are stored
(a product's exponent is the sum of its operands' exponents, so its significand may be anything below 4; a subnormal
operand keeps the smallest exponent of its format; zeros have none):

    top  = the largest exponent among the products and c
    each = trunc(value * 2^(fraction_bits - top))           an integer; what lies below the grid is cut off
    c'   = (sum of each) * 2^(top - fraction_bits)          exact, then truncated to output_mantissa bits of an fp32

and every `promote_every` elements c is added to an fp32 sum (rounded to nearest) and starts again at zero.

Sums beyond fp32 are infinite and stay so. Where an operand is Inf or NaN the result is that of the plain sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.recipe import Accumulator

__all__ = ["matmul"]

_NONE = -100000


def _exponent(x: Tensor, least: int) -> Tensor:
    exponent = torch.frexp(x)[1].to(torch.int64) - 1
    return torch.where(x == 0, _NONE, exponent.clamp_min(least))


def _power(exponent: Tensor) -> Tensor:
    """2 to an integer, from its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _truncated(value: Tensor, mantissa: int) -> Tensor:
    """As fp32 with fewer mantissa bits, rounded toward zero, without a negative zero."""
    normal = (value.view(torch.int64) & ~((1 << (52 - mantissa)) - 1)).view(torch.float64)
    subnormal = torch.trunc(value * 2.0 ** (126 + mantissa)) * 2.0 ** (-126 - mantissa)
    made = torch.where(value.abs() < 2.0**-126, subnormal, normal)
    made = torch.where(value.abs() >= 2.0**128, torch.copysign(torch.full_like(made, torch.inf), value), made)
    return torch.where(made == 0, 0.0, made)


def matmul(a: Tensor, b: Tensor, model: Accumulator, least_a: int, least_b: int) -> Tensor:
    """``a @ b.T`` for fp32 a [M, K] and b [N, K]; see `lowprec.kernels.accumulate.matmul`."""
    wide_a, wide_b = a.double(), b.double()
    exponents_a, exponents_b = _exponent(wide_a, least_a), _exponent(wide_b, least_b)
    sums = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    high = torch.zeros_like(sums, dtype=torch.float32)
    for start in range(0, a.shape[1], model.k_step):
        part = slice(start, start + model.k_step)
        products = wide_a[:, None, part] * wide_b[None, :, part]
        top = (exponents_a[:, None, part] + exponents_b[None, :, part]).amax(-1)
        top = torch.maximum(top, _exponent(sums, -126)).clamp(-900, 900)
        scale = _power(model.fraction_bits - top)
        total = torch.trunc(sums * scale) + torch.trunc(products * scale[..., None]).sum(-1)
        made = _truncated(total * _power(top - model.fraction_bits), model.output_mantissa)
        sums = torch.where(sums.isinf(), sums, made)
        if model.promote_every and (start + model.k_step) % model.promote_every == 0:
            high += sums.float()
            sums = torch.zeros_like(sums)
    out = high + sums.float() if model.promote_every else sums.float()
    finite = a.isfinite().all(-1)[:, None] & b.isfinite().all(-1)[None, :]
    return out if bool(finite.all()) else torch.where(finite, out, (wide_a @ wide_b.T).float())
