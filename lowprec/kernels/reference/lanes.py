"""The arithmetic the fused kernels share: an exponential and sums with a fixed order, written in torch.

The native core computes on sixteen fp32 lanes, without fused multiply-adds, so that every instruction set and this file
give the same bits. Both the order of a sum and the steps of `exp` are therefore part of what an op means.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LANES", "block_sum", "exp", "lane_sum"]

LANES = 16
SUM_ROWS = 64  # rows of a block in sums over rows

_EXP = (1.381459878757596e-3, 8.368716575205326e-3, 4.166838899254799e-2, 1.666652113199234e-1, 4.999999403953552e-1)
_LN2_HIGH, _LN2_LOW, _MAGIC = 0.693145751953125, 1.4286068e-6, 12582912.0


def exp(x: Tensor) -> Tensor:
    """e^x of fp32 within 1 ulp: x = n ln 2 + r, a polynomial in r, times 2^n; 0 below -87 and e^88 above 88.

    >>> exp(torch.tensor([0.0, 1.0, -200.0]))
    tensor([1.0000, 2.7183, 0.0000])
    """
    clipped = torch.where(x > 88.0, 88.0, x)
    shifted = clipped * 1.44269504088896341 + _MAGIC
    n = shifted - _MAGIC
    r = (clipped - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * _EXP[0] + _EXP[1]
    for c in _EXP[2:]:
        p = p * r + c
    p = (r * r) * p + r + 1.0
    scaled = (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return torch.where(torch.isnan(x), x, torch.where(x < -87.0, 0.0, scaled))


def lane_sum(x: Tensor) -> Tensor:
    """Sum over the last axis: lane j adds elements j, j + 16, ...; then the lanes are folded in halves.

    >>> lane_sum(torch.ones(2, 40))
    tensor([40., 40.])
    """
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    lanes = torch.zeros(*x.shape[:-1], LANES)
    for part in torch.split(padded, LANES, dim=-1):
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def block_sum(x: Tensor) -> Tensor:
    """Sum of a matrix over its rows: blocks of 64 rows, each in order, then the blocks in order.

    >>> block_sum(torch.ones(100, 2))
    tensor([100., 100.])
    """
    total = torch.zeros(x.shape[1])
    for block in torch.split(x, SUM_ROWS):
        part = torch.zeros(x.shape[1])
        for row in block:
            part = part + row
        total = total + part
    return total
