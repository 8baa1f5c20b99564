"""Adafactor: the second moment of a matrix as the outer product of its row and column means.

    b = 1 - t^beta2_decay        row = b row + (1 - b) mean(g^2 over columns)      col likewise over rows
    v = row col / mean(row)      u = g / sqrt(v)      u = u / max(1, rms(u) / d)
    w = w (1 - lr decay) - max(eps2, rms(w)) min(lr, 1 / sqrt(t)) u

The factors weigh nothing beside the weight, so they stay fp32 and there is no ``states`` setting; weights, masters and
rounding are as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lowprec.kernels import optim as kernels
from lowprec.optim.base import settings
from lowprec.optim.computed import Computed

__all__ = ["Adafactor"]


def _mean_square(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Mean of squares along a dimension, in fp64 so that no order of summation shows."""
    return x.double().square().mean(dim, keepdim=True).float()


def _rms(x: torch.Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))


class Adafactor(Computed):
    """Adafactor as in torch, with chosen precision of weights; other settings are those of `lowprec.optim.Adam`.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        beta2_decay: exponent of the decay of the second moment.
        eps: floor of the second moment (None: the weight dtype's epsilon) and of the relative step.
        d: updates are clipped to this root mean square.
        weight_decay: what shrinks weights.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str | None = None,
        update: str = "nearest",
        residue: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "decoupled": True,
            "maximize": maximize,
            **settings("fp32", master, update, residue, 4096, None),
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: Mapping[str, Any]) -> None:
        if group["beta2_decay"] > 0:
            raise ValueError(f"beta2_decay must not be above 0, got {group['beta2_decay']}")
        if group["d"] < 1:
            raise ValueError(f"d must be at least 1, got {group['d']}")

    def _empty_state(self, p: torch.Tensor, group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        state = super()._empty_state(p, group, device)
        zeros: Any = {"dtype": torch.float32, "device": device}
        if p.ndim > 1:
            state["row_var"] = torch.zeros(*p.shape[:-1], 1, **zeros)
            state["col_var"] = torch.zeros(*p.shape[:-2], 1, p.shape[-1], **zeros)
        else:
            state["variance"] = torch.zeros(p.shape, **zeros)
        return state

    def _direction(
        self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], step: int
    ) -> tuple[torch.Tensor, float]:
        state, lr = self.state[p], float(group["lr"])
        taken = step ** float(group["beta2_decay"])
        eps1 = torch.finfo(torch.float32).eps if group["eps"][0] is None else float(group["eps"][0])
        weight = kernels.read_weight(self._slot(p, group), self._program(p, group))
        rate = max(float(group["eps"][1]), _rms(weight)) * min(lr, step**-0.5)
        if p.ndim > 1:
            state["row_var"].lerp_(_mean_square(grad, -1), taken)
            state["col_var"].lerp_(_mean_square(grad, -2), taken)
            mean = state["row_var"].double().mean(-2, keepdim=True).float().clamp(min=eps1)
            variance = state["row_var"] * state["col_var"] / mean
        else:
            state["variance"].lerp_(grad * grad, taken)
            variance = state["variance"]
        direction = grad / variance.clamp(min=eps1 * eps1).sqrt()
        return direction, rate / max(1.0, _rms(direction) / float(group["d"]))
