"""Layer and RMS normalisation in torch, step by step as the native core takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels.reference.lanes import block_sum, lane_sum

__all__ = ["backward", "column_sum", "forward"]


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `lowprec.kernels.norm.forward`."""
    v, cols = x.float(), torch.tensor(float(x.shape[1]))
    mean = torch.zeros(x.shape[0]) if rms else lane_sum(v) / cols
    d = v - mean[:, None]
    variance = lane_sum(d * d) / cols + torch.tensor(eps, dtype=torch.float32)
    rstd = 1.0 / variance.double().sqrt().float()  # rounded correctly: torch's fp32 square root is not always
    y = d * rstd[:, None]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(dtype), mean, rstd


def backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, need: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `lowprec.kernels.norm.backward`."""
    cols = torch.tensor(float(x.shape[1]))
    hat = (x.float() - mean[:, None]) * rstd[:, None]
    g = grad.float()
    v = g if weight is None else g * weight
    first = torch.zeros(x.shape[0]) if rms else lane_sum(v) / cols
    second = lane_sum(v * hat) / cols
    grad_x = ((v - first[:, None]) - hat * second[:, None]) * rstd[:, None]
    return grad_x.to(x.dtype), block_sum(g * hat) if need[0] else None, block_sum(g) if need[1] else None


def column_sum(x: Tensor) -> Tensor:
    """See `lowprec.kernels.norm.column_sum`."""
    return block_sum(x.float())
