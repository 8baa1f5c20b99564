"""Cross-entropy in torch, step by step as the native core takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels.reference.lanes import exp, lane_sum

__all__ = ["backward", "forward"]


def forward(logits: Tensor, target: Tensor, ignore: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """See `lowprec.kernels.loss.forward`."""
    x, cols = logits.float(), logits.shape[1]
    top = x.amax(1)
    lse = lane_sum(exp(x - top[:, None])).double().log().float() + top
    known = target != ignore
    if bool((known & ((target < 0) | (target >= cols))).any()):
        raise IndexError(f"cross-entropy targets must lie in 0..{cols - 1}, or be {ignore} to be ignored.")
    hit = x.gather(1, torch.where(known, target, 0)[:, None])[:, 0]
    loss = lse - hit
    if smoothing > 0:
        s = torch.tensor(smoothing)
        loss = (1.0 - s) * loss + s * (lse - lane_sum(x) / torch.tensor(float(cols)))
    return torch.where(known, loss, 0.0), lse


def backward(
    logits: Tensor, target: Tensor, lse: Tensor, factor: Tensor, ignore: int, smoothing: float, out: Tensor | None
) -> Tensor:
    """See `lowprec.kernels.loss.backward`."""
    x = logits.float()
    known = target != ignore
    s = torch.tensor(smoothing)
    rest = s / torch.tensor(float(x.shape[1]))
    grad = exp(x - lse[:, None]) - rest
    at = torch.where(known, target, 0)[:, None]
    grad = grad.scatter(1, at, grad.gather(1, at) - (1.0 - s)) * factor.reshape(-1, 1)
    grad = torch.where(known[:, None], grad, 0.0).to(logits.dtype)
    return grad if out is None else out.copy_(grad)
