"""Tensor-core sums in the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec.kernels import native_core
from lowprec.recipe import Accumulator

__all__ = ["matmul"]


def matmul(a: Tensor, b: Tensor, model: Accumulator, least_a: int, least_b: int) -> Tensor:
    """See `lowprec.kernels.accumulate.matmul`."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32)
    native_core().accumulate_matmul(
        a.data_ptr(),
        b.data_ptr(),
        out.data_ptr(),
        a.shape[0],
        b.shape[0],
        a.shape[1],
        least_a,
        least_b,
        model.k_step,
        model.fraction_bits,
        model.output_mantissa,
        model.promote_every,
        torch.get_num_threads(),
    )
    return out
