"""Casting and quantising tensors: what users call.

Three functions change one number at a time: `encode` (values to codes), `decode` (codes to values) and `round_to`
(values to the nearest values of a format). `quantize` changes a tensor under a scale that follows from its largest
values, and returns a `Quantized`, from which `dequantize` comes back: ``value = code * scale``.

Rounding and overflow are arguments, never a property of the machine. Where another library's choice is wanted, a
profile names it:

* ``torch``      what `Tensor.to` does on a CPU: e4m3 saturates, infinities too; all else overflows as IEEE 754
* ``ml_dtypes``  what numpy with ml_dtypes (and so JAX) does: overflow to Inf or NaN; fp6, fp4 saturate, NaN becomes -0
* ``onnx``       the Cast operator with saturate=1
* ``cuda``       the conversions of the CUDA headers (satfinite), as TransformerEngine uses them

torch, ml_dtypes and onnx read float64 through float32, which rounds twice; their profiles do the same.

Gradients: `round_to` is the identity in backward (straight through). Codes carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.casting import Cast
from lowprec.casts import cast as find_cast
from lowprec.errors import unknown_name
from lowprec.formats import Format
from lowprec.formats import format as find_format
from lowprec.kernels import cast as kernels
from lowprec.kernels import scale as scales
from lowprec.kernels.cast import Rng

__all__ = ["PROFILES", "Quantized", "Rng", "decode", "encode", "pack", "quantize", "round_to", "unpack"]


# -- profiles ---------------------------------------------------------------------------------------------------------


class _Profile(NamedTuple):
    """One library's way of casting to one format."""

    rounding: str = "nearest"
    overflow: str = "ieee"
    nan: str = "error"
    prepare: Callable[[Tensor], Tensor] | None = None
    nan_code: int | None = None  # where a NaN becomes a code that no `nan` argument names


def _through_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype == torch.float64 else x


def _magnitude(x: Tensor) -> Tensor:
    return _through_float32(x).abs()


def _rounded_field(x: Tensor) -> Tensor:
    """torch and ml_dtypes round the exponent field: a subnormal float32 above 2^-127 counts as 2^-126."""
    magnitude = _magnitude(x).to(torch.float32)
    return torch.where((magnitude > 2.0**-127) & (magnitude < 2.0**-126), 2.0**-126, magnitude)


def _positive_field(x: Tensor) -> Tensor:
    """The same; what is not positive becomes NaN."""
    return torch.where(_through_float32(x) > 0, _rounded_field(x), torch.nan)


def _onnx_scale(x: Tensor) -> Tensor:
    """ONNX rounds exponent fields up: a subnormal float32 counts as more than 2^-127."""
    magnitude = _magnitude(x).to(torch.float32)
    return torch.where((magnitude > 0) & (magnitude < 2.0**-126), 2.0**-126, magnitude)


def _torch(fmt: Format) -> _Profile | None:
    if fmt.kind == "scale":
        return _Profile("nearest-away", prepare=_rounded_field)
    known = ("fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
    if fmt.name not in known:
        return None
    narrow = None if fmt.name == "fp64" else _through_float32
    return _Profile(overflow="saturate" if fmt.name == "e4m3" else "ieee", prepare=narrow)


def _ml_dtypes(fmt: Format) -> _Profile | None:
    if fmt.kind == "scale":
        return _Profile("nearest-away", prepare=_positive_field)
    if fmt.kind != "float" or fmt.name == "tf32":
        return None
    if not fmt.has_nan:
        return _Profile(overflow="saturate", nan="zero", prepare=_through_float32, nan_code=1 << (fmt.bits - 1))
    return _Profile(prepare=None if fmt.bits >= 16 and fmt.name != "bf16" else _through_float32)


def _onnx(fmt: Format) -> _Profile | None:
    if fmt.kind == "scale":
        return _Profile("up", "saturate", prepare=lambda x: _onnx_scale(x).nan_to_num(torch.nan, torch.nan))
    if fmt.name in ("fp64", "fp32", "fp16", "bf16"):
        return _ml_dtypes(fmt)
    if fmt.name == "e2m1":
        return _ml_dtypes(fmt)
    known = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
    return _Profile(overflow="saturate", prepare=_through_float32) if fmt.name in known else None


def _cuda(fmt: Format) -> _Profile | None:
    if fmt.kind == "scale":
        return _Profile("up", "saturate", prepare=torch.abs)
    if fmt.name in ("fp64", "fp32", "fp16", "bf16"):
        return _Profile()
    if fmt.name == "tf32":
        return _Profile("nearest-away")
    known = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    return _Profile(overflow="saturate", nan="max") if fmt.name in known else None


PROFILES: dict[str, Callable[[Format], _Profile | None]] = {
    "torch": _torch,
    "ml_dtypes": _ml_dtypes,
    "onnx": _onnx,
    "cuda": _cuda,
}


def _profile(name: str, fmt: Format, rounding: str, overflow: str) -> _Profile:
    if name not in PROFILES:
        raise unknown_name("profile", name, PROFILES)
    if rounding != "nearest" or overflow != "saturate":
        raise ValueError(f"profile {name!r} fixes rounding and overflow; leave them out.")
    found = PROFILES[name](fmt)
    if found is None:
        raise ValueError(f"profile {name!r} says nothing about {fmt.name}: that library has no such cast.")
    return found


# -- one number at a time ---------------------------------------------------------------------------------------------


def _rng(rounding: str, seed: int | None, rng: Rng | None) -> Rng | None:
    """The random stream asked for; without a seed it comes from torch's generator, so `torch.manual_seed` fixes it."""
    if rounding != "stochastic":
        if seed is not None or rng is not None:
            raise ValueError(f"a seed has no effect with rounding={rounding!r}; pass rounding='stochastic'.")
        return None
    if rng is not None:
        if seed is not None:
            raise ValueError("pass either seed or rng, not both.")
        return rng
    return Rng(int(torch.randint(2**62, ())) if seed is None else int(seed))


def encode(
    x: Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    nan: str = "error",
    profile: str | None = None,
    seed: int | None = None,
    rng: Rng | None = None,
) -> Tensor:
    """Cast a tensor to the codes of a format, with one rounding from its own precision.

    Args:
        x: float64, float32, float16 or bfloat16, any shape and stride.
        format: a Format or its name.
        rounding: "nearest" (ties to even), "nearest-away", "toward-zero", "up", "down" or "stochastic".
        overflow: "saturate" (finite overflow and infinities become the largest value), "keep-inf" (infinities stay) or
            "ieee" (overflow becomes infinity); NaN stands in for an infinity the format has not.
        nan: what a NaN becomes in a format without one: "error", "zero" or "max" (the largest value).
        profile: cast as "torch", "ml_dtypes", "onnx" or "cuda" does, instead of by the three arguments above.
        seed: for stochastic rounding; None takes one from torch's generator.
        rng: the full address of the random bits, in place of a seed.

    Returns:
        Codes in the smallest unsigned integer that holds them, contiguous, of x's shape.

    Raises:
        TypeError: if x is not a dense tensor of floats.
        ValueError: for unknown names, or a NaN that the format cannot hold.

    >>> encode(torch.tensor([0.3, -500.0]), "e4m3").tolist()
    [42, 254]
    """
    fmt = find_format(format)
    if profile is not None:
        return _encode_as(x, fmt, _profile(profile, fmt, rounding, overflow))
    if rounding == "stochastic" or seed is not None or rng is not None:
        rng = _rng(rounding, seed, rng)
    return kernels.encode(x, fmt, rounding, overflow, nan, rng)


def _encode_as(x: Tensor, fmt: Format, p: _Profile) -> Tensor:
    kernels.check_float(x)
    y = x.detach() if p.prepare is None else p.prepare(x.detach())
    codes = kernels.encode(y, fmt, p.rounding, p.overflow, p.nan)
    if p.nan_code is not None:
        of_nan = torch.where(x.signbit(), 0, p.nan_code)  # ml_dtypes: the sign of a NaN comes out flipped, on a zero
        codes = torch.where(x.isnan(), of_nan, codes).to(codes.dtype)
    return codes


def decode(codes: Tensor, format: str | Format, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes.

    Args:
        codes: unsigned integers as `encode` returns them, or torch's own tensor of that format (float8_e4m3fn, ...).
        format: a Format or its name.
        dtype: float32, bfloat16, float16 or float64. Values it cannot hold are rounded once, to nearest.

    Returns:
        A contiguous tensor of the codes' shape.

    >>> decode(torch.tensor([42, 254], dtype=torch.uint8), "e4m3").tolist()
    [0.3125, -448.0]
    """
    fmt = find_format(format)
    if not isinstance(codes, Tensor):
        raise TypeError(f"expected a torch.Tensor of codes, got {type(codes).__name__}.")
    if codes.dtype in _OWN_DTYPES:
        codes = _raw(codes, fmt)
    return kernels.decode(codes, fmt, dtype)


_OWN_DTYPES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.float8_e8m0fnu: "e8m0",
    torch.int8: "int8",
}


def _raw(codes: Tensor, fmt: Format) -> Tensor:
    """The bytes of a tensor in torch's own dtype for a format."""
    own = _OWN_DTYPES[codes.dtype]
    if own != fmt.name and not (own == "int8" and fmt.kind == "int" and fmt.bits == 8):
        raise TypeError(f"a tensor of {codes.dtype} holds {own}, not {fmt.name}; view it as uint8 if that is meant.")
    return codes.contiguous().view(torch.uint8)


class _StraightThrough(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _straight_through(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _StraightThrough.apply(x, make)  # type: ignore[no-untyped-call]
    return result


def round_to(
    x: Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    profile: str | None = None,
    seed: int | None = None,
    rng: Rng | None = None,
) -> Tensor:
    """Bring values onto the grid of a format, keeping their dtype; the gradient passes straight through.

    Args:
        x, format, rounding, overflow, profile, seed, rng: as in `encode`.

    Returns:
        A contiguous tensor of x's shape and dtype. NaN stays NaN, for every format. Where x's own dtype cannot hold a
        result (65504 in bfloat16), it is the next one towards zero.

    >>> round_to(torch.tensor([0.3, 1000.0]), "e4m3").tolist()
    [0.3125, 448.0]
    """
    fmt = find_format(format)
    if profile is not None:
        settings = _profile(profile, fmt, rounding, overflow)

        def make(x: Tensor) -> Tensor:
            kernels.check_float(x)
            y = x if settings.prepare is None else settings.prepare(x)
            return kernels.round_to(y, fmt, settings.rounding, settings.overflow, None).to(x.dtype)

        return _straight_through(x, make) if _wants_grad(x) else make(x)
    if rounding == "stochastic" or seed is not None or rng is not None:
        rng = _rng(rounding, seed, rng)
    if _wants_grad(x):
        return _straight_through(x, lambda y: kernels.round_to(y, fmt, rounding, overflow, rng))
    return kernels.round_to(x, fmt, rounding, overflow, rng)


def _wants_grad(x: Tensor) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def pack(codes: Tensor, format: str | Format) -> Tensor:
    """Pack codes of fewer than 8 bits: two int4 or e2m1 a byte, four e3m2 or e2m3 in three, eight int1 in one.

    Args:
        codes: uint8, one code each.
        format: their format, which says how many bits a code has.

    Returns:
        Bytes, flat: a little-endian stream of bits with the first code in the lowest (torch's float4_e2m1fn_x2).

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), "e2m1").tolist()
    [33, 3]
    """
    return kernels.pack(codes, find_format(format).bits)


def unpack(packed: Tensor, format: str | Format, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Undo `pack`.

    Args:
        packed: the bytes.
        format: the codes' format.
        shape: the codes' shape.

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), "e2m1", (3,)).tolist()
    [1, 2, 3]
    """
    return kernels.unpack(packed, find_format(format).bits, shape)


# -- a tensor under a scale -------------------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """A quantised tensor: codes, scales and the cast that made them; ``value = code * scale``.

    `codes` has the shape of the tensor. The scale has one entry a group, in the shape of the matrix of groups: () for
    a tensor, (rows, 1), or (blocks down, blocks across), over the matrix with the leading dimensions flattened; e8m0
    and e4m3 scales are codes. `tensor_scale` is the second level of NVFP4, `zero_point` that of asymmetric integers,
    `counters` are [flushed to zero, saturated, not finite, bits of amax as float32], if asked for.
    """

    codes: Tensor
    scale: Tensor | None
    cast: Cast
    tensor_scale: Tensor | None = None
    zero_point: Tensor | None = None
    counters: Tensor | None = None
    axis: int = -1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values: ``fp32(code * scale)``, rounded to `dtype`; a Hadamard transform is undone."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(f"dequantize gives float64, float32, float16 or bfloat16, not {dtype}.")
        view, axis, back = _as_matrix(self.codes, self.axis)
        parts = scales.QuantizedParts(view, self.scale, self.tensor_scale, self.zero_point)
        if not self.cast.hadamard:
            return back(scales.dequantize(parts, self.cast, axis, dtype))
        values = scales.dequantize(parts, self.cast, axis, torch.float32)
        turned = values if axis == -1 else values.t()
        ones = torch.ones(16, device=values.device)
        signs = kernels.hadamard_signs(values.device)
        original = kernels.hadamard16(turned, ones)
        whole = original.shape[-1] // 16 * 16
        original[:, :whole] *= signs.repeat(whole // 16)
        return back((original if axis == -1 else original.t()).to(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of codes (packed) and scales."""
        parts = [self.scale, self.tensor_scale, self.zero_point]
        packed = -(-self.codes.numel() * find_format(self.cast.format).bits // 8)
        return packed + sum(part.numel() * part.element_size() for part in parts if part is not None)


def _as_matrix(x: Tensor, axis: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
    """x as a matrix with the contraction on `axis` of it, and how to undo that."""
    shape = x.shape
    if x.dim() == 2:
        return x, axis if axis < 0 else axis - 2, lambda y: y
    if x.dim() == 0:
        return x.reshape(1, 1), -1, lambda y: y.reshape(())
    moved = x.movedim(axis, -1)
    flat = moved.reshape(-1, moved.shape[-1]) if x.numel() else moved.reshape(_rows(moved), moved.shape[-1])
    if moved.shape == shape:
        return flat, -1, lambda y: y.reshape(shape)
    return flat, -1, lambda y: y.reshape(moved.shape).movedim(-1, axis).contiguous()


def _rows(x: Tensor) -> int:
    rows = 1
    for n in x.shape[:-1]:
        rows *= n
    return rows


def quantize(
    x: Tensor,
    cast: str | Cast,
    *,
    axis: int = -1,
    scale: Tensor | None = None,
    seed: int | None = None,
    rng: Rng | None = None,
    counters: bool = False,
) -> Quantized:
    """Cast a tensor under scales that follow from its largest values.

    Args:
        x: float64, float32, float16 or bfloat16, any shape and stride; leading dimensions count as rows.
        cast: a Cast or a name such as "mxfp8", "nvfp4", "deepseek-1x128" (`lowprec.casts` lists them).
        axis: the contraction axis, along which rows and blocks run.
        scale: use this scale instead of computing one.
        seed, rng: for stochastic rounding, as in `encode`.
        counters: also count what the cast did, in the same pass.

    Returns:
        A `Quantized`.

    Raises:
        TypeError: if x is not a dense tensor of floats.
        ValueError: if the cast does not exist or a scale does not fit it.

    >>> q = quantize(torch.tensor([[1.0, -2.0, 4.0]]), "e4m3")
    >>> q.dequantize().tolist(), q.codes.tolist()
    ([[1.0, -2.0, 4.0]], [[110, 246, 126]])
    """
    c = cast if isinstance(cast, Cast) else find_cast(cast)
    kernels.check_float(x)
    if not -max(1, x.dim()) <= axis < max(1, x.dim()):
        raise ValueError(f"axis {axis} is out of range for a tensor of {x.dim()} dimensions.")
    if c.rounding == "stochastic" or seed is not None or rng is not None:
        rng = _rng(c.rounding, seed, rng)
    if x.dim() == 2:
        parts = scales.quantize(x, c, axis if axis < 0 else axis - 2, scale, rng, counters)
        return Quantized(parts[0], parts[1], c, parts[2], parts[3], parts[4], axis)
    view, turned, back = _as_matrix(x, axis)
    codes, s, tensor_scale, zero_point, count = scales.quantize(view, c, turned, scale, rng, counters)
    return Quantized(back(codes), s, c, tensor_scale, zero_point, count, axis)
