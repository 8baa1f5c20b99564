"""Elementwise kernels in pure torch: casts, packing, reductions and the 16-point Hadamard transform.

What a cast means stands at the head of `lowprec.kernels.reference.rounding`. Decoding is a table for formats of 16 bits
or fewer and exact float64 arithmetic for wider ones, then one rounding into the dtype asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec.formats import Format, format
from lowprec.kernels.reference.rounding import LAYOUT, Rng, as_codes, draw_for, from_codes, round_parts, take_apart

__all__ = [
    "amax",
    "block_amax",
    "decode",
    "encode",
    "hadamard16",
    "pack",
    "round_to",
    "tensor_stats",
    "transpose",
    "unpack",
]


def encode(
    x: Tensor,
    fmt: Format,
    rounding: str = "nearest",
    overflow: str = "saturate",
    nan: str = "error",
    rng: Rng | None = None,
) -> Tensor:
    """See `lowprec.kernels.cast.encode`."""
    x = x.detach()
    rounded = round_parts(take_apart(x), fmt, rounding, overflow, draw_for(x, fmt, rounding, rng))
    codes = rounded.codes
    if not fmt.has_nan:
        if nan == "error" and bool(rounded.nan.any()):
            raise ValueError(no_nan_message(fmt, int(rounded.nan.sum())))
        if nan == "max":
            codes = torch.where(rounded.nan, fmt.max_code, codes)
    return as_codes(codes, fmt)


def no_nan_message(fmt: Format, count: int) -> str:
    """The sentence for a NaN (or an infinity that must not saturate) that a format cannot hold."""
    return (
        f"{fmt.name} has no NaN, and {count} value{'s' if count > 1 else ''} would become one: pass nan='zero' or "
        f"nan='max', or overflow='saturate' for infinities."
    )


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `lowprec.kernels.cast.decode`."""
    if fmt.bits <= 16:
        return _table(fmt, dtype, codes.device)[from_codes(codes)]
    return to_dtype(_wide_values(from_codes(codes), fmt), dtype)


@functools.lru_cache(maxsize=256)
def _table(fmt: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.tensor([value for _, value in fmt.values()], dtype=torch.float64, device=device)
    return to_dtype(values, dtype)


def _wide_values(codes: Tensor, fmt: Format) -> Tensor:
    """Values of a float format of more than 16 bits, exactly, as float64."""
    magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
    negative = ((codes >> (fmt.bits - 1)) & 1).bool()
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    normal = (exponent > 0).to(torch.int64)
    power = exponent.clamp(min=1) - (fmt.bias + fmt.mantissa_bits)
    near = power.clamp(min=-1022, max=1023)
    value = (mantissa | (normal << fmt.mantissa_bits)).to(torch.float64) * power_of_two(near)
    value = value * power_of_two(power - near)
    if fmt.nan == "ieee":
        value = torch.where(exponent == (1 << fmt.exponent_bits) - 1, math.inf, value)
        assert fmt.inf_code is not None
        value = torch.where(magnitude > fmt.inf_code, math.nan, value)
    elif fmt.nan == "all-ones":
        value = torch.where(magnitude == (1 << (fmt.bits - 1)) - 1, math.nan, value)
    value = torch.where(negative & ~value.isnan(), -value, value)
    if fmt.nan == "negative-zero":
        value = torch.where(negative & (magnitude == 0), math.nan, value)
    return value


def power_of_two(exponent: Tensor) -> Tensor:
    """2^k as float64 for k in [-1022, 1023]."""
    return ((exponent + 1023) << 52).view(torch.float64)


def to_dtype(exact: Tensor, dtype: torch.dtype, rounding: str = "nearest", overflow: str = "ieee") -> Tensor:
    """float64 to another float dtype with one rounding (torch goes through float32), NaN canonical."""
    integer, _, _, name = LAYOUT[dtype]
    target = format(name)
    codes = round_parts(take_apart(exact), target, rounding, overflow).codes
    if target.bits < 64:
        codes = torch.where(codes >= 1 << (target.bits - 1), codes - (1 << target.bits), codes)
    return codes.to(integer).view(dtype)


def round_to(
    x: Tensor, fmt: Format, rounding: str = "nearest", overflow: str = "saturate", rng: Rng | None = None
) -> Tensor:
    """See `lowprec.kernels.cast.round_to`."""
    x = x.detach()
    rounded = round_parts(take_apart(x), fmt, rounding, overflow, draw_for(x, fmt, rounding, rng))
    values = decode(as_codes(rounded.codes, fmt), fmt, torch.float64)
    values = torch.where(rounded.nan, math.nan, values)
    # towards zero, without overflow: only where x's own dtype cannot hold the value, as 65504 in bf16
    return to_dtype(values, x.dtype, "toward-zero", "keep-inf")


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `lowprec.kernels.cast.pack`."""
    stream = (codes.reshape(-1, 1) >> torch.arange(bits, device=codes.device, dtype=torch.uint8)) & 1
    stream = stream.reshape(-1)
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).reshape(-1, 8)
    return (stream << torch.arange(8, device=codes.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """See `lowprec.kernels.cast.unpack`."""
    count = math.prod(shape)
    stream = (packed.reshape(-1, 1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    codes = stream.reshape(-1)[: count * bits].reshape(-1, bits)
    weights = torch.arange(bits, device=packed.device, dtype=torch.uint8)
    return (codes << weights).sum(-1, dtype=torch.uint8).reshape(tuple(shape))


def _magnitudes(x: Tensor) -> Tensor:
    """|x| as integers that order as the values do, NaN above everything."""
    integer = LAYOUT[x.dtype][0]
    bits = x.detach().contiguous().view(integer)
    return bits & torch.iinfo(integer).max


def _as_amax(top: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes (integers) as fp32, with the canonical NaN."""
    value = top.view(dtype).to(torch.float32)
    return torch.where(value.isnan(), torch.full_like(value, math.nan), value)


def amax(x: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.amax`."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return _as_amax(_magnitudes(x).max(), x.dtype)


def group_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest |x| of every block of a matrix in x's own dtype, NaN kept; blocks at the edges are smaller."""
    rows, columns = x.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    if x.numel() == 0:
        return torch.zeros((down, across), dtype=x.dtype, device=x.device)
    padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
    top = torch.nn.functional.pad(_magnitudes(x), padding)
    top = top.reshape(down, block[0], across, block[1]).amax(dim=(1, 3))
    return top.view(x.dtype)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """See `lowprec.kernels.cast.block_amax`."""
    value = group_amax(x, block).to(torch.float32)
    return torch.where(value.isnan(), torch.full_like(value, math.nan), value)


def tensor_stats(tensors: Sequence[Tensor]) -> Tensor:
    """See `lowprec.kernels.cast.tensor_stats`."""
    rows = []
    for x in tensors:
        wide = x.detach().to(torch.float64)
        numbers = [x.isinf().sum(), x.isnan().sum(), wide.square().sum(), amax(x)]
        rows.append(torch.stack([n.to(torch.float64) for n in numbers]))
    return torch.stack(rows) if rows else torch.zeros((0, 4), dtype=torch.float64)


def hadamard16(x: Tensor, signs: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.hadamard16`."""
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    whole = wide.shape[-1] // 16 * 16
    y = (wide[..., :whole] * signs.to(wide.dtype).repeat(whole // 16)).reshape(*wide.shape[:-1], whole // 16, 16)
    for half in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], 16 // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([first + second, first - second], dim=-2).reshape(y.shape)
    return torch.cat([(y * 0.25).reshape(*wide.shape[:-1], whole), wide[..., whole:]], dim=-1)


def transpose(codes: Tensor) -> Tensor:
    """See `lowprec.kernels.cast.transpose`."""
    return codes.t().contiguous()
