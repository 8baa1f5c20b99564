"""The compiled scaled casts: allocates codes, values and scales, and passes addresses.

The meaning is that of `lowprec.kernels.reference.scale`, bit for bit, and what is rare is left to it: float64 input,
asymmetric integers, the rule "mean", formats that fp32 cannot hold, and a NaN where there is no code for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowprec.formats import Format, format
from lowprec.kernels import native_core
from lowprec.kernels.native.cast import (
    DTYPES,
    OVERFLOWS,
    ROUNDINGS,
    decode,
    descriptor,
    hadamard,
    rng_numbers,
    transpose,
)
from lowprec.kernels.reference import scale as reference
from lowprec.kernels.reference.rounding import Rng
from lowprec.kernels.reference.scale import Carrier, QuantizedParts, group_of, scale_shape, scale_values

if TYPE_CHECKING:
    from lowprec.kernels.scale import Plan

__all__ = ["carrier", "carrier_both", "carrier_from_codes", "dequantize", "quantize", "quantize_t"]

_core = native_core()

_UNSCALED, _DIVIDE, _POWER_OF_TWO, _TWO_LEVEL = range(4)
_RULES = {"floor": 0, "ceil": 1, "even": 2, "rceil": 3, "amax": 3, "pow2": 3}
_OUTPUTS = {torch.bfloat16: 1, torch.float32: 2}
_FLT_MAX = 2.0**128 - 2.0**104
_DONE = 0


@functools.lru_cache(maxsize=1024)
def _address(plan: Plan) -> int:
    """The native plan of a plan, 0 where the core leaves it to the reference."""
    fmt = plan.fmt
    if not plan.symmetric or plan.rule == "mean" or not _fits(fmt):
        return 0
    mode = _DIVIDE
    if plan.scale == "none":
        mode = _UNSCALED
    elif plan.scale_format == "e4m3":
        mode = _TWO_LEVEL
    elif plan.power_of_two:
        mode = _POWER_OF_TWO
    numbers = mode, _RULES[plan.rule], ROUNDINGS[plan.rounding], OVERFLOWS[plan.overflow], plan.scale_format != "fp32"
    address: int = _core.scale_plan(descriptor(fmt)[1], *numbers, plan.min_block_scale)
    return address


def _fits(fmt: Format) -> bool:
    """Whether a format's values are fp32 values."""
    if fmt.kind == "binary":
        return False  # no zero: its scales have rules of their own
    if fmt.kind == "scale":
        return True
    return fmt.max <= _FLT_MAX and fmt.min_subnormal >= 2.0**-149 and fmt.mantissa_bits <= 23


def _prepared(x: Tensor, plan: Plan, axis: int) -> Tensor:
    x = x.detach()
    if plan.hadamard:
        x = x if x.is_contiguous() else x.contiguous()
        return hadamard(x, torch.tensor(plan.signs, dtype=torch.float32), axis == -2)
    return x if x.is_contiguous() else x.contiguous()


class _Result:
    """What one native call wrote."""

    __slots__ = ("counters", "out", "scale", "tensor_scale")

    def __init__(self, out: Tensor, scale: Tensor | None, tensor_scale: Tensor | None, counters: Tensor | None) -> None:
        self.out, self.scale, self.tensor_scale, self.counters = out, scale, tensor_scale, counters


def _run(
    x: Tensor,
    plan: Plan,
    axis: int,
    scale: Tensor | None,
    out: Tensor,
    rng: Rng | None,
    counters: bool,
) -> _Result | None:
    """Cast into `out` (codes, or values in a carrier's dtype); None where the reference must do it."""
    rows, columns = x.shape
    mode_none = plan.scale == "none"
    group = (max(rows, 1), max(columns, 1)) if mode_none else group_of(plan, x.shape, axis)
    written = tensor_scale = given = None
    if scale is not None:
        given = scale_values(scale, plan) if scale.dtype == torch.uint8 else scale.contiguous()
    elif not mode_none:
        dtype = torch.float32 if plan.scale_format == "fp32" else torch.uint8
        written = torch.empty(scale_shape(plan, x.shape, axis), dtype=dtype)
        if plan.scale_format == "e4m3":
            tensor_scale = torch.empty((), dtype=torch.float32)
    count = torch.empty(4, dtype=torch.int64) if counters else None
    status = _core.scaled_cast(
        _address(plan),
        x.data_ptr(),
        DTYPES[x.dtype],
        rows,
        columns,
        group[0],
        group[1],
        0 if given is None else given.data_ptr(),
        0 if written is None else written.data_ptr(),
        0 if tensor_scale is None else tensor_scale.data_ptr(),
        _OUTPUTS.get(out.dtype, 0),
        plan.folds_into_values,
        out.data_ptr(),
        0 if count is None else count.data_ptr(),
        torch.get_num_threads(),
        *rng_numbers(x, plan.fmt, plan.rounding, rng),
    )
    return _Result(out, given if given is not None else written, tensor_scale, count) if status == _DONE else None


def quantize(
    x: Tensor,
    plan: Plan,
    axis: int = -1,
    scale: Tensor | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> QuantizedParts:
    """See `lowprec.kernels.scale.quantize`."""
    if x.dtype == torch.float64 or x.numel() == 0 or not _address(plan):
        return reference.quantize(x, plan, axis, scale, rng, counters)
    y = _prepared(x, plan, axis)
    done = _run(y, plan, axis, scale, torch.empty_like(y, dtype=descriptor(plan.fmt)[2]), rng, counters)
    if done is None:
        return reference.quantize(x, plan, axis, scale, rng, counters)
    if plan.scale == "none" and not plan.fmt.has_nan:
        done.scale = torch.ones(())
    return QuantizedParts(done.out, done.scale, done.tensor_scale, None, done.counters)


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
        codes=transpose(parts.codes),
        scale=None if parts.scale is None else parts.scale.t().contiguous(),
        zero_point=None if parts.zero_point is None else parts.zero_point.t().contiguous(),
    )


def _table_format(fmt: Format) -> bool:
    """Whether the core dequantises this format: 8 bits or fewer, exact under every power of two."""
    return fmt.bits <= 8 and fmt.kind in ("float", "int") and fmt.min_subnormal >= 2.0**-22 and fmt.max < 2.0**64


def dequantize(parts: QuantizedParts, plan: Plan, axis: int, dtype: torch.dtype) -> Tensor:
    """See `lowprec.kernels.scale.dequantize`."""
    codes, scale, tensor_scale, zero_point, _ = parts
    if scale is None or zero_point is not None or dtype == torch.float64 or codes.numel() == 0:
        return reference.dequantize(parts, plan, axis, dtype)
    if not _table_format(plan.fmt) or plan.scale == "none":
        return reference.dequantize(parts, plan, axis, dtype)
    codes, scale = codes.contiguous(), scale.contiguous()
    rows, columns = codes.shape
    group = group_of(plan, codes.shape, axis)
    values = torch.empty_like(codes, dtype=dtype)
    scale_format = descriptor(format(plan.scale_format))[1] if scale.dtype == torch.uint8 else 0
    _core.dequantise(
        descriptor(plan.fmt)[1],
        codes.data_ptr(),
        rows,
        columns,
        group[0],
        group[1],
        scale.data_ptr(),
        scale_format,
        0 if tensor_scale is None else tensor_scale.data_ptr(),
        values.data_ptr(),
        DTYPES[dtype],
        torch.get_num_threads(),
    )
    return values


def carrier_from_codes(parts: QuantizedParts, plan: Plan, axis: int, dtype: torch.dtype) -> Carrier:
    """See `lowprec.kernels.scale.carrier_from_codes`."""
    if plan.folds_into_values:
        folded = dequantize(parts._replace(tensor_scale=None), plan, axis, dtype)
        return Carrier(folded, parts.tensor_scale, parts.counters)
    if parts.zero_point is not None:
        return reference.carrier_from_codes(parts, plan, axis, dtype)
    return Carrier(decode(parts.codes, plan.fmt, dtype), parts.scale, parts.counters)


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
    if x.dtype == torch.float64 or dtype not in _OUTPUTS or x.numel() == 0 or not _address(plan):
        return reference.carrier(x, plan, axis, scale, dtype, rng, counters)
    y = _prepared(x, plan, axis)
    done = _run(y, plan, axis, scale, torch.empty_like(y, dtype=dtype), rng, counters)
    if done is None:
        return reference.carrier(x, plan, axis, scale, dtype, rng, counters)
    left = done.tensor_scale if plan.folds_into_values else done.scale
    return Carrier(done.out, left, done.counters)


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
    first = carrier(x, plan_a, -1, scale_a, dtype, rng, counters)
    if _same_either_way(plan_a, plan_b) and scale_a is scale_b:
        return first, first
    return first, carrier(x, plan_b, -2, scale_b, dtype, rng, counters)


def _same_either_way(a: Plan, b: Plan) -> bool:
    """Whether both casts of a matrix give the same values along both axes."""
    square = a.block is None or a.block[0] == a.block[1]
    return a is b and not a.hadamard and (a.scale in ("none", "tensor") or (a.scale == "block" and square))
