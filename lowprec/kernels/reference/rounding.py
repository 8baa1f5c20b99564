"""Casts, in integer arithmetic that anyone can follow: the definition of every bit.

A finite input is taken apart into an integer significand and a power of two, ``|x| = S * 2^e``, without any floating
point operation, so that no mode of the processor (flush to zero, denormals are zero) can touch it. The target's grid
around x has the spacing ``2^q``; then

    shift = q - e        kept = S >> shift        rest = S mod 2^shift

and one decision, rest against half of 2^shift (or against a random number), says whether the magnitude goes up by one.
Codes of neighbouring magnitudes are neighbouring integers in every format here, so ``kept + up`` carries from the
mantissa into the exponent, and from the subnormals into the normals, by itself. A code past the largest finite one is
an overflow of the *rounded* value, as in IEEE 754. There is one rounding, from the input's own precision.

What a cast makes of special values:

* NaN becomes the format's positive quiet NaN; where the format has none, `round_to` returns NaN and `encode` follows
  its argument ``nan``.
* ``saturate`` sends finite overflow and infinities to the largest value; ``keep-inf`` does so with finite overflow and
  keeps infinities (NaN where the format has none); ``ieee`` overflows to infinity (NaN where there is none), except
  that a rounding directed towards zero stops at the largest value, as IEEE 754 has it.
* A scale format has no zero and no sign: everything from zero to its smallest value becomes that value, a negative
  number becomes NaN. Ties go to the even code there, too.
* A binary format keeps the sign alone (of -0, too, which counts as +1 like +0): no rounding or overflow enters.
* Every NaN in a result is the positive quiet NaN with an empty payload, so that backends can be compared bit for bit.

Stochastic rounding. Philox4x32-10 with the 64-bit seed as key (low, high word) and the counter
(block low, block high, step, tensor). Element i (offset + position in C order) owns R bits: for R <= 16 the top bits
of half-word i % 8 of block i // 8 (low half first), else the top bits of word i % 4 of block i // 4. With
``T = floor(fraction * 2^R + 1/2)`` the magnitude goes up if the bits, as an integer, are below T.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec.formats import Format

__all__ = ["LAYOUT", "Parts", "Rng", "Rounded", "draw_for", "random_bits", "round_parts", "take_apart"]

# dtype of a float -> (integer dtype of the same width, mantissa bits, exponent bias, name of the format)
LAYOUT: dict[torch.dtype, tuple[torch.dtype, int, int, str]] = {
    torch.float64: (torch.int64, 52, 1023, "fp64"),
    torch.float32: (torch.int32, 23, 127, "fp32"),
    torch.float16: (torch.int16, 10, 15, "fp16"),
    torch.bfloat16: (torch.int16, 7, 127, "bf16"),
}
Draw = tuple[Tensor, int] | None  # random bits of every element, and how many they are
_CODE_DTYPE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MASK32 = 0xFFFFFFFF


class Rng(NamedTuple):
    """Where the random bits of stochastic rounding come from.

    Args:
        seed: 64 bits, the key of the generator.
        step: the training step.
        tensor: a number of its own for every tensor that is rounded in a step.
        offset: global index of the first element, for a tensor that is a part of a larger one.
        bits: random bits per element, 1 to 32; None for as many as leave no bias.
    """

    seed: int
    step: int = 0
    tensor: int = 0
    offset: int = 0
    bits: int | None = None


class Parts(NamedTuple):
    """A tensor of floats taken apart: ``(-1)^negative * significand * 2^exponent``, or infinite, or NaN."""

    negative: Tensor
    significand: Tensor
    exponent: Tensor
    infinite: Tensor
    nan: Tensor


class Rounded(NamedTuple):
    """Codes (int64), where the result is NaN, and where a finite value overflowed."""

    codes: Tensor
    nan: Tensor
    overflow: Tensor


def take_apart(x: Tensor) -> Parts:
    """Split floats into sign, integer significand and exponent, by their bits."""
    integer, mantissa_bits, bias, _ = LAYOUT[x.dtype]
    bits = x.contiguous().view(integer).to(torch.int64)
    width = 8 * x.element_size()
    magnitude = bits & ((1 << (width - 1)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    top = (1 << (width - 1 - mantissa_bits)) - 1
    special = exponent == top
    normal = (exponent > 0).to(torch.int64)
    significand = torch.where(special, 0, mantissa | (normal << mantissa_bits))
    power = exponent.clamp(min=1) - (bias + mantissa_bits)
    return Parts(bits < 0, significand, power, special & (mantissa == 0), special & (mantissa != 0))


def _floor_log2(positive: Tensor) -> Tensor:
    """Exponent of the leading bit of integers in [1, 2^53), read from the bits of their float64 image."""
    return (positive.to(torch.float64).view(torch.int64) >> 52) - 1023


def random_bits(count: int, rng: Rng, bits: int, device: torch.device) -> Tensor:
    """The `bits` random bits of each of `count` elements, as int64; see the head of this module."""
    per_block = 8 if bits <= 16 else 4
    first, last = rng.offset // per_block, (rng.offset + count + per_block - 1) // per_block
    words = _philox(torch.arange(first, max(last, first), device=device), rng)
    if per_block == 8:
        words = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    skip = rng.offset - first * per_block
    flat = words.reshape(-1)[skip : skip + count]
    return flat >> ((16 if per_block == 8 else 32) - bits)


def _philox(block: Tensor, rng: Rng) -> Tensor:
    """Philox4x32-10: four 32-bit words for every block number, as int64 of shape [blocks, 4]."""
    c0, c1 = block & _MASK32, (block >> 32) & _MASK32
    c2, c3 = torch.full_like(block, rng.step & _MASK32), torch.full_like(block, rng.tensor & _MASK32)
    k0, k1 = rng.seed & _MASK32, (rng.seed >> 32) & _MASK32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps at 2^64, which keeps all the bits that are read
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return torch.stack([c0, c1, c2, c3], dim=-1)


def default_bits(dtype: torch.dtype, fmt: Format) -> int:
    """Random bits that leave no bias: 16 where a cast never drops more (same exponent range), else 32."""
    same_range = fmt.kind == "float" and fmt.exponent_bits == 8 and fmt.bias == 127 and fmt.mantissa_bits >= 7
    return 16 if same_range and dtype in (torch.float32, torch.bfloat16) else 32


def _round_up(kept_odd: Tensor, rest: Tensor, shift: Tensor, negative: Tensor, rounding: str, draw: Draw) -> Tensor:
    """Whether the magnitude goes up by one: `rest` of `2^shift` was dropped."""
    if rounding == "toward-zero":
        return torch.zeros_like(negative)
    if rounding in ("up", "down"):
        return (rest > 0) & (negative == (rounding == "down"))
    if rounding == "stochastic":
        assert draw is not None
        random, bits = draw
        excess = shift - bits
        down = excess.clamp(min=1, max=62)
        rounded = (rest + (torch.ones_like(rest) << (down - 1))) >> down
        threshold = torch.where(excess > 0, rounded, rest << (-excess).clamp(min=0))
        return random < threshold
    half = torch.ones_like(rest) << (shift.clamp(min=1, max=62) - 1)
    tie = rest == half if rounding == "nearest-away" else (rest == half) & kept_odd
    return (rest > half) | tie


def round_parts(parts: Parts, fmt: Format, rounding: str, overflow: str, draw: Draw = None) -> Rounded:
    """Round to the codes of a format.

    Args:
        parts: the input, taken apart.
        fmt: the target.
        rounding, overflow: as in `encode`.
        draw: random bits per element and how many they are, for stochastic rounding.

    Returns:
        Codes as int64 (0 where the result is NaN and the format has none), the NaN mask, the overflow mask.
    """
    negative, significand, _, infinite, nan = parts
    if fmt.kind == "binary":
        codes = (negative & ((significand > 0) | infinite)).to(torch.int64)
        return Rounded(torch.where(nan, 0, codes), nan, torch.zeros_like(nan))
    magnitude, over = _round_magnitude(parts, fmt, rounding, draw)
    finite = ~(infinite | nan)
    over = over & finite & (significand > 0)
    to_max = over
    if overflow == "ieee":
        inward = rounding == "toward-zero"
        to_max = over & (negative if rounding == "up" else ~negative if rounding == "down" else inward)
    if overflow == "saturate":
        to_max = over | infinite
    beyond = (over | infinite) & ~to_max
    if fmt.inf_code is not None:
        magnitude = torch.where(beyond, fmt.inf_code, magnitude)
    else:
        nan = nan | beyond
    magnitude = torch.where(to_max, fmt.max_code, magnitude)
    if fmt.kind == "scale":
        nan = nan | (negative & ((significand > 0) | infinite))
    codes = _with_sign(magnitude, negative, fmt)
    return Rounded(torch.where(nan, fmt.nan_code or 0, codes), nan, over)


def _round_magnitude(parts: Parts, fmt: Format, rounding: str, draw: Draw) -> tuple[Tensor, Tensor]:
    """The sign-less code with as much exponent range as it needs, and where it passes the largest finite code."""
    negative, significand, exponent, _, _ = parts
    zero = significand == 0
    top = _floor_log2(significand.clamp(min=1)) + exponent
    too_large = top > fmt.max_exponent + 1
    if fmt.kind == "int":
        spacing = torch.full_like(exponent, math.frexp(fmt.step)[1] - 1)
        base = torch.zeros_like(exponent)
    elif fmt.kind == "scale":
        spacing = top
        base = top + fmt.bias - 1  # kept is 1 there: 1 + base is the code
    else:
        lowest = 1 - fmt.bias
        at = top.clamp(min=lowest, max=fmt.max_exponent + 1)
        spacing = torch.maximum(top, torch.full_like(top, lowest)) - fmt.mantissa_bits
        base = (at - lowest) << fmt.mantissa_bits
    shift = spacing - exponent
    right, left = shift.clamp(min=0, max=62), (-shift).clamp(min=0, max=62)
    kept = (significand >> right) << left
    rest = significand & ((torch.ones_like(right) << right) - 1)
    odd = ((base + kept) & 1).bool()
    magnitude = base + kept + _round_up(odd, rest, shift, negative, rounding, draw)
    if fmt.kind == "scale":
        magnitude = torch.where(zero, 0, magnitude).clamp(min=0)
    else:
        magnitude = torch.where(zero, 0, magnitude)
    return magnitude, too_large | (magnitude > fmt.max_code)


def _with_sign(magnitude: Tensor, negative: Tensor, fmt: Format) -> Tensor:
    if fmt.kind == "scale":
        return magnitude
    if fmt.kind == "int":
        return torch.where(negative, -magnitude, magnitude) & ((1 << fmt.bits) - 1)
    sign = -(1 << 63) if fmt.bits == 64 else 1 << (fmt.bits - 1)
    if not fmt.has_negative_zero:
        negative = negative & (magnitude != 0)
    return torch.where(negative, magnitude | sign, magnitude)


def draw_for(x: Tensor, fmt: Format, rounding: str, rng: Rng | None) -> Draw:
    """The random bits of every element of x, or None where the rounding needs none."""
    if rounding != "stochastic":
        return None
    assert rng is not None
    bits = rng.bits if rng.bits is not None else default_bits(x.dtype, fmt)
    return random_bits(x.numel(), rng, bits, x.device).reshape(x.shape), bits


def as_codes(codes: Tensor, fmt: Format) -> Tensor:
    """int64 to the smallest unsigned integer that holds the codes."""
    dtype = _CODE_DTYPE[fmt.code_bytes]
    return codes.view(torch.uint64) if dtype == torch.uint64 else codes.to(dtype)


def from_codes(codes: Tensor) -> Tensor:
    """Codes of any unsigned type as int64 (the bits, for uint64)."""
    return codes.contiguous().view(torch.int64) if codes.dtype == torch.uint64 else codes.to(torch.int64)
