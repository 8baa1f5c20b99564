"""One product of two cast operands, computed exactly.

An `Operand` is a matrix that has been cast and is ready for a GEMM: its values in the layout of the tensor it came
from, the axis it is contracted over, and the scale that was taken out of it. A product of two operands is

    out[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] b[n, k]  (+ bias[n])

Which engine computes the sum follows from the two casts alone (numerics in brief: every 8-bit float, and every float or
integer of at most 8 significant bits times a power of two, is exact in bf16, and the product of two bf16 values is
exact in fp32):

* ``int8``   both operands int8 with a scale a tensor or a row: int8 times int8 into int32, exact, one scaling pass.
* ``bf16``   both exact in bf16 and the result wanted in bf16: one bf16 product with fp32 accumulation.
* ``fp32``   the same with operands of more bits (fp16, tf32) or a result wanted in fp32, or where the CPU has no bf16
             dot product: one fp32 product.
* ``fp8``    the same by a GPU's own FP8 units, where it has them (`lowprec.units`).
* ``dequantised``  a scale along the contraction that is no power of two (fp32 scales in blocks), or a zero point: the
             operands' own values, rounded to fp32 once, and one fp32 product. The rounding costs 2^-24 a factor, as
             much as one addition of the accumulation does, and one large product is several times as fast as a partial
             product a block.

An accumulator model (`Recipe.accumulate`) takes the operands of the fp32 engine and sums them as that hardware would.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowprec import units
from lowprec.formats import format as find_format
from lowprec.kernels import accumulate as accumulators
from lowprec.kernels import cast as cast_kernels
from lowprec.kernels import epilogue as epilogues
from lowprec.kernels import scale as scale_kernels
from lowprec.recipe import Accumulator, Cast, Gemm

__all__ = ["COMPUTE", "Engine", "Operand", "engine", "orientation_free", "prepare", "product"]

COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_INT8_ROW = Cast("int8", scale="row")
_CHUNK = 1 << 20  # elements of an int32 result kept at a time: 4 MB, so that scaling it reads the cache


class Operand(NamedTuple):
    """A matrix that is ready for a GEMM.

    Args:
        values: the matrix, in the layout of the tensor it came from.
        axis: the axis it is contracted over, -1 or -2.
        scale: what multiplies it: None (1), a 0-d tensor, or a vector along the other axis.
        least: the exponent its subnormal values are stored with (accumulator models align by exponents).
    """

    values: Tensor
    axis: int
    scale: Tensor | None = None
    least: int = accumulators.LEAST

    @property
    def rows(self) -> Tensor:
        """The matrix as (other, contraction)."""
        return self.values if self.axis == -1 else self.values.t()

    def turned(self) -> Operand:
        """The same values contracted over the other axis (only where the cast has no orientation)."""
        return Operand(self.values, -3 - self.axis, self.scale, self.least)


@dataclass(frozen=True)
class Engine:
    """What computes a product, and the dtype its operands are carried in."""

    kind: Literal["int8", "bf16", "fp8", "fp32", "dequantised"]
    words: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands' values."""
        return {"int8": torch.int8, "bf16": torch.bfloat16}.get(self.kind, torch.float32)


@functools.cache
def engine(
    gemm: Gemm, compute: str, device: str, accumulate: str | Accumulator = "fp32", hardware: bool = True
) -> Engine:
    """The engine for a product of operands cast in this way.

    Args:
        gemm: the two casts.
        compute: name of the compute dtype.
        device: type of device.
        accumulate: an accumulator model, or "fp32".
        hardware: whether FP8 units may be used (their shapes are limited).

    >>> engine(Gemm(Cast("e4m3"), Cast("e4m3")), "bf16", "cuda").kind
    'bf16'
    >>> engine(Gemm(Cast("int8", scale="row"), Cast("int8", scale="row")), "bf16", "cpu").kind
    'int8'
    >>> engine(Gemm(Cast("e4m3", scale="block", block=(1, 128)), None), "bf16", "cpu").kind
    'dequantised'
    """
    casts = (gemm.a, gemm.b)
    if len({cast is not None and cast.hadamard for cast in casts}) > 1:
        raise ValueError(f"{gemm}: a Hadamard transform must be on both operands of a product, so that it cancels.")
    where = "oneDNN" if device == "cpu" else device
    if not all(_folds(cast) for cast in casts):
        return Engine("dequantised", f"one fp32 product of dequantised operands ({where})")
    if accumulate != "fp32":
        return Engine("fp32", f"sums emulated: {accumulate}")
    if device == "cpu" and all(cast is not None and _plain_int8(cast) for cast in casts):
        return Engine("int8", f"int8 product into int32, exact ({where})")
    why = ""
    if device == "cuda" and compute == "bf16" and not units.fits(gemm):
        has, why = units.usable(gemm, device)
        if has and hardware:
            return Engine("fp8", "FP8 product in hardware (cuda, scaled_mm); other shapes than multiples of 16 in bf16")
        why = f", FP8 units: {why}" if why else ""
    if compute == "bf16" and all(_fits_bf16(cast) for cast in casts) and _has_bf16(device):
        cast_any = any(cast is not None for cast in casts)
        return Engine("bf16", f"one bf16 product{', exact' if cast_any else ''} ({where}{why})")
    return Engine("fp32", f"one fp32 product, exact ({where})")


def _folds(cast: Cast | None) -> bool:
    """Whether the cast's scales leave the sum over the contraction: powers of two, or constant along it."""
    return cast is None or (cast.symmetric and not scale_kernels.folds(cast, torch.float32))


def _plain_int8(cast: Cast) -> bool:
    plain = cast.scale_format == "fp32" and not cast.hadamard and cast.symmetric
    return cast.format == "int8" and cast.scale in ("tensor", "row") and plain


def _fits_bf16(cast: Cast | None) -> bool:
    return cast is None or not scale_kernels.folds(cast, torch.bfloat16)


@functools.cache
def _has_bf16(device: str) -> bool:
    """Whether bf16 products run at speed (on a CPU: AVX512-BF16 or AMX; fp32 otherwise, with the same result)."""
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def orientation_free(cast: Cast | None) -> bool:
    """Whether a matrix cast along its rows has the same values as when cast along its columns."""
    if cast is None or cast.scale in ("none", "tensor"):
        return cast is None or not cast.hadamard
    if cast.scale == "block" and cast.block is not None:
        return cast.block[0] == cast.block[1] and not cast.hadamard
    return False


def prepare(
    x: Tensor,
    cast: Cast | None,
    axis: int,
    unit: Engine,
    compute: str,
    *,
    scale: Tensor | None = None,
    rng: cast_kernels.Rng | None = None,
    counters: bool = False,
) -> tuple[Operand, Tensor | None]:
    """Cast a matrix for a product.

    Args:
        x: the matrix, of any floating dtype.
        cast: how, or None for the compute dtype.
        axis: the axis it is contracted over.
        unit: the engine of the product.
        compute: name of the compute dtype.
        scale: the scale to use (delayed scaling), or None to find it.
        rng: random bits, for stochastic rounding.
        counters: count what was flushed, saturated and not finite.

    Returns:
        The operand, and the counters (None unless asked for).
    """
    if cast is None:
        if compute == "tf32":
            x = cast_kernels.round_to(x.float(), find_format("tf32"))
        elif compute in ("bf16", "fp16"):
            x = x.to(COMPUTE[compute])
        return Operand(x.to(unit.dtype), axis), None
    if unit.kind == "fp8" and not counters:
        return Operand(*_placed(x, cast, axis, scale)), None
    if unit.kind == "fp8":
        parts = scale_kernels.quantize(x, cast, axis=axis, scale=scale, counters=True)
        return Operand(parts.codes.view(units.DTYPES[cast.format]), axis, _flat(parts.scale)), parts.counters
    if unit.kind == "int8":
        if axis == -2 and scale is None and not counters and cast == _INT8_ROW:
            fast = epilogues.int8_columns(x)
            if fast is not None:
                return Operand(fast[0], axis, fast[1]), None
        parts = scale_kernels.quantize(x, cast, axis=axis, scale=scale, rng=rng, counters=counters)
        return Operand(parts.codes.view(torch.int8), axis, _flat(parts.scale)), parts.counters
    if unit.kind == "dequantised":
        parts = scale_kernels.quantize(x, cast, axis=axis, scale=scale, rng=rng, counters=counters)
        return Operand(scale_kernels.dequantize(parts, cast, axis, torch.float32), axis), parts.counters
    made = scale_kernels.carrier(x, cast, axis=axis, scale=scale, dtype=unit.dtype, rng=rng, counters=counters)
    return Operand(made.values, axis, _flat(made.scale), least_exponent(cast)), made.counters


def least_exponent(cast: Cast) -> int:
    """The smallest exponent of a cast's values as a carrier holds them: the format's, unless scales are folded in."""
    folded = cast.scale == "block" or (cast.power_of_two and cast.scale != "none")
    return accumulators.LEAST if folded else accumulators.least_exponent(cast.format)


def _placed(x: Tensor, cast: Cast, axis: int, scale: Tensor | None) -> tuple[Tensor, int, Tensor]:
    codes, used = units.quantize(x, cast, axis, scale)
    return codes, axis, used


def _flat(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else scale.reshape(-1)


def product(
    a: Operand,
    b: Operand,
    unit: Engine,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    accumulate: str | Accumulator = "fp32",
) -> Tensor:
    """The product of two operands.

    Args:
        a, b: the operands; both sides of the sum run over their contraction axes.
        unit: the engine both were prepared for.
        dtype: dtype of the result.
        bias: added to every row of the result, in the same pass where the engine can.
        accumulate: an accumulator model, or "fp32".

    Returns:
        A matrix: rows as `a` has beside its contraction, columns as `b` has.
    """
    if unit.kind == "int8" and a.values.device.type == "cpu":
        return _product_int8(a, b, dtype, bias)
    if unit.kind == "fp8":
        assert a.scale is not None and b.scale is not None
        one, two = (units.along_rows(side.values, side.axis) for side in (a, b))
        raw = units.scaled_product(one, a.scale, two, b.scale, dtype)
        return raw.to(dtype) if bias is None else (raw.float() + bias.float()).to(dtype)
    left, right = a.rows, b.rows.t()
    if accumulate != "fp32":
        raw = accumulators.matmul(left, right.t(), accumulate, least=(a.least, b.least))
        return epilogues.scaled(raw, a.scale, b.scale, bias, dtype)
    scales = [s for s in (a.scale, b.scale) if s is not None]
    if unit.kind == "bf16" and dtype == torch.bfloat16 and all(s.dim() == 0 or s.numel() == 1 for s in scales):
        if not scales:
            return torch.mm(left, right) if bias is None else torch.addmm(bias.to(dtype), left, right)
        if left.device.type == "cpu":
            alpha = 1.0
            for s in scales:
                alpha *= float(s)
            out = torch.empty(left.shape[0], right.shape[1], dtype=dtype) if bias is None else bias.to(dtype)
            return torch.addmm(out, left, right, beta=0.0 if bias is None else 1.0, alpha=alpha)
    raw = torch.mm(left, right)
    if not scales and bias is None and raw.dtype == dtype:
        return raw
    return epilogues.scaled(raw, a.scale, b.scale, bias, dtype)


def _product_int8(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Chunks of rows, so that the int32 result is scaled while it is in the cache."""
    left, right = a.rows, b.rows.t()
    m, n = left.shape[0], right.shape[1]
    out = torch.empty(m, n, dtype=dtype)
    step = max(64, _CHUNK // max(n, 1))
    acc = torch.empty(min(step, m), n, dtype=torch.int32)
    for start in range(0, m, step):
        stop = min(start + step, m)
        part = torch._int_mm(left[start:stop], right, out=acc[: stop - start])
        row = a.scale if a.scale is None or a.scale.numel() == 1 else a.scale[start:stop]
        epilogues.scaled(part, row, b.scale, bias, dtype, out=out[start:stop])
    return out
