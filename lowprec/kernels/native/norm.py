"""Layer and RMS normalisation and column sums through the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels import native_core
from lowprec.kernels.native._types import TYPES, address

__all__ = ["backward", "column_sum", "forward"]

_SUM_ROWS = 64


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `lowprec.kernels.norm.forward`."""
    x = x.contiguous()
    rows, cols = x.shape
    y = torch.empty_like(x, dtype=dtype)
    mean = (torch.zeros if rms else torch.empty)(rows, dtype=torch.float32)
    rstd = torch.empty(rows, dtype=torch.float32)
    native_core().norm_forward(
        TYPES[x.dtype], TYPES[dtype], x.data_ptr(), address(weight), address(bias), y.data_ptr(), mean.data_ptr(),
        rstd.data_ptr(), rows, cols, eps, rms, torch.get_num_threads(),
    )  # fmt: skip
    return y, mean, rstd


def backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, need: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `lowprec.kernels.norm.backward`."""
    x, grad = x.contiguous(), grad.contiguous()
    rows, cols = x.shape
    out = torch.empty_like(x)
    grad_weight = torch.empty(cols, dtype=torch.float32) if need[0] else None
    grad_bias = torch.empty(cols, dtype=torch.float32) if need[1] else None
    scratch = torch.empty(2 * (-(-rows // _SUM_ROWS)) * cols if any(need) else 0, dtype=torch.float32)
    native_core().norm_backward(
        TYPES[x.dtype], TYPES[grad.dtype], x.data_ptr(), grad.data_ptr(), address(weight), mean.data_ptr(),
        rstd.data_ptr(), out.data_ptr(), address(grad_weight), address(grad_bias), scratch.data_ptr(), rows, cols, rms,
        torch.get_num_threads(),
    )  # fmt: skip
    return out, grad_weight, grad_bias


def column_sum(x: Tensor) -> Tensor:
    """See `lowprec.kernels.norm.column_sum`."""
    x = x.contiguous()
    rows, cols = x.shape
    out = torch.empty(cols, dtype=torch.float32)
    scratch = torch.empty(-(-rows // _SUM_ROWS) * cols, dtype=torch.float32)
    native_core().column_sum(
        TYPES[x.dtype], x.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows, cols, torch.get_num_threads()
    )
    return out
