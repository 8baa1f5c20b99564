"""Scaled casts of a matrix in pure torch: amax -> scale -> codes, and back. This file defines every bit of them.

``value = code * scale``. The groups that share a scale are the whole matrix, rows, columns or blocks; a `Plan` (from
`lowprec.kernels.scale`) says which, and `axis` says which axis of the matrix the plan's last one is.

* rule ``amax``: ``scale = fp32(amax / max)`` and ``y = x / scale``, two true divisions in fp32 (float64 input: y in
  float64). The scale is never below `MIN_SCALE`, the smallest fp32 with a finite reciprocal.
* the power-of-two rules take the exponent from the bits of amax; dividing by such a scale is exact (no intermediate
  rounding at all), so the cast is the only rounding:
  ``floor`` e(amax) - e(max) · ``ceil`` one more unless amax is a power of two · ``even`` floor of amax rounded to the
  element's mantissa · ``rceil`` = ``pow2`` the smallest power of two that keeps amax / scale <= max
* two-level (scale_format ``e4m3``, NVFP4): ``S = min(448 max / amax_t, FLT_MAX)``, block scale
  ``s_b = e4m3(amax_b * (S / max))``, ``y = x * min(S / s_b, FLT_MAX)``, tensor scale ``1 / S``, all in fp32.
* asymmetric integers: ``scale = (hi - lo) / (2^n - 1)`` with lo <= 0 <= hi, zero point
  ``-2^(n-1) - round(lo / scale)``.
* rule ``mean`` (int1): the mean of |x|, summed as integers of fixed point, so that no order of addition shows.
* amax 0 gives scale 1 and codes 0 (int1, which has no zero, gets scale 0). NaN or Inf in a group make its scale NaN,
  so that the group reads as NaN. With a scale that was given, the element itself becomes NaN where the format has one,
  else its group's scale does.

The counters are (values that are not zero and read as zero, finite values past the largest one, NaN and Inf, bits of
amax as fp32).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowprec.formats import Format, format
from lowprec.kernels.reference import cast as casts
from lowprec.kernels.reference.rounding import Rng, Rounded, as_codes, draw_for, from_codes, round_parts, take_apart

if TYPE_CHECKING:
    from lowprec.kernels.scale import Plan

__all__ = ["MIN_SCALE", "carrier", "carrier_both", "carrier_from_codes", "dequantize", "quantize", "quantize_t"]

MIN_SCALE = 2.0**-128 + 2.0**-149
FLT_MAX = 2.0**128 - 2.0**104
_INT16 = Format("int16", "int", 16)


class QuantizedParts(NamedTuple):
    """Codes and what turns them back into values; the fields a cast does not use are None."""

    codes: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    zero_point: Tensor | None = None
    counters: Tensor | None = None


class Carrier(NamedTuple):
    """Quantised values in a dtype a GEMM eats, and the factor its output still needs (None where none)."""

    values: Tensor
    scale: Tensor | None = None
    counters: Tensor | None = None


class _Cast(NamedTuple):
    """A scaled cast on its way: the rounding's result and the parts of the scale."""

    rounded: Rounded
    scale: Tensor | None
    tensor_scale: Tensor | None
    zero_point: Tensor | None


def group_of(plan: Plan, shape: torch.Size, axis: int) -> tuple[int, int]:
    """Rows and columns of x that share a scale."""
    rows, columns = shape
    if plan.scale == "tensor":
        return rows, columns
    if plan.scale == "block":
        assert plan.block is not None
        return plan.block if axis == -1 else (plan.block[1], plan.block[0])
    return (1, columns) if (plan.scale == "row") == (axis == -1) else (rows, 1)


def scale_shape(plan: Plan, shape: torch.Size, axis: int) -> tuple[int, ...]:
    """The shape of a scale; it broadcasts against x once blocks are spread out."""
    if plan.scale == "tensor":
        return ()
    group = group_of(plan, shape, axis)
    if plan.scale == "block":
        return -(-shape[0] // group[0]), -(-shape[1] // group[1])
    return (shape[0], 1) if group[0] == 1 and (plan.scale == "row") == (axis == -1) else (1, shape[1])


def spread(scale: Tensor, plan: Plan, shape: torch.Size, axis: int) -> Tensor:
    """Repeat block scales so that they broadcast against x."""
    if plan.scale != "block" or scale.dim() < 2:
        return scale
    down, across = group_of(plan, shape, axis)
    return scale.repeat_interleave(down, 0)[: shape[0]].repeat_interleave(across, 1)[:, : shape[1]]


def _group_max(x: Tensor, plan: Plan, axis: int) -> Tensor:
    """amax of every group in x's dtype, NaN kept, shaped as the scale."""
    down, across = group_of(plan, x.shape, axis)
    shape = scale_shape(plan, x.shape, axis)
    if x.numel() == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    return casts.group_amax(x, (down, across)).reshape(shape)


# -- scales -----------------------------------------------------------------------------------------------------------


def power_of_two_exponent(amax: Tensor, fmt: Format, rule: str) -> Tensor:
    """The exponent of the scale for amax values (float64, positive and finite), clamped to those of e8m0."""
    bits = amax.to(torch.float64).view(torch.int64)
    exponent, mantissa = (bits >> 52) - 1023, bits & ((1 << 52) - 1)
    top, top_mantissa = fmt.max_exponent, int((math.frexp(fmt.max)[0] * 2 - 1) * 2**52)
    if rule == "floor":
        up = torch.zeros_like(exponent)
    elif rule == "ceil":
        up = (mantissa > 0).to(torch.int64)
    elif rule == "even":
        kept = fmt.mantissa_bits if fmt.kind == "float" else fmt.bits - 2
        up = (mantissa >= (1 << 52) - (1 << (51 - kept))).to(torch.int64)
    else:
        up = (mantissa > top_mantissa).to(torch.int64)
    return (exponent - top + up).clamp(-127, 127)


def _exp2(exponent: Tensor) -> Tensor:
    """2^k as fp32 for k in [-127, 127], by its bits."""
    bits = torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _mean(x: Tensor, amax: Tensor, plan: Plan, axis: int) -> Tensor:
    """Mean of |x| in every group (float64): each |x| as an integer of amax / 2^digits, so the sum is exact."""
    down, across = group_of(plan, x.shape, axis)
    digits = 60 - max(1, down * across).bit_length()
    usable = amax.isfinite() & (amax > 0)
    power = torch.where(usable, ((amax.view(torch.int64) >> 52) - 1022), 0)
    unit = torch.where(usable, power - digits, 0)
    wide = x.to(torch.float64).abs()
    wide = torch.where(wide.isfinite(), wide, 0.0)
    near = (-spread(unit, plan, x.shape, axis)).clamp(-1022, 1023)
    rest = -spread(unit, plan, x.shape, axis) - near
    terms = (wide * casts.power_of_two(near) * casts.power_of_two(rest)).to(torch.int64)
    shape = scale_shape(plan, x.shape, axis)
    if x.numel() == 0:
        return amax
    padding = (0, -x.shape[1] % across, 0, -x.shape[0] % down)
    tiles = torch.nn.functional.pad(terms, padding).reshape(
        -(-x.shape[0] // down), down, -(-x.shape[1] // across), across
    )
    count = torch.nn.functional.pad(torch.ones_like(terms), padding).reshape(tiles.shape).sum(dim=(1, 3)).reshape(shape)
    mean = tiles.sum(dim=(1, 3)).reshape(shape).to(torch.float64) / count
    mean = mean * casts.power_of_two(unit.clamp(min=-1022)) * casts.power_of_two(unit - unit.clamp(min=-1022))
    return torch.where(usable, mean, amax)


def scale_of(amax: Tensor, plan: Plan) -> Tensor:
    """fp32 scales from amax values (float64): 0 gives 1, NaN and Inf give NaN."""
    usable = amax.isfinite() & (amax > 0)
    safe = torch.where(usable, amax, 1.0)
    if plan.power_of_two:
        scale = _exp2(power_of_two_exponent(safe, plan.fmt, plan.rule))
    else:
        scale = (safe / plan.fmt.max).clamp(MIN_SCALE, FLT_MAX).to(torch.float32)
    of_zeros = 1.0
    if plan.fmt.kind == "binary":
        of_zeros = 2.0**-127 if plan.power_of_two else 0.0
    scale = torch.where(amax == 0, of_zeros, scale)
    return torch.where(amax.isfinite(), scale, math.nan)


def _two_level(amax: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4: block scale codes, the factor of x, and the tensor scale."""
    amax = amax.to(torch.float32)
    top = amax.max() if amax.numel() else torch.zeros((), device=amax.device)
    top = torch.where(top.isfinite(), top, math.nan)
    whole = torch.where(top == 0, 1.0, (torch.full_like(top, 448.0 * plan.fmt.max) / top).clamp(max=FLT_MAX))
    wanted = amax * (whole / plan.fmt.max)
    if plan.min_block_scale:
        wanted = torch.where(wanted < plan.min_block_scale, plan.min_block_scale, wanted)
    wanted = torch.where(whole.isnan(), math.nan, wanted)
    e4m3 = format("e4m3")
    codes = as_codes(round_parts(take_apart(wanted), e4m3, "nearest", "saturate").codes, e4m3)
    factor = (whole / casts.decode(codes, e4m3)).clamp(max=FLT_MAX)
    return codes, factor, 1.0 / whole


def stored(scale: Tensor, plan: Plan) -> Tensor:
    """A scale in its storage format: fp32, or e8m0 codes."""
    if plan.scale_format != "e8m0":
        return scale
    e8m0 = format("e8m0")
    return as_codes(round_parts(take_apart(scale), e8m0, "nearest", "saturate").codes, e8m0)


def scale_values(scale: Tensor, plan: Plan) -> Tensor:
    """A stored scale as fp32."""
    return casts.decode(scale, format(plan.scale_format)) if plan.scale_format != "fp32" else scale


# -- the cast ---------------------------------------------------------------------------------------------------------


def _divide(x: Tensor, scale: Tensor, plan: Plan) -> Tensor:
    """x / scale: exact for powers of two, else rounded to fp32 (float64 for float64); of a sign bit, x itself."""
    if plan.fmt.kind == "binary":
        return torch.where(scale.isnan(), math.nan, x)
    if plan.power_of_two or x.dtype == torch.float64:
        y = x.to(torch.float64) / scale.to(torch.float64)
    else:
        y = x.to(torch.float32) / scale
    largest = torch.finfo(y.dtype).max
    return torch.where(y.isinf() & x.isfinite(), y.sign() * largest, y)


def _round(y: Tensor, x: Tensor, plan: Plan, rng: Rng | None) -> Rounded:
    """The cast of scaled values; an infinity in x is not allowed to vanish by saturating."""
    parts = take_apart(y)
    if plan.overflow == "saturate":
        parts = parts._replace(nan=parts.nan | x.isinf(), infinite=parts.infinite & ~x.isinf())
    return round_parts(parts, plan.fmt, plan.rounding, plan.overflow, draw_for(x, plan.fmt, plan.rounding, rng))


def _cast(x: Tensor, plan: Plan, axis: int, scale: Tensor | None, rng: Rng | None) -> _Cast:
    if plan.scale == "none":
        return _Cast(_round(x, x, plan, rng), None, None, None)
    if not plan.symmetric:
        return _asymmetric(x, plan, axis, rng)
    if plan.scale_format == "e4m3":
        codes, factor, tensor_scale = _two_level(_group_max(x, plan, axis).to(torch.float64), plan)
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        largest = torch.finfo(wide.dtype).max
        y = (wide * spread(factor, plan, x.shape, axis).to(wide.dtype)).clamp(-largest, largest)
        y = torch.where(tensor_scale.isnan(), math.nan, y)
        return _Cast(_round(y, x, plan, rng), codes, tensor_scale, None)
    given = scale is not None
    if scale is None:
        top = _group_max(x, plan, axis).to(torch.float64)
        scale = scale_of(_mean(x, top, plan, axis) if plan.rule == "mean" else top, plan)
    else:
        scale = scale_values(scale, plan) if scale.dtype == torch.uint8 else scale
    y = _divide(x, spread(scale, plan, x.shape, axis), plan)
    rounded = _round(y, x, plan, rng)
    return _Cast(rounded, scale if given else stored(scale, plan), None, None)


def _asymmetric(x: Tensor, plan: Plan, axis: int, rng: Rng | None) -> _Cast:
    """Integers over their whole range, with a zero point."""
    wide, bottom, span = x.to(torch.float64), -(1 << (plan.fmt.bits - 1)), (1 << plan.fmt.bits) - 1
    high, low = _group_max(wide.clamp(min=0), plan, axis), -_group_max(wide.clamp(max=0), plan, axis)
    width = high - low
    scale = (width / span).clamp(MIN_SCALE, FLT_MAX).to(torch.float32)
    scale = torch.where(width == 0, 1.0, scale)
    scale = torch.where(width.isfinite(), scale, math.nan)
    zero = (bottom - (low.to(torch.float32) / scale).round()).clamp(bottom, bottom + span)
    zero = torch.where((width == 0) | ~width.isfinite(), 0.0, zero).to(torch.int32)
    y = _divide(x, spread(scale, plan, x.shape, axis), plan)
    draw = draw_for(x, plan.fmt, plan.rounding, rng)
    rounded = round_parts(take_apart(y), _INT16, plan.rounding, "saturate", draw)
    signed = torch.where(rounded.codes >= 1 << 15, rounded.codes - (1 << 16), rounded.codes)
    shifted = signed + spread(zero, plan, x.shape, axis)
    codes = shifted.clamp(bottom, bottom + span)
    overflow = (codes != shifted) & ~rounded.nan
    codes = torch.where(rounded.nan, 0, codes) & span
    return _Cast(Rounded(codes, rounded.nan, overflow), scale, None, zero)


def _group_nan(scale: Tensor | None, nan: Tensor, plan: Plan, axis: int) -> Tensor | None:
    """Make the scale of a group with a NaN result NaN, for formats whose codes cannot say it."""
    if plan.scale_format == "e4m3" or not plan.symmetric:
        return scale  # NaN already
    if scale is None:
        return torch.where(nan.any(), math.nan, torch.ones((), device=nan.device))
    mark = _group_max(nan.to(torch.float32), plan, axis) > 0
    if scale.dtype == torch.uint8:
        return torch.where(mark, 255, scale).to(torch.uint8)
    return torch.where(mark, math.nan, scale.expand(mark.shape))


def _factor(cast: _Cast, plan: Plan, shape: torch.Size, axis: int) -> Tensor | None:
    """The fp32 block or group factor of every element, without the tensor scale."""
    if cast.scale is None:
        return None
    scale = scale_values(cast.scale, plan) if cast.scale.dtype == torch.uint8 else cast.scale
    return spread(scale, plan, shape, axis)


def _counters(x: Tensor, cast: _Cast, plan: Plan, axis: int) -> Tensor:
    value = _signed_codes(as_codes(cast.rounded.codes, plan.fmt), plan, cast.zero_point, x.shape, axis, torch.float64)
    factor = _factor(cast, plan, x.shape, axis)
    if factor is not None:
        value = value * factor.to(torch.float64)
    finite = x.isfinite()
    flushed = (finite & (x != 0) & (value == 0) & ~cast.rounded.nan).sum()
    saturated = (finite & cast.rounded.overflow & (value != 0)).sum()
    bits = casts.amax(x).view(torch.int32).to(torch.int64)
    return torch.stack([flushed, saturated, (~finite).sum(), bits])


def _turned(x: Tensor, plan: Plan, axis: int) -> Tensor:
    """x, transformed along the contraction axis where the plan says so."""
    x = x.detach()
    if not plan.hadamard:
        return x
    signs = torch.tensor(plan.signs, dtype=torch.float32, device=x.device)
    return casts.hadamard16(x, signs) if axis == -1 else casts.hadamard16(x.t(), signs).t().contiguous()


def quantize(
    x: Tensor,
    plan: Plan,
    axis: int = -1,
    scale: Tensor | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> QuantizedParts:
    """See `lowprec.kernels.scale.quantize`."""
    x = _turned(x, plan, axis)
    cast = _cast(x, plan, axis, scale, rng)
    kept = cast.scale if plan.fmt.has_nan else _group_nan(cast.scale, cast.rounded.nan, plan, axis)
    count = _counters(x, cast, plan, axis) if counters else None
    return QuantizedParts(as_codes(cast.rounded.codes, plan.fmt), kept, cast.tensor_scale, cast.zero_point, count)


def quantize_t(
    x: Tensor,
    plan: Plan,
    axis: int = -1,
    scale: Tensor | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> QuantizedParts:
    """See `lowprec.kernels.scale.quantize_t`."""
    parts = quantize(x, plan, axis, scale, rng, counters)
    return parts._replace(
        codes=parts.codes.t().contiguous(),
        scale=None if parts.scale is None else parts.scale.t().contiguous(),
        zero_point=None if parts.zero_point is None else parts.zero_point.t().contiguous(),
    )


# -- and back ---------------------------------------------------------------------------------------------------------


def _signed_codes(
    codes: Tensor, plan: Plan, zero_point: Tensor | None, shape: torch.Size, axis: int, dtype: torch.dtype
) -> Tensor:
    """Values of codes before scaling, the zero point taken off."""
    if zero_point is None:
        return casts.decode(codes, plan.fmt, dtype)
    wide = from_codes(codes)
    signed = wide - ((wide >> (plan.fmt.bits - 1)) << plan.fmt.bits)
    return (signed - spread(zero_point, plan, shape, axis)).to(dtype)


def _finish(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To a dtype with one rounding, every NaN the canonical one."""
    if values.dtype != dtype:
        return casts.to_dtype(values.to(torch.float64), dtype)
    return torch.where(values.isnan(), math.nan, values)


def dequantize(parts: QuantizedParts, plan: Plan, axis: int, dtype: torch.dtype) -> Tensor:
    """See `lowprec.kernels.scale.dequantize`."""
    codes, scale, tensor_scale, zero_point, _ = parts
    shape = codes.shape
    exact = dtype == torch.float64 or plan.power_of_two or plan.scale == "none"
    work = torch.float64 if exact else torch.float32
    values = _signed_codes(codes, plan, zero_point, shape, axis, work)
    if scale is not None:
        fp32 = scale_values(scale, plan) if scale.dtype == torch.uint8 else scale
        values = values * spread(fp32, plan, shape, axis).to(work)
    if tensor_scale is not None:
        values = values * tensor_scale.to(work)
    return _finish(values, dtype)


def carrier_from_codes(parts: QuantizedParts, plan: Plan, axis: int, dtype: torch.dtype) -> Carrier:
    """See `lowprec.kernels.scale.carrier_from_codes`."""
    if plan.folds_into_values:
        folded = dequantize(parts._replace(tensor_scale=None), plan, axis, dtype)
        return Carrier(folded, parts.tensor_scale, parts.counters)
    values = _signed_codes(parts.codes, plan, parts.zero_point, parts.codes.shape, axis, torch.float64)
    return Carrier(_finish(values, dtype), parts.scale, parts.counters)


def carrier(
    x: Tensor,
    plan: Plan,
    axis: int = -1,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rng: Rng | None = None,
    counters: bool = False,
) -> Carrier:
    """See `lowprec.kernels.scale.carrier`."""
    x = _turned(x, plan, axis)
    cast = _cast(x, plan, axis, scale, rng)
    count = _counters(x, cast, plan, axis) if counters else None
    codes = as_codes(cast.rounded.codes, plan.fmt)
    parts = QuantizedParts(codes, cast.scale, cast.tensor_scale, cast.zero_point, count)
    made = carrier_from_codes(parts, plan, axis, dtype)
    return made._replace(values=torch.where(cast.rounded.nan, math.nan, made.values))


def carrier_both(
    x: Tensor,
    plan_a: Plan,
    plan_b: Plan,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rng: Rng | None = None,
    counters: bool = False,
) -> tuple[Carrier, Carrier]:
    """See `lowprec.kernels.scale.carrier_both`."""
    return (
        carrier(x, plan_a, -1, scale_a, dtype, rng, counters),
        carrier(x, plan_b, -2, scale_b, dtype, rng, counters),
    )
