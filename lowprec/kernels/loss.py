"""Cross-entropy over rows of logits: fp32 inside, logits and gradient in their own dtype, no fp32 copy of either.

    lse_r = log sum_j exp(x_rj)
    loss_r = (1 - s) (lse_r - x_r,target) + s (lse_r - mean_j x_rj)             s = label smoothing
    grad_rj = (exp(x_rj - lse_r) - (1 - s) [j = target] - s / cols) * factor_r

Only the log-sum-exp is kept between forward and backward; the usual log_softmax keeps (and writes, and reads) a whole
fp32 matrix of probabilities, which for a vocabulary of 8192 is the largest tensor of the step.
"""

from __future__ import annotations

from torch import Tensor

from lowprec import kernels
from lowprec.kernels.native import loss as native
from lowprec.kernels.reference import loss as reference

__all__ = ["backward", "forward"]


def forward(logits: Tensor, target: Tensor, ignore: int = -100, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows, both fp32.

    Args:
        logits: matrix in fp32, bf16 or fp16.
        target: int64 class of each row.
        ignore: rows with this target have loss 0.
        smoothing: label smoothing, 0 to 1.

    Raises:
        IndexError: if a target is out of range.

    >>> import torch
    >>> forward(torch.zeros(1, 4), torch.tensor([2]))[0]
    tensor([1.3863])
    """
    return kernels.pick(logits, native, reference).forward(logits, target, ignore, smoothing)  # type: ignore[no-any-return]


def backward(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    ignore: int = -100,
    smoothing: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits in their dtype, each row times its fp32 `factor` (one value, or one a row).

    `out` may be the (contiguous) logits themselves.
    """
    module = kernels.pick(logits, native, reference)
    return module.backward(logits, target, lse, factor, ignore, smoothing, out)  # type: ignore[no-any-return]
