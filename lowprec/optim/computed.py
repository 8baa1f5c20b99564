"""Optimizers whose direction needs more than one look at the gradient (a norm, a factorisation, an orthogonalisation).

The direction is computed in fp32 by plain torch ops, one parameter at a time, the same on every backend; the update of
the weight, its masters, rounding and residue is the kernel of plain SGD with the direction as its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lowprec.kernels import optim as kernels
from lowprec.kernels.stores import Batch
from lowprec.optim.base import LowPrecOptimizer

__all__ = ["Computed"]


class Computed(LowPrecOptimizer):
    """Base of optimizers that give `_direction`."""

    RULE = "sgd"
    KEEPS = False

    def _direction(
        self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], step: int
    ) -> tuple[torch.Tensor, float]:
        """What is subtracted from the weight, and its rate; updates the states."""
        raise NotImplementedError

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        return [0.0, 0.0, 0.0]

    def _update(self, work: list[Any]) -> None:
        for batch, coefficients, step, params in work:
            group = self._group(params[0])
            for p, slot in zip(params, batch.slots, strict=True):
                assert slot.grad is not None
                grad = kernels.decode(slot.grad, slot.grad_scale, batch.program.grad, p.shape) * coefficients[0]
                if coefficients[1] != 0:
                    grad = grad + kernels.read_weight(slot, batch.program) * coefficients[1]
                direction, rate = self._direction(p, grad, group, step)
                slot.grad, slot.grad_scale, slot.states, slot.scales = direction.float().contiguous(), None, [], []
                program = replace(batch.program, grad="fp32", states=(), nesterov=False)
                kernels.update(Batch(program, [slot]), [1.0, 0.0, coefficients[2], rate, 0.0, 0.0], self.seed, step)
        self._finish(work)
