"""Matrix products summed as a given tensor core sums them: would its accumulation hurt my model?

`lowprec.kernels.reference.accumulate` holds the equations, `lowprec.recipe.ACCUMULATORS` the cores that are known. The
error of these sums is a bias, not noise: what lies below the grid is cut off, always towards zero, so it grows with the
length of the sum. Rounding the result to as many bits would be the wrong model.

A product of two operands must be exact in fp64, and operands are fp32 here: e4m3 to fp16 and tf32 values all are, as
their carriers hold them. Which exponent a subnormal operand has depends on its format, which the values alone do not
tell: give the formats where subnormals matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.errors import unknown_name
from lowprec.formats import format as find_format
from lowprec.kernels import pick
from lowprec.kernels.native import accumulate as native
from lowprec.kernels.reference import accumulate as reference
from lowprec.recipe import ACCUMULATORS, Accumulator

__all__ = ["LEAST", "least_exponent", "matmul"]

LEAST = -126  # the smallest exponent of fp32 and bf16 operands


def least_exponent(name: str) -> int:
    """The exponent that subnormals of a format are stored with.

    >>> least_exponent("e4m3"), least_exponent("bf16")
    (-6, -126)
    """
    element = find_format(name)
    return 1 - element.bias if element.kind == "float" else LEAST


def matmul(a: Tensor, b: Tensor, accumulator: str | Accumulator, *, least: tuple[int, int] = (LEAST, LEAST)) -> Tensor:
    """The product of two matrices, both with the contraction last.

    Args:
        a: [M, K], fp32, bf16 or fp16.
        b: [N, K], the same.
        accumulator: how sums are made: an `Accumulator` or the name of one.
        least: the smallest exponents of both operands' formats (see `least_exponent`).

    Returns:
        ``a @ b.T`` as [M, N], fp32.

    Raises:
        ValueError: for an unknown accumulator or shapes that do not fit.

    >>> ones = torch.ones(1, 4096)  # exactly: 4096 and 4608
    >>> float(matmul(ones, ones, "blackwell-fp8")), float(matmul(ones * 1.125, ones, "hopper-fp8"))
    (4096.0, 4324.0)
    """
    if isinstance(accumulator, str):
        if accumulator not in ACCUMULATORS:
            raise unknown_name("accumulator", accumulator, ACCUMULATORS)
        accumulator = ACCUMULATORS[accumulator]
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"expected matrices [M, K] and [N, K], got {tuple(a.shape)} and {tuple(b.shape)}.")
    for x in (a, b):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"operands of an accumulator model are fp32, bf16 or fp16, got {x.dtype}.")
    a, b = a.float().contiguous(), b.float().contiguous()
    return pick(a, native, reference).matmul(a, b, accumulator, *least)  # type: ignore[no-any-return]
