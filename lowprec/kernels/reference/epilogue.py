"""The pass after a GEMM in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scaled"]


def scaled(
    sums: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """See `lowprec.kernels.epilogue.scaled`."""
    value = sums.float()
    if row is not None:
        value = value * (row.reshape(-1, 1) if row.numel() > 1 else row.reshape(()))
    if column is not None:
        value = value * (column.reshape(1, -1) if column.numel() > 1 else column.reshape(()))
    if bias is not None:
        value = value + bias.float()
    return value.to(dtype) if out is None else out.copy_(value)
