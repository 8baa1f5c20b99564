"""Every number format as one frozen value, in one table.

A format here is data, not code: the bits of sign, exponent and mantissa, the exponent bias and where the special
values live. Everything else (the largest value, the smallest subnormal, every representable number) follows from
these and is computed, never listed, so a row cannot contradict itself. The casts, the native core, the command line
and the tests all read this table; a new row is complete the moment it is here.

Four kinds:

* ``float``   sign, exponent and mantissa: value = (-1)^s * 2^(e - bias) * 1.m, or 2^(1 - bias) * 0.m where e = 0
* ``int``     two's complement: value = code * step (mxint8 has step 1/64); symmetric, so -2^(n-1) is never produced
* ``scale``   an exponent alone: value = 2^(code - bias), as the block scales of MX use
* ``binary``  one sign bit: +1 or -1

How special values are placed differs between vendors and is what `nan` says: ``ieee`` (the top exponent holds
infinities and NaNs), ``all-ones`` (only the code of all ones is NaN, there is no infinity), ``negative-zero`` (the code
that would be -0 is NaN, the "fnuz" formats) and ``none``.

This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lowprec.errors import unknown_name

__all__ = ["Format", "format", "formats", "register_format"]

Kind = Literal["float", "int", "scale", "binary"]
NanStyle = Literal["none", "ieee", "all-ones", "negative-zero"]


@dataclass(frozen=True)
class Format:
    """One number format, described by its bits.

    Args:
        name: the OCP style name, as in "e4m3".
        kind: "float", "int", "scale" or "binary".
        bits: width of a code.
        exponent_bits: width of the exponent field (floats and scales).
        mantissa_bits: width of the stored mantissa (floats).
        bias: exponent bias (floats and scales).
        nan: where NaN is encoded: "none", "ieee" (which also gives infinities), "all-ones", "negative-zero".
        step: distance between neighbours (ints).
        aliases: other names for the same format (torch, ml_dtypes, OCP).

    >>> f = Format("e4m3", "float", 8, exponent_bits=4, mantissa_bits=3, bias=7, nan="all-ones")
    >>> f.max, f.min_normal, f.min_subnormal
    (448.0, 0.015625, 0.001953125)
    """

    name: str
    kind: Kind
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    nan: NanStyle = "none"
    step: float = 1.0
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "float":
            _check_float(self)
        elif self.kind == "int":
            if not 2 <= self.bits <= 16 or self.exponent_bits or self.mantissa_bits or self.nan != "none":
                raise ValueError(f"format {self.name}: an int has 2 to 16 bits, no exponent, no mantissa and no NaN")
            if self.step <= 0 or math.frexp(self.step)[0] != 0.5:
                raise ValueError(f"format {self.name}: step must be a power of two, got {self.step}")
        elif self.kind == "scale":
            if self.bits != self.exponent_bits or self.nan != "all-ones" or self.bits > 8:
                raise ValueError(f"format {self.name}: a scale is all exponent, at most 8 bits, with all ones as NaN")
        elif self.kind == "binary":
            if self.bits != 1:
                raise ValueError(f"format {self.name}: binary has one bit")
        else:
            raise unknown_name("kind of format", self.kind, ["float", "int", "scale", "binary"])

    # -- what follows from the bits ------------------------------------------------------------------------------

    @property
    def has_infinity(self) -> bool:
        """Whether codes for +Inf and -Inf exist."""
        return self.nan == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether a code for NaN exists."""
        return self.nan != "none"

    @property
    def signed(self) -> bool:
        """Whether negative values exist."""
        return self.kind != "scale"

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return self.kind == "float" and self.nan != "negative-zero"

    @property
    def has_zero(self) -> bool:
        """Whether zero is representable (a scale and a sign bit have none)."""
        return self.kind in ("float", "int")

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value, floor(log2(max)); the "emax" of the MX specification."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        if self.kind == "int":
            return ((1 << (self.bits - 1)) - 1) * self.step
        if self.kind == "binary":
            return 1.0
        return _value_of_magnitude(self, self.max_code)

    @property
    def min(self) -> float:
        """The most negative value a cast produces (0 < min for a scale)."""
        return -self.max if self.signed else self.min_normal

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        if self.kind == "int":
            return (1 << (self.bits - 1)) - 1
        if self.kind == "binary":
            return 0
        if self.kind == "scale":
            return (1 << self.bits) - 2
        top = (1 << (self.bits - 1)) - 1
        if self.nan == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - 1 if self.nan == "all-ones" else top

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        if self.kind == "float":
            return math.ldexp(1.0, 1 - self.bias)
        if self.kind == "scale":
            return math.ldexp(1.0, -self.bias)
        return self.step

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        if self.kind == "float":
            return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)
        return self.min_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value (the step of an int; 1 for a scale)."""
        if self.kind == "float":
            return math.ldexp(1.0, -self.mantissa_bits)
        return self.step if self.kind == "int" else 1.0

    @property
    def inf_code(self) -> int | None:
        """The code of +Inf, or None."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.has_infinity else None

    @property
    def nan_code(self) -> int | None:
        """The code a cast writes for NaN (the quiet, positive one where there are several), or None."""
        if self.nan == "none":
            return None
        if self.nan == "negative-zero":
            return 1 << (self.bits - 1)
        if self.kind == "scale":
            return (1 << self.bits) - 1
        if self.nan == "all-ones":
            return (1 << (self.bits - 1)) - 1
        assert self.inf_code is not None
        return self.inf_code | (1 << (self.mantissa_bits - 1))

    @property
    def code_bytes(self) -> int:
        """Bytes of the smallest unsigned integer that holds a code: 1, 2, 4 or 8."""
        return next(n for n in (1, 2, 4, 8) if self.bits <= 8 * n)

    # -- values --------------------------------------------------------------------------------------------------

    def value(self, code: int) -> float:
        """The value of one code.

        >>> format("e2m1").value(0b0111), format("e4m3").value(0xFF)
        (6.0, nan)
        """
        if not 0 <= code < (1 << self.bits):
            raise ValueError(f"{self.name} codes run from 0 to {(1 << self.bits) - 1}, got {code}")
        if self.kind == "int":
            return (code - ((code >> (self.bits - 1)) << self.bits)) * self.step
        if self.kind == "binary":
            return -1.0 if code else 1.0
        if self.kind == "scale":
            return math.nan if code == self.nan_code else math.ldexp(1.0, code - self.bias)
        sign = code >> (self.bits - 1)
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        if self.nan == "negative-zero" and sign and not magnitude:
            return math.nan
        value = _value_of_magnitude(self, magnitude)
        return -value if sign else value

    def values(self) -> Iterator[tuple[int, float]]:
        """Every code with its value, in the order of codes (formats of 16 bits or fewer)."""
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} values; only formats of 16 bits or fewer list them")
        return ((code, self.value(code)) for code in range(1 << self.bits))

    def __str__(self) -> str:
        return self.name


def _check_float(f: Format) -> None:
    if f.bits != 1 + f.exponent_bits + f.mantissa_bits:
        raise ValueError(
            f"format {f.name}: bits must be 1 + exponent_bits + mantissa_bits = "
            f"{1 + f.exponent_bits + f.mantissa_bits}, got {f.bits}"
        )
    if not 1 <= f.exponent_bits <= 11 or not 0 <= f.mantissa_bits <= 52:
        raise ValueError(f"format {f.name}: a float has 1 to 11 exponent bits and 0 to 52 mantissa bits")
    if f.nan not in ("none", "ieee", "all-ones", "negative-zero"):
        raise unknown_name("NaN style", f.nan, ["none", "ieee", "all-ones", "negative-zero"])
    if f.nan == "ieee" and (f.mantissa_bits < 1 or f.exponent_bits < 2):
        raise ValueError(f"format {f.name}: IEEE specials need at least 2 exponent bits and 1 mantissa bit")
    if f.nan == "all-ones" and f.exponent_bits + f.mantissa_bits < 2:
        raise ValueError(f"format {f.name}: too few bits to spare the code of all ones for NaN")
    if not 1 - f.bias - f.mantissa_bits >= -1074 or f.max_exponent > 1023:
        raise ValueError(f"format {f.name}: its values must fit in float64")


def _value_of_magnitude(f: Format, magnitude: int) -> float:
    """Value of a sign-less code of a float or scale format, specials included."""
    if f.kind == "scale":
        return math.ldexp(1.0, magnitude - f.bias)
    exponent, mantissa = magnitude >> f.mantissa_bits, magnitude & ((1 << f.mantissa_bits) - 1)
    top = (1 << f.exponent_bits) - 1
    if f.nan == "ieee" and exponent == top:
        return math.nan if mantissa else math.inf
    if f.nan == "all-ones" and magnitude == (1 << (f.bits - 1)) - 1:
        return math.nan
    if exponent == 0:
        return math.ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
    return math.ldexp(mantissa + (1 << f.mantissa_bits), exponent - f.bias - f.mantissa_bits)


def _float(name: str, e: int, m: int, bias: int, nan: NanStyle, *aliases: str) -> Format:
    return Format(name, "float", 1 + e + m, e, m, bias, nan, aliases=aliases)


# The table. Columns of a float: exponent bits, mantissa bits, bias, NaN style, other names.
_TABLE: dict[str, Format] = {
    f.name: f
    for f in (
        _float("fp64", 11, 52, 1023, "ieee", "float64"),
        _float("fp32", 8, 23, 127, "ieee", "float32"),
        _float("tf32", 8, 10, 127, "ieee", "tensorfloat32"),
        _float("fp16", 5, 10, 15, "ieee", "float16"),
        _float("bf16", 8, 7, 127, "ieee", "bfloat16"),
        _float("e4m3", 4, 3, 7, "all-ones", "e4m3fn", "float8_e4m3fn", "fp8_e4m3"),
        _float("e5m2", 5, 2, 15, "ieee", "float8_e5m2", "fp8_e5m2"),
        _float("e4m3fnuz", 4, 3, 8, "negative-zero", "float8_e4m3fnuz"),
        _float("e5m2fnuz", 5, 2, 16, "negative-zero", "float8_e5m2fnuz"),
        _float("e4m3b11fnuz", 4, 3, 11, "negative-zero", "float8_e4m3b11fnuz"),
        _float("e3m4", 3, 4, 3, "ieee", "float8_e3m4"),
        _float("e3m2", 3, 2, 3, "none", "e3m2fn", "float6_e3m2fn", "fp6_e3m2"),
        _float("e2m3", 2, 3, 1, "none", "e2m3fn", "float6_e2m3fn", "fp6_e2m3"),
        _float("e2m1", 2, 1, 1, "none", "e2m1fn", "float4_e2m1fn", "float4_e2m1fn_x2", "fp4", "fp4_e2m1"),
        Format("e8m0", "scale", 8, 8, 0, 127, "all-ones", aliases=("float8_e8m0fnu", "e8m0fnu", "ue8m0")),
        Format("int8", "int", 8),
        Format("int4", "int", 4),
        Format("int1", "binary", 1, aliases=("binary",)),
        Format("mxint8", "int", 8, step=2.0**-6),
    )
}
_ALIASES: dict[str, str] = {alias: f.name for f in _TABLE.values() for alias in f.aliases}


def formats() -> list[str]:
    """Names of all formats, built-in and registered.

    >>> "e4m3" in formats()
    True
    """
    return list(_TABLE)


def format(name: object) -> Format:
    """Look up a format by its name or an alias, or by a torch or ml_dtypes dtype.

    Args:
        name: a Format (returned as it is), a name such as "e4m3" or "float8_e4m3fn", a `torch.dtype`, or a numpy or
            ml_dtypes dtype or scalar type.

    Returns:
        The frozen Format.

    Raises:
        ValueError: if there is no such format; near matches are listed.

    >>> format("float8_e4m3fn").max
    448.0
    """
    if isinstance(name, Format):
        return name
    key = name if isinstance(name, str) else _dtype_name(name)
    key = key.lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key not in _TABLE:
        raise unknown_name("format", name if isinstance(name, str) else key, _TABLE)
    return _TABLE[key]


def _dtype_name(dtype: object) -> str:
    """The name of a torch, numpy or ml_dtypes dtype without importing any of them."""
    if isinstance(dtype, type):
        return dtype.__name__
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype)


def register_format(new: Format) -> Format:
    """Add a format of your own to the table; every function takes it by name from then on.

    Args:
        new: the format. Its name and aliases must be free.

    Returns:
        The format itself.

    Raises:
        ValueError: if a name is taken.

    >>> register_format(Format("e5m1", "float", 7, 5, 1, 15, "none")).max
    98304.0
    >>> unregister_format("e5m1")
    """
    for name in (new.name, *new.aliases):
        if name in _TABLE or name in _ALIASES:
            raise ValueError(f"a format named {name!r} exists already: choose another name")
    _TABLE[new.name] = new
    _ALIASES.update(dict.fromkeys(new.aliases, new.name))
    return new


def unregister_format(name: str) -> None:
    """Take a registered format out of the table again (for tests and notebooks)."""
    removed = _TABLE.pop(format(name).name)
    for alias in removed.aliases:
        _ALIASES.pop(alias, None)
