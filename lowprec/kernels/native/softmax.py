"""The softmax inside attention through the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowprec.kernels import native_core
from lowprec.kernels.native._types import TYPES

if TYPE_CHECKING:
    from lowprec.kernels.softmax import Tile

__all__ = ["backward", "forward"]


def _tile(tile: Tile, scores: Tensor) -> tuple[int, int, int, int, bool, float, int, int, int, int]:
    mask = (0, 0, 0, 0) if tile.mask is None else (tile.mask.data_ptr(), *tile.mask.stride())
    return (*scores.shape, tile.first_query, tile.causal, tile.scale, *mask)


def forward(tile: Tile, scores: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """See `lowprec.kernels.softmax.forward`."""
    native_core().softmax_forward(
        *_tile(tile, scores), TYPES[scores.dtype], TYPES[out.dtype], scores.data_ptr(), out.data_ptr(), lse.data_ptr(),
        lse.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def backward(tile: Tile, scores: Tensor, lse: Tensor, grad: Tensor, p: Tensor, grad_scores: Tensor) -> None:
    """See `lowprec.kernels.softmax.backward`."""
    native_core().softmax_backward(
        *_tile(tile, scores), TYPES[scores.dtype], TYPES[grad.dtype], scores.data_ptr(), lse.data_ptr(), lse.stride(0),
        grad.data_ptr(), p.data_ptr(), grad_scores.data_ptr(), p.stride(0), p.stride(1), torch.get_num_threads(),
    )  # fmt: skip
