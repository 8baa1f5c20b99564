"""Scaled casts written again from the published rules: a loop over groups, fractions for powers of two, numpy for fp32.

Elements go through `exact_rounding`, which knows nothing of lowprec's casts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from exact_rounding import expected

import lowprec as lp
from lowprec.formats import Format

F32 = np.float32
FLT_MAX = np.finfo(F32).max
SMALLEST_SCALE = F32(np.uint32(0x00200001).view(F32))


class Result(NamedTuple):
    codes: np.ndarray  # int64, in the layout of x
    values: np.ndarray  # float64: code * scale as float32 has it
    scales: dict[tuple[int, int], float]  # by group
    flushed: int
    saturated: int


def groups(shape: tuple[int, int], cast: lp.Cast) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    rows, columns = shape
    sizes = {"tensor": (rows, columns), "none": (rows, columns), "row": (1, columns), "column": (rows, 1)}
    down, across = cast.block if cast.block else sizes[cast.scale]
    for i in range(0, rows, max(1, down)):
        for j in range(0, columns, max(1, across)):
            yield (i // max(1, down), j // max(1, across)), (slice(i, i + down), slice(j, j + across))


def floor_log2(x: Fraction) -> int:
    """The exponent e with 2^e <= x < 2^(e+1), from integers."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def exponent_of(amax: Fraction, fmt: Format, rule: str) -> int:
    """The scale's exponent under a rule of the MX specification or its extensions."""
    top = floor_log2(Fraction(fmt.max))
    e = floor_log2(amax)
    if rule == "floor":
        k = e - top
    elif rule == "ceil":
        k = e + (amax != Fraction(2) ** e) - top
    elif rule == "even":
        digits = fmt.mantissa_bits if fmt.kind == "float" else fmt.bits - 2
        step = Fraction(2) ** (e - digits)
        k = floor_log2(round(amax / step) * step) - top  # round() of a Fraction ties to even
    else:
        k = next(k for k in range(e - top - 1, e - top + 3) if Fraction(2) ** k * Fraction(fmt.max) >= amax)
    return min(max(k, -127), 127)


def one_level_scale(amax: float, cast: lp.Cast, fmt: Format) -> float:
    if amax == 0:
        return 1.0
    if not math.isfinite(amax):
        return math.nan
    if cast.scale_format == "e8m0" or cast.rule != "amax":
        rule = "rceil" if cast.rule in ("amax", "pow2") else cast.rule
        return math.ldexp(1.0, exponent_of(Fraction(amax), fmt, rule))
    return float(max(F32(amax) / F32(fmt.max), SMALLEST_SCALE))


def _codes(y: np.ndarray, cast: lp.Cast, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Codes and where finite y went past the largest value (found by rounding without saturation)."""
    codes, _ = expected(y, fmt, cast.rounding, cast.overflow)
    loose, nan = expected(y, fmt, "nearest", "ieee")
    over = nan | (loose == fmt.inf_code) | (loose == (fmt.inf_code or 0) + 2 ** (fmt.bits - 1)) & fmt.has_infinity
    return codes, over & np.isfinite(y)


def quantize(x: np.ndarray, cast: lp.Cast) -> Result:
    """The whole cast of a float32 matrix, contraction axis last."""
    with np.errstate(all="ignore"):
        return _two_level(x, cast) if cast.scale_format == "e4m3" else _one_level(x, cast)


def _one_level(x: np.ndarray, cast: lp.Cast) -> Result:
    fmt = lp.format(cast.format)
    codes, values, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape), {}
    flushed = saturated = 0
    for key, where in groups(x.shape, cast):
        part = x[where]
        amax = float(np.abs(part).max())
        scale = one_level_scale(amax, cast, fmt)
        scales[key] = scale
        power = cast.scale_format == "e8m0" or cast.rule != "amax"
        y = part.astype(np.float64) / scale if power else (part / F32(scale)).astype(np.float64)
        got, over = _codes(y, cast, fmt)
        decoded = np.array([fmt.value(int(c)) for c in got.reshape(-1)]).reshape(got.shape)
        codes[where] = got
        value = decoded * scale if power else (decoded.astype(F32) * F32(scale)).astype(np.float64)
        values[where] = np.full_like(value, math.nan) if math.isnan(scale) else value
        if not math.isnan(scale):
            flushed += int(((part != 0) & (decoded == 0)).sum())
            saturated += int(over.sum())
    return Result(codes, values, scales, flushed, saturated)


def _two_level(x: np.ndarray, cast: lp.Cast) -> Result:
    """NVFP4 as numerics states it, every operation in float32."""
    fmt, e4m3 = lp.format(cast.format), lp.format("e4m3")
    amax_t = np.abs(x).max() if x.size else F32(0)
    s_enc = min(F32(448 * fmt.max) / amax_t, FLT_MAX) if amax_t > 0 else F32(1)
    if not np.isfinite(amax_t):
        s_enc = F32(math.nan)
    codes, values, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape), {}
    flushed = saturated = 0
    for key, where in groups(x.shape, cast):
        part = x[where]
        wanted = np.abs(part).max() * F32(s_enc / F32(fmt.max))
        wanted = max(wanted, F32(cast.min_block_scale)) if cast.min_block_scale else wanted
        code, _ = expected(np.array([wanted], np.float64), e4m3, "nearest", "saturate")
        s_b = F32(e4m3.value(int(code[0])))
        scales[key] = float(s_b)
        enc_b = np.minimum(s_enc / s_b, FLT_MAX)
        y = np.clip(part * enc_b, -FLT_MAX, FLT_MAX).astype(np.float64)
        if np.isnan(s_enc):
            y = np.full(part.shape, math.nan)
        got, over = _codes(y, cast, fmt)
        decoded = np.array([fmt.value(int(c)) for c in got.reshape(-1)], F32).reshape(got.shape)
        codes[where] = got
        values[where] = decoded * s_b * (F32(1) / s_enc)
        if not np.isnan(s_enc):
            read = decoded * s_b
            flushed += int(((part != 0) & (read == 0)).sum())
            saturated += int((over & (read != 0)).sum())
    return Result(codes, values, scales, flushed, saturated)
