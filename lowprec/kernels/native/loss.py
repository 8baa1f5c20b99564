"""Cross-entropy through the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels import native_core
from lowprec.kernels.native._types import TYPES

__all__ = ["backward", "forward"]


def forward(logits: Tensor, target: Tensor, ignore: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """See `lowprec.kernels.loss.forward`."""
    logits, target = logits.contiguous(), target.contiguous()
    rows, cols = logits.shape
    loss = torch.empty(rows, dtype=torch.float32)
    lse = torch.empty(rows, dtype=torch.float32)
    bad = native_core().loss_forward(
        TYPES[logits.dtype], logits.data_ptr(), target.data_ptr(), loss.data_ptr(), lse.data_ptr(), rows, cols, ignore,
        smoothing, torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"cross-entropy targets must lie in 0..{cols - 1}, or be {ignore} to be ignored.")
    return loss, lse


def backward(
    logits: Tensor, target: Tensor, lse: Tensor, factor: Tensor, ignore: int, smoothing: float, out: Tensor | None
) -> Tensor:
    """See `lowprec.kernels.loss.backward`."""
    logits, target, factor = logits.contiguous(), target.contiguous(), factor.contiguous()
    grad = torch.empty_like(logits) if out is None else out
    native_core().loss_backward(
        TYPES[logits.dtype], logits.data_ptr(), target.data_ptr(), lse.data_ptr(), factor.data_ptr(),
        1 if factor.numel() > 1 else 0, grad.data_ptr(), logits.shape[0], logits.shape[1], ignore, smoothing,
        torch.get_num_threads(),
    )  # fmt: skip
    return grad
