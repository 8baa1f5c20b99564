"""The softmax inside attention in torch, step by step as the native core takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowprec.kernels.reference.lanes import exp, lane_sum

if TYPE_CHECKING:
    from lowprec.kernels.softmax import Tile

__all__ = ["backward", "forward"]

_INF = float("inf")


def _logits(tile: Tile, scores: Tensor) -> tuple[Tensor, Tensor]:
    """scale * s + mask, -Inf where a row does not see; and what it sees."""
    queries, keys = scores.shape[1:]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if tile.causal:
        seen = torch.arange(keys) <= torch.arange(queries)[:, None] + tile.first_query
    v = scores.float() * torch.tensor(tile.scale)
    if tile.mask is not None:
        v = v + tile.mask
    return torch.where(seen, v, -_INF), seen


def forward(tile: Tile, scores: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """See `lowprec.kernels.softmax.forward`."""
    v, seen = _logits(tile, scores)
    top = v.amax(-1, keepdim=True)
    blind = top == -_INF
    e = torch.where(seen, exp(v - torch.where(blind, 0.0, top)), 0.0)
    total = lane_sum(e)
    p = torch.where(seen, e * (1.0 / total)[..., None], 0.0)
    lse.copy_(torch.where(blind[..., 0], _INF, total.double().log().float() + top[..., 0]))
    return out.copy_(torch.where(blind, 0.0, p))


def backward(tile: Tile, scores: Tensor, lse: Tensor, grad: Tensor, p: Tensor, grad_scores: Tensor) -> None:
    """See `lowprec.kernels.softmax.backward`."""
    v, seen = _logits(tile, scores)
    e = torch.where(seen, exp(v - lse[..., None]), 0.0)
    dot = lane_sum(torch.where(seen, e * grad.float(), 0.0))
    grad_s = (e * (grad.float() - dot[..., None])) * torch.tensor(tile.scale)
    p.copy_(e)
    grad_scores.copy_(torch.where(seen, grad_s, 0.0))
