"""Decisions that every rank must take alike.

When one rank finds an Inf and skips while the others step, their weights part and never meet again. So whatever decides
about a step is summed over the ranks first: one small all-reduce, only where torch.distributed is initialised.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Ranks"]


class Ranks:
    """The processes that train one model together.

    Args:
        group: their process group, or None for all processes.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @property
    def size(self) -> int:
        """How many there are; 1 where torch.distributed is not in use."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 1
        return torch.distributed.get_world_size(self.group)

    def total(self, values: list[float], device: torch.device) -> list[float]:
        """Each value summed over the ranks."""
        if self.size == 1:
            return values
        vector = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(vector, group=self.group)
        summed: list[float] = vector.tolist()
        return summed

    def mean_(self, tensors: list[torch.Tensor]) -> None:
        """Each tensor averaged over the ranks, in place."""
        if self.size == 1:
            return
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, group=self.group)
            tensor.div_(self.size)
