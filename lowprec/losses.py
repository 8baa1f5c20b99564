"""Cross-entropy that computes in fp32 and keeps logits and their gradient in their own dtype.

The usual way under mixed precision casts bf16 logits to fp32, writes fp32 log-probabilities, reads them back in the
backward and casts the gradient to bf16 again: five passes over the largest tensor of a language model's step. One pass
forward and one backward do (`lowprec.kernels.loss` has the equations). It stands behind plain `F.cross_entropy` and
`nn.CrossEntropyLoss` wherever a recipe's op policy is active on a CPU; class weights, class probabilities as targets
and logits with more than one position axis go to torch, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowprec import policy
from lowprec.errors import unknown_name
from lowprec.kernels import fused

__all__ = ["cross_entropy"]

_REDUCTIONS = ("none", "mean", "sum")


def _takes(logits: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    return (
        weight is None
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and target.dtype == torch.int64
        and logits.dim() in (1, 2)
        and target.shape == logits.shape[:-1]
        and logits.shape[-1] > 0
    )


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy in fp32 of logits in any dtype; the arguments of `torch.nn.functional.cross_entropy`.

    Returns:
        The loss in fp32 (one value, or one a row with ``reduction="none"``). The gradient has the dtype of the logits.

    Raises:
        IndexError: if a target is out of range.

    >>> cross_entropy(torch.zeros(2, 4, dtype=torch.bfloat16), torch.tensor([0, 3]))
    tensor(1.3863)
    """
    if reduction not in _REDUCTIONS:
        raise unknown_name("reduction", reduction, _REDUCTIONS)
    if not _takes(logits, target, weight):
        return F.cross_entropy(
            logits.float(), target, weight, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing,
        )  # fmt: skip
    rows, goals = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    losses: Tensor = fused.cross_entropy(rows, goals, ignore_index, label_smoothing)[0]
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (goals != ignore_index).sum()


def _fused(
    active: policy.Policy,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if not _takes(logits, target, weight):
        return NotImplemented
    return cross_entropy(logits, target, None, _REDUCTIONS[reduction], ignore_index, label_smoothing)


policy.register(torch.ops.aten.cross_entropy_loss.default, _fused)
