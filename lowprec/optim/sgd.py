"""SGD with momentum.

m = momentum * m + (1 - dampening) g        (m = g at the first step)
w = w - lr * m,     or with nesterov        w = w - lr * (g + momentum * m)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from lowprec.optim.base import LowPrecOptimizer, settings

__all__ = ["SGD"]


class SGD(LowPrecOptimizer):
    """Stochastic gradient descent with chosen precision; the settings are those of `lowprec.optim.Adam`.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        momentum: decay of the running sum of gradients; 0 keeps no state.
        dampening: share of the gradient that does not enter the sum.
        weight_decay: L2 penalty, or with ``decoupled`` what shrinks weights.
        nesterov: look ahead.
    """

    RULE = "sgd"
    STATES: ClassVar[dict[str, bool]] = {"momentum_buffer": True}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "decoupled": decoupled,
            **settings(states, master, update, residue, min_quantized, state_rounding),
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: Mapping[str, Any]) -> None:
        if not (0 <= float(group["momentum"]) < math.inf):
            raise ValueError(f"momentum must be a finite number of at least 0, got {group['momentum']}")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs a momentum and no dampening")

    def _states(self, group: Mapping[str, Any]) -> dict[str, bool]:
        return self.STATES if group["momentum"] else {}

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        taken = 1.0 if step == 1 else 1.0 - float(group["dampening"])
        return [float(group["lr"]), float(group["momentum"]), taken]
