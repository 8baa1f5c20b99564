"""The linear layer of GPT-2 in transformers, which keeps its weight as (features in, features out).

Only imported where transformers is loaded already; without it there is nothing to handle.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowprec.handlers import handles
from lowprec.linear import LinearLike

__all__ = ["LowPrecConv1D"]

Conv1D: Any
try:
    from transformers.pytorch_utils import Conv1D
except ImportError:
    Conv1D = None

if Conv1D is not None:

    @handles(Conv1D)
    class LowPrecConv1D(LinearLike, Conv1D):
        """Transformers' `Conv1D` with the casts of its recipe."""

        def forward(self, x: Tensor) -> Tensor:
            return self.lowprec_linear(x, self.weight.t(), self.bias)
