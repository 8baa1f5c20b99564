"""The pass after a GEMM: scales of rows and columns, bias, and the dtype of the result, in one read and one write.

    out[m, n] = round(((sums[m, n] * row[m]) * column[n]) + bias[n])

with every operation in fp32 and one rounding to the dtype of the result. It turns the int32 sums of an int8 product
into bf16 or fp32, and scales what a bf16 or fp32 product of unscaled operands gave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels import backend, pick
from lowprec.kernels.native import epilogue as native
from lowprec.kernels.reference import epilogue as reference

__all__ = ["int8_columns", "scaled"]


def scaled(
    sums: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Scale the sums of a product, add a bias, and give them another dtype.

    Args:
        sums: int32, fp32 or bf16 matrix.
        row: fp32 factors, one a row, or one (any shape with one element), or None for 1.
        column: fp32 factors, one a column, or one, or None for 1.
        bias: one a column, or None.
        dtype: dtype of the result.
        out: where to write it; may be `sums` itself where the dtypes agree.

    Returns:
        The result, `out` if that was given.

    >>> sums = torch.tensor([[3, 5]], dtype=torch.int32)
    >>> scaled(sums, torch.tensor([2.0]), None, torch.tensor([0.5, 1.0]), torch.float32)
    tensor([[ 6.5000, 11.0000]])
    """
    return pick(sums, native, reference).scaled(sums, row, column, bias, dtype, out)  # type: ignore[no-any-return]


def int8_columns(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes of a matrix cast to int8 with one scale a column, in one pass over strips that stay in the cache.

    The same bits as `lowprec.kernels.scale.quantize` with "int8:row" along axis -2, which is asked where this declines.

    Args:
        x: a matrix.

    Returns:
        int8 codes and one scale a column; or None: not on a CPU, another dtype, or a column that is not finite.
    """
    return native.int8_columns(x.detach()) if backend(x) == "native" else None
