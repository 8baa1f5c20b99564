"""AdamW: Adam whose weight decay shrinks the weight instead of entering the gradient.

w = (1 - lr * decay) w, then the step of `lowprec.optim.adam`
"""

from __future__ import annotations

from typing import Any

import torch

from lowprec.optim.adam import Adam

__all__ = ["AdamW"]


class AdamW(Adam):
    """`Adam` with decoupled weight decay, torch's AdamW; the arguments are those of `Adam`."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if options.pop("decoupled", True) is not True:
            raise ValueError("AdamW decays weights, not gradients: use Adam for decoupled=False")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled=True, **options)
