"""Bit patterns worth casting."""

from __future__ import annotations

import numpy as np
import torch
from exact_rounding import table

from lowprec.formats import Format


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    """All 2^16 values of bfloat16 or float16."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def structured_fp32(mantissa_bits: int, random: int = 0, seed: int = 0) -> torch.Tensor:
    """Every sign and exponent with every pattern of the leading mantissa bits, and the rest 0, 1 or all ones.

    This holds every tie of formats with fewer than `mantissa_bits` bits, and both its neighbours.
    """
    low = 23 - mantissa_bits
    head = np.arange(2 ** (9 + mantissa_bits), dtype=np.uint32) << np.uint32(low)
    tails = np.array([0, 1, 2**low - 1], dtype=np.uint32)
    bits = (head[:, None] | tails[None, :]).reshape(-1)
    noise = np.random.default_rng(seed).integers(0, 2**32, random, dtype=np.uint32)
    return torch.from_numpy(np.concatenate([bits, noise]).view(np.float32))


def neighbourhoods_fp64(fmt: Format, seed: int = 0) -> torch.Tensor:
    """Every value of a format, every midpoint and the next float64 on both sides, with both signs, and random ones."""
    grid = table(fmt)
    if len(grid) > 4096:
        keep = np.random.default_rng(seed).integers(0, len(grid) - 1, 4096)
        grid = np.unique(np.concatenate([grid[:32], grid[-33:], grid[keep], grid[keep + 1]]))
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    near = np.concatenate(
        [points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf), points * (1 + 2.0**-40)]
    )
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal(2000) * np.exp2(rng.integers(-300, 300, 2000).astype(np.float64))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 1.7e308])
    return torch.from_numpy(np.concatenate([near, -near, spread, special]))
