"""The softmax inside attention over one tile of scores, forward and backward: fp32 inside.

    p = exp(scale * s + mask - lse)               lse = log sum exp(scale * s + mask), over the keys a query sees
    grad_s = p * (grad_p - sum(p * grad_p)) * scale

A tile is `heads` matrices of queries x keys. Under a causal mask query i of a tile that starts at `first_query` sees
keys 0 .. first_query + i. A row that sees nothing has probabilities 0 and lse = Inf, so its gradients are 0 as well.
Scores and probabilities are fp32, bf16 or fp16, lse is fp32. The backward takes the scores again instead of the
probabilities: recomputing them costs a fifth of the products, keeping them costs memory that grows with the square of
the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowprec import kernels
from lowprec.kernels.native import softmax as native
from lowprec.kernels.reference import softmax as reference

__all__ = ["Tile", "backward", "forward"]


class Tile(NamedTuple):
    """What a tile's rows see.

    Args:
        scale: multiplies the scores.
        causal: whether later keys are hidden.
        first_query: position of the tile's first query.
        mask: fp32, added to scaled scores, expanded to (heads, queries, keys) with any strides; or None.
    """

    scale: float
    causal: bool = False
    first_query: int = 0
    mask: Tensor | None = None


def forward(tile: Tile, scores: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Probabilities of contiguous scores (heads, queries, keys) into `out` (may be the scores), log-sum-exps into `lse`
    (heads, queries; the last stride is 1).

    >>> import torch
    >>> s = torch.zeros(1, 2, 2)
    >>> forward(Tile(1.0, causal=True), s, torch.empty(1, 2), torch.empty_like(s))
    tensor([[[1.0000, 0.0000],
             [0.5000, 0.5000]]])
    """
    return kernels.pick(scores, native, reference).forward(tile, scores, lse, out)  # type: ignore[no-any-return]


def backward(tile: Tile, scores: Tensor, lse: Tensor, grad: Tensor, p: Tensor, grad_scores: Tensor) -> None:
    """Probabilities into `p` and the scores' gradient into `grad_scores`.

    `scores` and `grad` are contiguous tiles; `p` and `grad_scores` have the dtype of `grad`, equal strides, the last of
    them 1, and may be `scores` and `grad` themselves.
    """
    kernels.pick(scores, native, reference).backward(tile, scores, lse, grad, p, grad_scores)
