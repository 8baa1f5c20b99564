"""Adam: two running moments of the gradient, the first divided by the root of the second.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

Weight decay is added to the gradient; with ``decoupled=True`` it shrinks the weight instead (AdamW). The second moment
below 16 bits is stored as its square root (see `lowprec.kernels.stores`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from lowprec.optim.base import LowPrecOptimizer, settings

__all__ = ["Adam"]


class Adam(LowPrecOptimizer):
    """Adam with chosen precision.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: divide by the largest second moment so far.
        maximize: go up instead of down.
        decoupled: decay weights, not gradients.
        states: "fp32", "bf16", "fp16", "fp8", "fp8-e5m2", "8bit", "4bit", or a pair of them.
        master: None, "fp32", "fp16" (scaled) or "bf16+16", for weights below fp32.
        update: "nearest", "kahan" or "stochastic" rounding of the update.
        residue: dtype of the Kahan compensation.
        min_quantized: states of tensors with fewer elements, and of vectors, are not quantised.
        state_rounding: "nearest" or "stochastic"; None chooses (stochastic below 16 bits).
        seed: key of the stochastic draws.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(64, 64))
    >>> optimizer = Adam([w], lr=0.1, states="8bit")
    >>> w.grad = torch.ones(64, 64)
    >>> _ = optimizer.step()
    >>> round(w[0, 0].item(), 4)
    0.9
    """

    RULE = "adam"
    STATES: ClassVar[dict[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled: bool = False,
        states: str | Sequence[str] = "fp32",
        master: str | None = None,
        update: str = "nearest",
        residue: torch.dtype | None = None,
        min_quantized: int = 4096,
        state_rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled": decoupled,
            **settings(states, master, update, residue, min_quantized, state_rounding),
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: Mapping[str, Any]) -> None:
        for beta in group["betas"]:
            if not 0 <= float(beta) < 1:
                raise ValueError(f"betas must be in [0, 1), got {tuple(map(float, group['betas']))}")

    def _states(self, group: Mapping[str, Any]) -> dict[str, bool]:
        return {**self.STATES, "max_exp_avg_sq": False} if group["amsgrad"] else self.STATES

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        b1, b2 = map(float, group["betas"])
        rate = float(group["lr"]) / (1 - b1**step)
        return [rate, 1 - b1, b2, 1 - b2, (1 - b2**step) ** -0.5, float(group["eps"])]
