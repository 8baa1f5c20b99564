"""Rounding by search in the table of values, which is exact arithmetic.

A format's non-negative values are a sorted list whose index is the code. For x between two neighbours of such a list
the differences to both are exact in float64 (Sterbenz: the neighbours are within a factor of two, or the lower one is
zero or one step), so a comparison of the two distances is exact rational arithmetic, vectorised.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from lowprec.formats import Format

ROUNDINGS = ("nearest", "nearest-away", "toward-zero", "up", "down")
OVERFLOWS = ("saturate", "keep-inf", "ieee")


@functools.lru_cache(maxsize=64)
def table(fmt: Format) -> np.ndarray:
    """Non-negative finite values by code, then the one that would follow the largest."""
    values = [fmt.value(code) for code in range(fmt.max_code + 1)]
    last = 2 * values[-1] if fmt.kind == "scale" else values[-1] + _ulp(fmt)
    return np.array([*values, last])


def _ulp(fmt: Format) -> float:
    return fmt.step if fmt.kind == "int" else math.ldexp(1.0, fmt.max_exponent - fmt.mantissa_bits)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as in Salmon et al., Parallel random numbers: as easy as 1, 2, 3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0], c[1], c[2], c[3]


def random_bits(index: int, seed: int, step: int, tensor: int, bits: int) -> int:
    """The random bits of one element, from the definition."""
    per_block = 8 if bits <= 16 else 4
    block, place = divmod(index, per_block)
    words = philox((block % 2**32, block >> 32, step, tensor), (seed % 2**32, seed >> 32))
    if per_block == 8:
        half = words[place // 2] >> 16 if place % 2 else words[place // 2] % 2**16
        return half >> (16 - bits)
    return words[place] >> (32 - bits)


class Place(NamedTuple):
    """Where values stand in a format's table: the code below, the distances to both neighbours, and what is beyond."""

    low: np.ndarray
    below: np.ndarray
    above: np.ndarray
    beyond: np.ndarray
    outside: np.ndarray


def locate(x: np.ndarray, fmt: Format) -> Place:
    """Search the table (once, where the same values are rounded in several ways)."""
    grid = table(fmt)
    a = np.where(np.isnan(x), 0.0, np.abs(x))
    beyond = a >= grid[-1]
    a = np.where(beyond, grid[-1], a)
    low = np.clip(np.searchsorted(grid, a, side="right") - 1, 0, len(grid) - 2)
    return Place(low, a - grid[low], grid[low + 1] - a, beyond, a < grid[0])


def expected(
    x: np.ndarray,
    fmt: Format,
    rounding: str,
    overflow: str,
    random: np.ndarray | None = None,
    bits: int = 32,
    place: Place | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of float64 values and where the result is NaN (the code there is the format's NaN, or 0)."""
    nan = np.isnan(x)
    if fmt.kind == "binary":
        return np.where(nan, 0, x < 0).astype(np.int64), nan
    place = locate(x, fmt) if place is None else place
    magnitude, over = _magnitude(x, place, fmt, rounding, random, bits)
    negative = np.signbit(x) & ~nan
    infinite = np.isinf(x)
    stops = {"toward-zero": True, "up": negative, "down": ~negative}.get(rounding, False) & ~infinite
    clipped = {"saturate": over, "keep-inf": over & ~infinite, "ieee": over & stops}[overflow]
    gone = over & ~clipped
    if fmt.has_infinity:
        magnitude = np.where(gone, fmt.inf_code, magnitude)
    else:
        nan = nan | gone
    magnitude = np.where(clipped, fmt.max_code, magnitude)
    if fmt.kind == "scale":
        codes, nan = magnitude, nan | (x < 0)
    elif fmt.kind == "int":
        codes = np.where(negative, -magnitude, magnitude) % 2**fmt.bits
    else:
        sign = negative & (fmt.has_negative_zero | (magnitude > 0))
        codes = magnitude + sign * 2 ** (fmt.bits - 1)
    return np.where(nan, fmt.nan_code or 0, codes), nan


def _magnitude(
    x: np.ndarray, place: Place, fmt: Format, rounding: str, random: np.ndarray | None, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Code without sign, and where the rounded value is past the largest (infinities too)."""
    grid = table(fmt)
    low, below, above, beyond, outside = place  # outside: under the smallest value of a format without zero
    inexact = (below != 0) & ~outside
    if rounding == "nearest":
        up = (below > above) | ((below == above) & (low % 2 == 1))
    elif rounding == "nearest-away":
        up = below >= above
    elif rounding == "stochastic":
        fraction = below / (grid[low + 1] - grid[low])
        up = random < np.floor(fraction * 2.0**bits + 0.5)
    elif rounding == "toward-zero":
        up = np.zeros_like(inexact)
    else:
        up = inexact & (np.signbit(x) == (rounding == "down"))
    code = np.where(outside, 0, low + (up & ~outside))
    code = np.where(beyond, len(grid) - 1, code)
    return code, code > fmt.max_code
