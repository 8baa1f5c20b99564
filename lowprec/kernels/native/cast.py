"""The compiled casts: makes tensors contiguous, allocates the output and passes addresses.

Arguments have been checked by `lowprec.kernels.cast`; the meaning is that of `lowprec.kernels.reference.cast`, bit for
bit. A `Format` is packed into ten integers once and known to the core by the address of its descriptor from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec.formats import Format
from lowprec.kernels import native_core
from lowprec.kernels.reference import cast as reference
from lowprec.kernels.reference.cast import no_nan_message
from lowprec.kernels.reference.rounding import Rng, default_bits

__all__ = [
    "amax",
    "block_amax",
    "decode",
    "descriptor",
    "encode",
    "hadamard16",
    "round_to",
    "tensor_stats",
    "transpose",
]

_core = native_core()

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
ROUNDINGS = {"nearest": 0, "nearest-away": 1, "toward-zero": 2, "up": 3, "down": 4, "stochastic": 5}
OVERFLOWS = {"saturate": 0, "keep-inf": 1, "ieee": 2}
NANS = {"error": 0, "zero": 1, "max": 2}
_KINDS = {"float": 0, "int": 1, "scale": 2, "binary": 3}
_NAN_STYLES = {"none": 0, "ieee": 1, "all-ones": 2, "negative-zero": 3}
_CODES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_NO_RNG = (0, 0, 0, 0, 32)

# id of a Format -> (the Format, which keeps the id its own; address of the descriptor; dtype of the codes)
_descriptors: dict[int, tuple[Format, int, torch.dtype]] = {}


def descriptor(fmt: Format) -> tuple[Format, int, torch.dtype]:
    """The format, the address of its native descriptor, and the dtype of its codes."""
    found = _descriptors.get(id(fmt))
    if found is None:
        step = math.frexp(fmt.step)[1] - 1
        specials = [-1 if code is None else code for code in (fmt.inf_code, fmt.nan_code)]
        numbers = [_KINDS[fmt.kind], fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, _NAN_STYLES[fmt.nan]]
        address = _core.format([*numbers, step, fmt.max_code, *specials])
        found = _descriptors[id(fmt)] = (fmt, address, _CODES[fmt.code_bytes])
    return found


def rng_numbers(x: Tensor, fmt: Format, rounding: str, rng: Rng | None) -> tuple[int, int, int, int, int]:
    """Seed, step, tensor, offset and random bits as the core takes them."""
    if rounding != "stochastic":
        return _NO_RNG
    assert rng is not None
    bits = rng.bits if rng.bits is not None else default_bits(x.dtype, fmt)
    return rng.seed & _MASK64, rng.step & _MASK32, rng.tensor & _MASK32, rng.offset, bits


def encode(
    x: Tensor,
    fmt: Format,
    rounding: str = "nearest",
    overflow: str = "saturate",
    nan: str = "error",
    rng: Rng | None = None,
) -> Tensor:
    """See `lowprec.kernels.cast.encode`."""
    _, address, dtype = descriptor(fmt)
    if not x.is_contiguous():
        x = x.contiguous()
    codes = torch.empty_like(x, dtype=dtype)
    nans = _core.encode(
        x.data_ptr(),
        DTYPES[x.dtype],
        x.numel(),
        address,
        ROUNDINGS[rounding],
        OVERFLOWS[overflow],
        NANS[nan],
        codes.data_ptr(),
        torch.get_num_threads(),
        *rng_numbers(x, fmt, rounding, rng),
    )
    if nans and nan == "error":
        raise ValueError(no_nan_message(fmt, nans))
    return codes


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `lowprec.kernels.cast.decode`."""
    if not codes.is_contiguous():
        codes = codes.contiguous()
    values = torch.empty_like(codes, dtype=dtype)
    threads = torch.get_num_threads()
    _core.decode(codes.data_ptr(), codes.numel(), descriptor(fmt)[1], values.data_ptr(), DTYPES[dtype], threads)
    return values


def round_to(
    x: Tensor, fmt: Format, rounding: str = "nearest", overflow: str = "saturate", rng: Rng | None = None
) -> Tensor:
    """See `lowprec.kernels.cast.round_to`."""
    if not x.is_contiguous():
        x = x.contiguous()
    values = torch.empty_like(x)
    _core.round_to(
        x.data_ptr(),
        DTYPES[x.dtype],
        x.numel(),
        descriptor(fmt)[1],
        ROUNDINGS[rounding],
        OVERFLOWS[overflow],
        values.data_ptr(),
        torch.get_num_threads(),
        *rng_numbers(x, fmt, rounding, rng),
    )
    return values


def amax(x: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.amax`."""
    if not x.is_contiguous():
        x = x.contiguous()
    result = torch.empty((), dtype=torch.float32)
    _core.amax_into(x.data_ptr(), DTYPES[x.dtype], x.numel(), result.data_ptr(), torch.get_num_threads())
    return result


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """See `lowprec.kernels.cast.block_amax`."""
    if x.dtype == torch.float64 or x.numel() == 0:
        return reference.block_amax(x, block)
    if not x.is_contiguous():
        x = x.contiguous()
    (rows, columns), (down, across) = x.shape, block
    result = torch.empty(-(-rows // down), -(-columns // across), dtype=torch.float32)
    threads = torch.get_num_threads()
    _core.block_amax(x.data_ptr(), DTYPES[x.dtype], rows, columns, down, across, result.data_ptr(), threads)
    return result


def tensor_stats(tensors: Sequence[Tensor]) -> Tensor:
    """See `lowprec.kernels.cast.tensor_stats`."""
    dense = [x if x.is_contiguous() else x.contiguous() for x in tensors]
    result = torch.empty(len(dense), 4, dtype=torch.float64)
    addresses, dtypes = [x.data_ptr() for x in dense], [DTYPES[x.dtype] for x in dense]
    sizes = [x.numel() for x in dense]
    _core.tensor_stats(addresses, dtypes, sizes, result.data_ptr(), torch.get_num_threads())
    return result


def transpose(codes: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.transpose`."""
    if not codes.is_contiguous():
        codes = codes.contiguous()
    rows, columns = codes.shape
    result = torch.empty(columns, rows, dtype=codes.dtype)
    threads = torch.get_num_threads()
    _core.transpose(codes.data_ptr(), rows, columns, codes.element_size(), result.data_ptr(), threads)
    return result


def hadamard(x: Tensor, signs: Tensor, down: bool) -> Tensor:
    """The 16-point transform of a matrix along its last axis, or (down) its first."""
    rows, columns = x.shape
    result = torch.empty(rows, columns, dtype=torch.float32)
    threads = torch.get_num_threads()
    signs = signs.to(torch.float32).contiguous()
    _core.hadamard16(x.data_ptr(), DTYPES[x.dtype], rows, columns, signs.data_ptr(), down, result.data_ptr(), threads)
    return result


def hadamard16(x: Tensor, signs: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.hadamard16`."""
    if x.dtype == torch.float64 or x.numel() == 0 or x.dim() == 0:
        return reference.hadamard16(x, signs)
    x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    return hadamard(x.view(-1, x.shape[-1]), signs, False).view(x.shape)
