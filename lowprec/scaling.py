"""Delayed scaling: the scale of this step follows from the amax values of earlier steps.

A cast with a known scale needs one pass over its tensor instead of two (amax, then cast), which is why hardware recipes
do it. For each of a layer's three tensors (input, weight, grad_output) there is a history of amax values and a scale:

    at the start of a pass    amax = max(history) or history[0]; scale = 2^margin * amax / format.max
                              (amax of 0, Inf or NaN: the scale stays as it is);  history rolls by one, slot 0 is zeroed
    during the pass           the tensor is cast with that scale, its own amax goes into slot 0

With ``interval`` n the scale is found anew in every nth pass only. ``pow2`` is MS-AMP's rule: the exponent is
floor(log2(format.max / amax)) - margin.

The state is three plain tensors, kept by the module as buffers that are not part of its state_dict
(`lowprec.state_dict` saves them). A pass that only repeats another, as activation checkpointing does within the
backward pass, uses the scale that is there and advances nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowprec.recipe import Delayed

__all__ = ["BUFFERS", "INPUT", "OUTPUT_GRADIENT", "WEIGHT", "History", "create", "of_module", "repeating"]

INPUT, WEIGHT, OUTPUT_GRADIENT = 0, 1, 2
BUFFERS = ("_lowprec_scale", "_lowprec_amax", "_lowprec_passes")
_SMALLEST = 1.0 / torch.finfo(torch.float32).max


class History(NamedTuple):
    """The delayed scaling state of one module.

    Args:
        scale: the scales in use, fp32 [3].
        amax: past amax values, fp32 [3, history].
        passes: how many passes each tensor has seen, int64 [3].
    """

    scale: Tensor
    amax: Tensor
    passes: Tensor

    def advance(self, index: int, largest: float, rule: Delayed) -> None:
        """Start a pass: the scale for it, and a free slot for its amax."""
        history = self.amax[index]
        seen = history.max() if rule.algo == "max" else history[0]
        if rule.pow2:
            exponent = torch.frexp(largest / seen.double())[1] - 1 - rule.margin
            new = torch.ldexp(torch.ones((), dtype=torch.float64, device=seen.device), -exponent).float()
        else:
            new = (seen * 2.0**rule.margin / largest).clamp_min(_SMALLEST)
        usable = torch.isfinite(seen) & (seen > 0) & (self.passes[index] % rule.interval == 0)
        self.scale[index] = torch.where(usable, new, self.scale[index])
        history.copy_(torch.roll(history, -1))
        history[0] = 0.0
        self.passes[index] += 1

    def record(self, index: int, counters: Tensor) -> None:
        """Note the amax of this pass (from a cast's counters, as fp32 bits)."""
        self.amax[index, 0] = counters[3].to(torch.int32).view(torch.float32)


def create(module: nn.Module, rule: Delayed, device: torch.device) -> None:
    """Give a module its delayed scaling buffers: scales of 1 and no history."""
    tensors = (torch.ones(3), torch.zeros(3, rule.history), torch.zeros(3, dtype=torch.int64))
    for name, tensor in zip(BUFFERS, tensors):
        module.register_buffer(name, tensor.to(device), persistent=False)


def of_module(module: nn.Module) -> History | None:
    """The delayed scaling state of a module, or None."""
    if BUFFERS[0] not in module._buffers:
        return None
    return History(*(module._buffers[name] for name in BUFFERS))  # type: ignore[arg-type]


def repeating() -> bool:
    """Whether this forward pass repeats an earlier one (activation checkpointing, within a backward pass)."""
    return bool(torch._C._current_graph_task_id() != -1)
