"""Layer and RMS normalisation of a matrix's rows, forward and backward, and sums over its rows: fp32 inside.

    y = (x - mean) * rstd * weight + bias            rstd = 1 / sqrt(var + eps); RMS: mean = 0, no bias
    grad_x = (v - mean(v) - hat * mean(v * hat)) * rstd     v = grad_y * weight, hat = (x - mean) * rstd
    grad_weight = sum over rows of grad_y * hat             grad_bias = sum over rows of grad_y

Input, output and gradients are fp32, bf16 or fp16 and rounded once; weight and bias are fp32. Sums over rows are taken
in blocks of 64, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec import kernels
from lowprec.kernels.native import norm as native
from lowprec.kernels.reference import norm as reference

__all__ = ["backward", "column_sum", "forward"]


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise rows.

    Args:
        x: matrix in fp32, bf16 or fp16.
        weight: fp32, contiguous, one a column, or None.
        bias: likewise.
        eps: added to the variance.
        rms: divide by the root mean square and subtract nothing.
        dtype: of the result.

    Returns:
        The result, and mean and 1 / standard deviation of each row in fp32.

    >>> forward(torch.tensor([[1.0, 3.0]]), None, None, 0.0, False, torch.float32)[0]
    tensor([[-1.,  1.]])
    """
    return kernels.pick(x, native, reference).forward(x, weight, bias, eps, rms, dtype)  # type: ignore[no-any-return]


def backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, need: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (its dtype), weight and bias (fp32, or None where not needed)."""
    module = kernels.pick(x, native, reference)
    return module.backward(x, grad, weight, mean, rstd, rms, need)  # type: ignore[no-any-return]


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows of a matrix in fp32, the gradient of a bias.

    >>> column_sum(torch.ones(3, 2, dtype=torch.bfloat16))
    tensor([3., 3.])
    """
    return kernels.pick(x, native, reference).column_sum(x)  # type: ignore[no-any-return]
