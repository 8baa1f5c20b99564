"""Casts, reductions and layout changes of one tensor: checks the arguments, picks a backend.

`lowprec.kernels.reference.rounding` says what a cast means, bit by bit. Formats are given as a `Format`; strings belong
to `lowprec.quantize`. Nothing here is differentiable and no output shares memory with its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowprec.errors import unknown_name
from lowprec.formats import Format
from lowprec.kernels import backend, native_topic
from lowprec.kernels.reference import cast as reference
from lowprec.kernels.reference.rounding import Rng

__all__ = [
    "NANS",
    "OVERFLOWS",
    "ROUNDINGS",
    "Rng",
    "TensorStats",
    "amax",
    "block_amax",
    "check_float",
    "code_dtype",
    "decode",
    "encode",
    "hadamard16",
    "hadamard_signs",
    "pack",
    "round_to",
    "tensor_stats",
    "transpose",
    "unpack",
]

if TYPE_CHECKING:
    native = reference
else:
    native = native_topic("cast", reference)

# names -> the numbers the native core knows them by
ROUNDINGS = {"nearest": 0, "nearest-away": 1, "toward-zero": 2, "up": 3, "down": 4, "stochastic": 5}
OVERFLOWS = {"saturate": 0, "keep-inf": 1, "ieee": 2}
NANS = {"error": 0, "zero": 1, "max": 2}

_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_CODES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class TensorStats(NamedTuple):
    """Health of several tensors: float64 vectors with one entry per tensor (columns of one matrix)."""

    inf: Tensor
    nan: Tensor
    sum_squares: Tensor
    amax: Tensor


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of a format's codes: the smallest unsigned integer that holds them."""
    return _CODES[fmt.code_bytes]


def check_float(x: Tensor) -> None:
    """Raise a plain sentence unless x is a dense fp64, fp32, fp16 or bf16 tensor with data."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(x).__name__}; torch.as_tensor makes one.")
    if x.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {x.layout}; call .to_dense() first.")
    if x.is_meta:
        raise TypeError("expected a tensor with data, got one on the meta device; materialise it first.")
    if x.dtype not in _FLOATS:
        raise TypeError(f"expected float64, float32, float16 or bfloat16, got {_dtype_hint(x.dtype)}")


def _dtype_hint(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        return f"{name}; cast real and imaginary part by themselves (torch.view_as_real)."
    if name.startswith("float"):
        return f"{name}; its codes are x.view(torch.uint8), which lowprec.decode reads."
    return f"{name}; convert it first, as in x.float()."


def _check_cast(x: Tensor, rounding: str, overflow: str, rng: Rng | None) -> None:
    check_float(x)
    if rounding not in ROUNDINGS:
        raise unknown_name("rounding", rounding, ROUNDINGS)
    if overflow not in OVERFLOWS:
        raise unknown_name("overflow", overflow, OVERFLOWS)
    if rounding == "stochastic":
        if rng is None:
            raise ValueError("stochastic rounding needs a seed.")
        if rng.bits is not None and not 1 <= rng.bits <= 32:
            raise ValueError(f"stochastic rounding takes 1 to 32 random bits, got {rng.bits}.")
        if rng.offset < 0:
            raise ValueError(f"the offset of stochastic rounding must not be negative, got {rng.offset}.")


def encode(
    x: Tensor,
    fmt: Format,
    rounding: str = "nearest",
    overflow: str = "saturate",
    nan: str = "error",
    rng: Rng | None = None,
) -> Tensor:
    """Cast a tensor to the codes of a format, with one rounding from its own precision.

    Args:
        x: float64, float32, float16 or bfloat16, any shape and stride.
        fmt: the target.
        rounding: one of `ROUNDINGS`.
        overflow: one of `OVERFLOWS`.
        nan: for formats without NaN, what a NaN becomes: "error", "zero" or "max" (the largest value).
        rng: random bits, for stochastic rounding.

    Returns:
        Contiguous unsigned integers of x's shape.
    """
    _check_cast(x, rounding, overflow, rng)
    if nan not in NANS:
        raise unknown_name("nan argument", nan, NANS)
    if backend(x) == "native":
        return native.encode(x, fmt, rounding, overflow, nan, rng)
    return reference.encode(x, fmt, rounding, overflow, nan, rng)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes: exact where the dtype can hold them, else rounded once to nearest (overflow to Inf).

    Args:
        codes: unsigned integers of `code_dtype`, none past the format's last code.
        fmt: their format.
        dtype: float64, float32, float16 or bfloat16.
    """
    if codes.dtype is not _CODES[fmt.code_bytes]:
        wanted = str(_CODES[fmt.code_bytes]).removeprefix("torch.")
        given = str(codes.dtype).removeprefix("torch.")
        raise TypeError(f"{fmt.name} codes are {wanted}, got {given}; use .view(torch.{wanted}) on raw bytes.")
    if fmt.bits & (fmt.bits - 1) or fmt.bits < 8:
        _check_codes(codes, fmt)
    if dtype not in _FLOATS:
        raise TypeError(f"decode gives float64, float32, float16 or bfloat16, not {dtype}.")
    if backend(codes) == "native":
        return native.decode(codes, fmt, dtype)
    return reference.decode(codes, fmt, dtype)


def _check_codes(codes: Tensor, fmt: Format) -> None:
    """Formats that do not fill their integer: no code may have bits above theirs."""
    if codes.numel() == 0:
        return
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    low, high = torch.aminmax(codes.view(signed.get(codes.dtype, torch.uint8)))
    if low < 0 or high >= 1 << fmt.bits:
        raise ValueError(f"{fmt.name} codes run from 0 to {(1 << fmt.bits) - 1}; these go beyond.")


def round_to(
    x: Tensor, fmt: Format, rounding: str = "nearest", overflow: str = "saturate", rng: Rng | None = None
) -> Tensor:
    """Bring values onto the grid of a format and keep their dtype; NaN stays NaN for every format.

    Where x's own dtype cannot hold the result (65504 in bf16), it is the next such value towards zero.
    """
    _check_cast(x, rounding, overflow, rng)
    if backend(x) == "native":
        return native.round_to(x, fmt, rounding, overflow, rng)
    return reference.round_to(x, fmt, rounding, overflow, rng)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 1 to 7 bits into bytes: a little-endian bit stream, the first code in the lowest bits.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist()
    [33, 3]
    """
    if codes.dtype is not torch.uint8 or not 1 <= bits <= 8:
        raise ValueError(f"pack takes uint8 codes of 1 to 8 bits, got {codes.dtype} and {bits} bits.")
    return native.pack(codes, bits) if backend(codes) == "native" else reference.pack(codes, bits)


def unpack(packed: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """Undo `pack` for codes of the given shape.

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, (3,)).tolist()
    [1, 2, 3]
    """
    if packed.dtype is not torch.uint8 or not 1 <= bits <= 8:
        raise ValueError(f"unpack takes uint8 bytes and codes of 1 to 8 bits, got {packed.dtype} and {bits} bits.")
    wanted = -(-math.prod(shape) * bits // 8)
    if packed.numel() != wanted:
        raise ValueError(f"{tuple(shape)} codes of {bits} bits fill {wanted} bytes, got {packed.numel()}.")
    if backend(packed) == "native":
        return native.unpack(packed, bits, shape)
    return reference.unpack(packed, bits, shape)


def amax(x: Tensor) -> Tensor:
    """Largest |x| as a 0-d float32; NaN if there is one, 0 if x is empty."""
    check_float(x)
    return native.amax(x) if backend(x) == "native" else reference.amax(x)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest |x| of every block of a matrix as float32, NaN kept; blocks at the edges are smaller."""
    check_float(x)
    return native.block_amax(x, block) if backend(x) == "native" else reference.block_amax(x, block)


def tensor_stats(tensors: Sequence[Tensor]) -> TensorStats:
    """Infinities, NaNs, sum of squares and amax of several tensors in one pass over each.

    The sum of squares is that of every element, in float64, so it is not finite where an element is not; its order of
    addition does not depend on the number of threads.
    """
    for x in tensors:
        check_float(x)
    use_native = all(backend(x) == "native" for x in tensors) and len(tensors) > 0
    matrix = native.tensor_stats(tensors) if use_native else reference.tensor_stats(tensors)
    return TensorStats(*matrix.unbind(1))


def hadamard_signs(device: torch.device | str = "cpu") -> Tensor:
    """The fixed sign vector of the random Hadamard transform (that of TransformerEngine)."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    return torch.tensor(signs, dtype=torch.float32, device=device)


def hadamard16(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """Multiply by signs and the orthonormal 16-point Sylvester matrix along the last axis, in float32.

    A last group of fewer than 16 elements passes unchanged: the transform stays orthonormal for every length, so the
    product of two operands transformed alike is the product of the originals.
    """
    check_float(x)
    signs = hadamard_signs(x.device) if signs is None else signs
    return native.hadamard16(x, signs) if backend(x) == "native" else reference.hadamard16(x, signs)


def transpose(codes: Tensor) -> Tensor:
    """A contiguous transposed copy of a matrix of codes."""
    if codes.dim() != 2:
        raise ValueError(f"transpose takes a matrix, got {codes.dim()} dimensions.")
    return native.transpose(codes) if backend(codes) == "native" else reference.transpose(codes)
