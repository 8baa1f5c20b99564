"""The pass after a GEMM in the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels import native_core
from lowprec.kernels.reference import epilogue as reference

__all__ = ["int8_columns", "scaled"]

_STORES = {torch.int32: 0, torch.float32: 1, torch.bfloat16: 2}


def _factors(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A scale as contiguous fp32, with its address and its step."""
    if scale is None:
        return None, 0, 0
    if scale.dtype != torch.float32 or not scale.is_contiguous():
        scale = scale.float().contiguous()
    return scale, scale.data_ptr(), 1 if scale.numel() > 1 else 0


def scaled(
    sums: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """See `lowprec.kernels.epilogue.scaled`."""
    if sums.dtype not in _STORES or dtype not in (torch.float32, torch.bfloat16):
        return reference.scaled(sums, row, column, bias, dtype, out)
    rows, columns = sums.shape
    if out is None:
        out = torch.empty(rows, columns, dtype=dtype)
    elif not out.is_contiguous():
        return reference.scaled(sums, row, column, bias, dtype, out)
    sums = sums.contiguous()
    kept_row, row_at, row_step = _factors(row)
    kept_column, column_at, column_step = _factors(column)
    if (row_step and kept_row is not None and kept_row.numel() != rows) or (
        column_step and kept_column is not None and kept_column.numel() != columns
    ):
        raise ValueError(f"a product of {rows} x {columns} needs as many row and column scales, or one of each")
    bias = None if bias is None else bias.float().contiguous()
    if bias is not None and bias.numel() != columns:
        raise ValueError(f"a product with {columns} columns needs as many biases, got {bias.numel()}")
    native_core().epilogue_scaled(
        sums.data_ptr(),
        _STORES[sums.dtype],
        row_at,
        row_step,
        column_at,
        column_step,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        _STORES[dtype],
        rows,
        columns,
        torch.get_num_threads(),
    )
    return out


def int8_columns(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """See `lowprec.kernels.epilogue.int8_columns`."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        return None
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(columns, dtype=torch.float32)
    store, threads = _STORES[x.dtype], torch.get_num_threads()
    good = native_core().int8_columns(x.data_ptr(), store, rows, columns, codes.data_ptr(), scale.data_ptr(), threads)
    return (codes, scale) if good else None
