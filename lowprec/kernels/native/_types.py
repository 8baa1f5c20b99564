"""What the fused topics share on the way into the core: dtype numbers and contiguity."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TYPES", "address"]

TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address(x: Tensor | None) -> int:
    """Where a tensor's data is; 0 for none."""
    return 0 if x is None else x.data_ptr()
