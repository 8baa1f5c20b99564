"""Lion: the sign of an interpolated momentum.

    d = sign(b1 m + (1 - b1) g)      w = (1 - lr * decay) w - lr d      m = b2 m + (1 - b2) g

One state, and updates of one size: it takes low-precision states well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from lowprec.optim.base import LowPrecOptimizer, settings

__all__ = ["Lion"]


class Lion(LowPrecOptimizer):
    """Lion with chosen precision; the settings are those of `lowprec.optim.Adam`.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        betas: interpolation in the update, decay of the momentum.
        weight_decay: what shrinks weights; with ``decoupled=False`` an L2 penalty.
    """

    RULE = "lion"
    STATES: ClassVar[dict[str, bool]] = {"exp_avg": True}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled: bool = True,
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
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled": decoupled,
            **settings(states, master, update, residue, min_quantized, state_rounding),
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: Mapping[str, Any]) -> None:
        for beta in group["betas"]:
            if not 0 <= float(beta) < 1:
                raise ValueError(f"betas must be in [0, 1), got {tuple(map(float, group['betas']))}")

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        b1, b2 = map(float, group["betas"])
        return [float(group["lr"]), b1, 1 - b1, b2, 1 - b2]
