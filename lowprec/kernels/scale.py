"""Scaled casts of a matrix: checks the cast, plans it once, picks a backend.

`lowprec.kernels.reference.scale` holds the equations. A `Cast` is written with the contraction axis last; ``axis=-2``
says that this matrix has it first, and turns rows and blocks around: quantising x along axis -2 is quantising its
transpose along axis -1, with the result transposed back. Stochastic rounding is indexed by the position in x, so the
random bits do not depend on the axis.

A cast's *carrier* is what a GEMM in bf16 (or fp32) eats to compute the exact product of quantised operands:
``carrier.values * carrier.scale == quantised value``. Power-of-two scales and NVFP4's block scales are folded into the
values; a scale of the matrix or of its rows multiplies the output. fp32 scales in blocks along K cannot be folded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from lowprec.casting import Cast
from lowprec.formats import Format, format
from lowprec.kernels import backend, native_topic
from lowprec.kernels.cast import Rng, check_float, code_dtype, hadamard_signs
from lowprec.kernels.reference import scale as reference
from lowprec.kernels.reference.scale import MIN_SCALE, Carrier, QuantizedParts

if TYPE_CHECKING:
    native = reference
else:
    native = native_topic("scale", reference)

__all__ = [
    "MIN_SCALE",
    "Carrier",
    "Plan",
    "QuantizedParts",
    "carrier",
    "carrier_both",
    "carrier_from_codes",
    "dequantize",
    "folds",
    "plan_of",
    "quantize",
    "quantize_t",
    "scale_shape",
]

_SIGNS = tuple(int(s) for s in hadamard_signs().tolist())


@dataclass(frozen=True, eq=False)
class Plan:
    """A checked cast with everything a backend needs to know; one object per cast, kept for the process's life."""

    fmt: Format
    scale: str
    block: tuple[int, int] | None
    scale_format: str
    rule: str
    rounding: str
    overflow: str
    symmetric: bool
    hadamard: bool
    min_block_scale: float
    signs: tuple[int, ...]
    power_of_two: bool
    folds_into_values: bool  # what is left is at most a tensor scale
    unfoldable: str  # why a GEMM cannot eat it, "" if it can


_PLANS: dict[Cast, Plan] = {}


def plan_of(cast: Cast) -> Plan:
    """Look up the plan of a cast; a cast has checked itself, but for what only matters where it is applied.

    Raises:
        ValueError: in one sentence, what is wrong with the cast.
    """
    plan = _PLANS.get(cast)
    if plan is None or format(cast.format) is not plan.fmt:
        plan = _PLANS[cast] = _make_plan(cast)
    return plan


def _make_plan(cast: Cast) -> Plan:
    fmt = format(cast.format)
    _check_scale(cast, fmt)
    power = (
        cast.scale != "none"
        and cast.scale_format != "e4m3"
        and (cast.rule not in ("amax", "mean") or cast.scale_format == "e8m0")
    )
    two_level = cast.scale_format == "e4m3"
    rule = "rceil" if power and cast.rule in ("amax", "pow2") else cast.rule
    return Plan(
        fmt,
        cast.scale,
        None if cast.block is None else (int(cast.block[0]), int(cast.block[1])),
        cast.scale_format,
        rule,
        cast.rounding,
        cast.overflow,
        cast.symmetric,
        cast.hadamard,
        float(cast.min_block_scale),
        _SIGNS,
        power,
        folds_into_values=power or two_level or cast.scale == "none",
        unfoldable=_unfoldable(cast, fmt, power, two_level),
    )


def _check_scale(cast: Cast, fmt: Format) -> None:
    name = fmt.name
    if cast.scale == "none":
        if cast.scale_format != "fp32" or cast.rule != "amax" or not cast.symmetric:
            raise ValueError(f"{name}: scale='none' takes no scale_format, rule or symmetric=False.")
        return
    if fmt.max > reference.FLT_MAX:
        raise ValueError(f"{name}: its largest value {fmt.max:g} is beyond fp32, in which scales are computed.")
    if not cast.symmetric and (fmt.kind != "int" or fmt.step != 1 or fmt.bits > 8):
        raise ValueError(f"{name}: symmetric=False is for int4 and int8 style formats only.")
    if not cast.symmetric and (cast.scale_format != "fp32" or cast.rule != "amax"):
        raise ValueError(f"{name}: symmetric=False takes scale_format='fp32' and rule='amax' only.")


def _unfoldable(cast: Cast, fmt: Format, power: bool, two_level: bool) -> str:
    if cast.scale == "block" and not power and not two_level:
        return "its fp32 scales change along the contraction; it needs a product per block, or power-of-two scales"
    if cast.scale == "column" and not power:
        return "its fp32 column scales change along the contraction; it needs power-of-two scales"
    return ""


_SIGNIFICANT = {torch.bfloat16: (8, 127, -133), torch.float32: (24, 127, -149), torch.float64: (53, 1023, -1074)}


def _exact_in(plan: Plan, dtype: torch.dtype) -> str:
    """Why a dtype cannot hold the values of a plan before scaling, "" if it can."""
    if dtype not in _SIGNIFICANT:
        return f"carriers are bfloat16, float32 or float64, not {dtype}"
    digits, top, bottom = _SIGNIFICANT[dtype]
    fmt = plan.fmt
    needed = (
        fmt.mantissa_bits + 1 if fmt.kind in ("float", "scale") else max(1, fmt.bits - (1 if plan.symmetric else 0))
    )
    if plan.scale_format == "e4m3":
        needed += 4
    low = math.frexp(fmt.min_subnormal)[1] - 1
    if needed > digits or fmt.max_exponent > top or low < bottom:
        return f"{str(dtype).removeprefix('torch.')} cannot hold every value of {fmt.name}"
    return ""


def folds(cast: Cast, dtype: torch.dtype = torch.bfloat16) -> str:
    """Whether a GEMM in `dtype` can eat this cast: "" if so, else the reason.

    >>> folds(Cast("e4m3")), folds(Cast("fp16", scale="none"))
    ('', 'bfloat16 cannot hold every value of fp16')
    """
    plan = plan_of(cast)
    return plan.unfoldable or _exact_in(plan, dtype)


def scale_shape(cast: Cast, shape: tuple[int, int], axis: int = -1) -> tuple[int, ...]:
    """The shape of the scale of a matrix.

    >>> scale_shape(Cast("e4m3", scale="block", block=(1, 128)), (64, 300))
    (64, 3)
    """
    return reference.scale_shape(plan_of(cast), torch.Size(shape), axis)


def _check(x: Tensor, plan: Plan, axis: int, scale: Tensor | None, rng: Rng | None) -> None:
    check_float(x)
    if x.dim() != 2:
        raise ValueError(f"a scaled cast takes a matrix here, got {x.dim()} dimensions; flatten the leading ones.")
    if axis not in (-1, -2):
        raise ValueError(f"axis must be -1 or -2, got {axis}.")
    if plan.rounding == "stochastic" and rng is None:
        raise ValueError("stochastic rounding needs a seed.")
    if scale is not None:
        _check_given(x, plan, axis, scale)


def _check_given(x: Tensor, plan: Plan, axis: int, scale: Tensor) -> None:
    if plan.scale == "none" or plan.scale_format == "e4m3" or not plan.symmetric:
        raise ValueError("a scale can be given for one-level symmetric scales only.")
    shape = reference.scale_shape(plan, x.shape, axis)
    if tuple(scale.shape) != shape or scale.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            f"the scale of this cast has shape {shape} and dtype float32 (or e8m0 codes as uint8), "
            f"got {tuple(scale.shape)} and {scale.dtype}."
        )
    if scale.dtype == torch.uint8 and plan.scale_format != "e8m0":
        raise ValueError(f"this cast's scales are {plan.scale_format}, not e8m0 codes.")


def quantize(
    x: Tensor,
    cast: Cast,
    axis: int = -1,
    scale: Tensor | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> QuantizedParts:
    """Cast a matrix to codes and scales.

    Args:
        x: a matrix of float64, float32, float16 or bfloat16.
        cast: the cast, contraction axis last.
        axis: which axis of x is the contraction axis.
        scale: use this scale instead of computing one (delayed scaling), in the shape of `scale_shape`.
        rng: random bits, for stochastic rounding.
        counters: also count, in the same pass: [flushed to zero, saturated, not finite, bits of amax as fp32].

    Returns:
        Codes of x's shape and whatever scales the cast has.
    """
    plan = plan_of(cast)
    _check(x, plan, axis, scale, rng)
    if backend(x) == "native":
        return native.quantize(x, plan, axis, scale, rng, counters)
    return reference.quantize(x, plan, axis, scale, rng, counters)


def quantize_t(
    x: Tensor,
    cast: Cast,
    axis: int = -1,
    scale: Tensor | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> QuantizedParts:
    """`quantize`, with codes and scales laid out as those of x transposed."""
    plan = plan_of(cast)
    _check(x, plan, axis, scale, rng)
    if backend(x) == "native":
        return native.quantize_t(x, plan, axis, scale, rng, counters)
    return reference.quantize_t(x, plan, axis, scale, rng, counters)


def dequantize(parts: QuantizedParts, cast: Cast, axis: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a quantised matrix: fp32(code * scale), then rounded to dtype (a Hadamard transform stays on)."""
    plan = plan_of(cast)
    _check_parts(parts, plan, axis)
    if backend(parts.codes) == "native":
        return native.dequantize(parts, plan, axis, dtype)
    return reference.dequantize(parts, plan, axis, dtype)


def _check_parts(parts: QuantizedParts, plan: Plan, axis: int) -> None:
    codes, scale = parts.codes, parts.scale
    if codes.dim() != 2 or codes.dtype is not code_dtype(plan.fmt):
        raise ValueError(f"expected a matrix of {code_dtype(plan.fmt)} codes, got {codes.dtype} {tuple(codes.shape)}.")
    if plan.scale != "none" and (scale is None or scale.shape != reference.scale_shape(plan, codes.shape, axis)):
        raise ValueError(f"expected a scale of shape {reference.scale_shape(plan, codes.shape, axis)}.")


def _check_carrier(plan: Plan, dtype: torch.dtype) -> None:
    reason = plan.unfoldable or _exact_in(plan, dtype)
    if reason:
        _refuse(plan, reason)


def _refuse(plan: Plan, reason: str) -> NoReturn:
    raise ValueError(f"{plan.fmt.name} with {plan.scale} scales cannot be carried by one product: {reason}.")


def carrier(
    x: Tensor,
    cast: Cast,
    axis: int = -1,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rng: Rng | None = None,
    counters: bool = False,
) -> Carrier:
    """Quantise and dequantise in one pass, to what a GEMM eats.

    Args:
        x, cast, axis, scale, rng, counters: as in `quantize`.
        dtype: bfloat16, float32 or float64.

    Returns:
        Values of x's shape; the factor its product still needs (0-d, per row or per column), or None.

    Raises:
        ValueError: if the cast's scales cannot be folded, or the dtype cannot hold its values.
    """
    plan = plan_of(cast)
    _check(x, plan, axis, scale, rng)
    _check_carrier(plan, dtype)
    if backend(x) == "native":
        return native.carrier(x, plan, axis, scale, dtype, rng, counters)
    return reference.carrier(x, plan, axis, scale, dtype, rng, counters)


def carrier_both(
    x: Tensor,
    cast_a: Cast,
    cast_b: Cast,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rng: Rng | None = None,
    counters: bool = False,
) -> tuple[Carrier, Carrier]:
    """The carriers of one matrix along axis -1 under `cast_a` and along axis -2 under `cast_b`.

    Natively this is two passes unless one tensor serves both. Where both are the same tensor, as under one scale for
    the whole matrix, the same object may be returned twice.
    """
    plan_a, plan_b = plan_of(cast_a), plan_of(cast_b)
    _check(x, plan_a, -1, scale_a, rng)
    _check(x, plan_b, -2, scale_b, rng)
    _check_carrier(plan_a, dtype)
    _check_carrier(plan_b, dtype)
    if backend(x) == "native":
        return native.carrier_both(x, plan_a, plan_b, scale_a, scale_b, dtype, rng, counters)
    return reference.carrier_both(x, plan_a, plan_b, scale_a, scale_b, dtype, rng, counters)


def carrier_from_codes(
    parts: QuantizedParts, cast: Cast, axis: int = -1, dtype: torch.dtype = torch.bfloat16
) -> Carrier:
    """The carrier of a matrix that was quantised before."""
    plan = plan_of(cast)
    _check_parts(parts, plan, axis)
    _check_carrier(plan, dtype)
    if backend(parts.codes) == "native":
        return native.carrier_from_codes(parts, plan, axis, dtype)
    return reference.carrier_from_codes(parts, plan, axis, dtype)
