"""Muon: momentum, orthogonalised.

    m = momentum m + (1 - momentum) g      u = g + momentum (m - g) (nesterov) or m
    X = u / |u|;   five times  A = X X^T,  X = a X + (b A + c A A) X       (X tends to U V^T of u's singular vectors)
    w = w (1 - lr decay) - lr sqrt(max(1, rows / columns)) X

The products run in ``products``: bf16 as in torch, or fp32. For matrices alone: give everything else to AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from lowprec.errors import unknown_name
from lowprec.kernels import optim as kernels
from lowprec.optim.base import settings
from lowprec.optim.computed import Computed

__all__ = ["Muon", "orthogonalise"]

PRODUCTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalise(
    x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """An approximately orthogonal matrix with the singular vectors of x (Newton-Schulz)."""
    a, b, c = coefficients
    turned = x.shape[0] > x.shape[1]
    y = x.to(dtype)
    y = y.t() if turned else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.t() if turned else y


class Muon(Computed):
    """Muon as in torch, with chosen precision; other settings are those of `lowprec.optim.Adam`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate, a number or a tensor.
        weight_decay: what shrinks weights.
        momentum: decay of the momentum.
        nesterov: look ahead.
        ns_coefficients: of the iteration.
        eps: floor of the norm.
        ns_steps: iterations.
        adjust_lr_fn: None or "original", or "match_rms_adamw".
        products: "bf16" or "fp32".
    """

    STATES: ClassVar[dict[str, bool]] = {"momentum_buffer": True}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        products: str = "bf16",
        maximize: bool = False,
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
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "products": products,
            "decoupled": True,
            "maximize": maximize,
            **settings(states, master, update, residue, min_quantized, state_rounding),
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: Mapping[str, Any]) -> None:
        if group["products"] not in PRODUCTS:
            raise unknown_name("precision of products", group["products"], PRODUCTS)
        if not 0 <= float(group["momentum"]) < 1:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
        if not 0 < group["ns_steps"] < 100:
            raise ValueError(f"ns_steps must be in 1 .. 99, got {group['ns_steps']}")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise unknown_name("adjust_lr_fn", group["adjust_lr_fn"], ("original", "match_rms_adamw"))
        for p in group["params"]:
            if p.ndim != 2:
                raise ValueError(f"Muon updates matrices, got a parameter of shape {tuple(p.shape)}: give it to AdamW")

    def _direction(
        self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], step: int
    ) -> tuple[torch.Tensor, float]:
        state, momentum = self.state[p], float(group["momentum"])
        program = self._program(p, group)
        codes, scale, name = state["momentum_buffer"], state.get("momentum_buffer_scale"), program.states[0]
        buffer = kernels.decode(codes, scale, name, p.shape).lerp(grad, 1 - momentum)
        new, new_scale = kernels.encode_state(
            buffer, name, program.state_rounding, seed=self.seed, step=step, stream=self._slot(p, group).stream
        )
        codes.copy_(new.view(codes.dtype) if new.dtype != codes.dtype else new)
        if scale is not None and new_scale is not None:
            scale.copy_(new_scale)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        made = orthogonalise(
            update, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], PRODUCTS[group["products"]]
        )
        rows, cols = p.shape
        match = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, cols)) if match else math.sqrt(max(1.0, rows / cols))
        return made, float(group["lr"]) * ratio
