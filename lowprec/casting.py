"""One cast of one tensor, and the two casts of a product: the smallest parts of a recipe, without torch.

A `Cast` is written with the contraction axis last: ``block=(1, 128)`` is 128 elements along the contraction and one
across, ``scale="row"`` is one scale for each slice along the contraction. Whoever applies a cast to an operand whose
contraction axis comes first turns it around. ``value = code * scale``, everywhere.

A cast prints as one word, its element format first and what is not the default after it:

    e4m3:tensor    int8:row    e4m3:1x128:e8m0:pow2    e2m1:1x16:e4m3:stochastic:hadamard
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from lowprec import notation
from lowprec.errors import unknown_name
from lowprec.formats import format as find_format

__all__ = ["Cast", "Gemm"]

Rounding = Literal["nearest", "nearest-away", "toward-zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "keep-inf", "ieee"]
ScaleKind = Literal["none", "tensor", "row", "column", "block"]
ScaleRule = Literal["amax", "pow2", "floor", "ceil", "even", "rceil", "mean"]


@dataclass(frozen=True)
class Cast:
    """How one tensor is brought into a low-precision format.

    Args:
        format: name of the element format.
        scale: what shares a scale: "none", the "tensor", a "row" (along the contraction), a "column" or a "block".
        block: rows and columns of a block, the second along the contraction; only with ``scale="block"``.
        scale_format: "fp32", "e8m0", or "e4m3" (two-level: e4m3 block scales under one fp32 tensor scale).
        rule: how a scale follows from amax. "amax" divides by the largest value, "pow2" rounds that up to a power of
            two (and so does "amax" where the scale is e8m0); "floor", "ceil", "even", "rceil" are the rules of MX;
            "mean" is the mean of |x| (int1 only).
        rounding: how a value between two neighbours is rounded.
        overflow: what becomes of a value past the largest one.
        symmetric: int formats only; False uses the whole range with a zero point.
        hadamard: multiply by the random 16-point Hadamard transform along the contraction first.
        min_block_scale: smallest e4m3 block scale; 0 for none, 2^-6 is torchao's variant of NVFP4.
    """

    format: str
    scale: ScaleKind = "tensor"
    block: tuple[int, int] | None = None
    scale_format: Literal["fp32", "e8m0", "e4m3"] = "fp32"
    rule: ScaleRule = "amax"
    rounding: Rounding = "nearest"
    overflow: Overflow = "saturate"
    symmetric: bool = True
    hadamard: bool = False
    min_block_scale: float = 0.0

    def __post_init__(self) -> None:
        element = find_format(self.format)
        object.__setattr__(self, "format", element.name)
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))
        notation.check_choices(self)
        if element.kind == "scale":
            raise ValueError(f"cast: {element.name} is a format of scales, not of elements")
        if (self.scale == "block") != (self.block is not None):
            raise ValueError(f"cast {element.name}: block=(rows, columns) goes with scale='block', and only with it")
        if self.block is not None and not (len(self.block) == 2 and all(notation.is_count(n) for n in self.block)):
            raise ValueError(f"cast {element.name}: block must be two positive integers, got {self.block}")
        if self.scale_format == "e8m0" and self.rule == "mean":
            raise ValueError(f"cast {element.name}: an e8m0 scale is a power of two, which a mean is not")
        if self.scale_format == "e4m3" and (self.scale != "block" or self.rule != "amax"):
            raise ValueError(f"cast {element.name}: e4m3 scales are two-level: they need scale='block' and rule='amax'")
        if self.rule == "mean" and element.kind != "binary":
            raise ValueError(f"cast {element.name}: rule 'mean' is for int1, whose only magnitude it is")
        if not self.symmetric and element.kind != "int":
            raise ValueError(f"cast {element.name}: only int formats have a zero point; symmetric=False needs one")
        if self.min_block_scale and (self.scale_format != "e4m3" or not self.min_block_scale > 0):
            raise ValueError(f"cast {element.name}: min_block_scale is a positive floor of e4m3 block scales")

    def replace(self, **changes: Any) -> Cast:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two (or there is none)."""
        if self.scale == "none" or self.scale_format == "e8m0":
            return True
        return self.scale_format == "fp32" and self.rule not in ("amax", "mean")

    def __str__(self) -> str:
        """The cast as one word.

        >>> str(Cast("e4m3", scale="block", block=(1, 128), scale_format="e8m0", rule="pow2"))
        'e4m3:1x128:e8m0:pow2'
        """
        words = [self.format, self.scale if self.block is None else f"{self.block[0]}x{self.block[1]}"]
        words += [getattr(self, name) for name, default in _CAST_WORDS.items() if getattr(self, name) != default]
        words += [] if self.symmetric else ["asymmetric"]
        words += ["hadamard"] if self.hadamard else []
        words += [f"min={self.min_block_scale!r}"] if self.min_block_scale else []
        return ":".join(words)

    @classmethod
    def parse(cls, text: str) -> Cast:
        """The cast a word describes; the words after the format may come in any order.

        Raises:
            ValueError: if a word means nothing.

        >>> Cast.parse("int8:row").scale
        'row'
        """
        element, *words = text.split(":")
        found: dict[str, Any] = {}
        for word in words:
            if re.fullmatch(r"\d+x\d+", word):
                found |= {"scale": "block", "block": tuple(int(n) for n in word.split("x"))}
            elif word.startswith("min="):
                found["min_block_scale"] = notation.read_number(word[4:], float)
            else:
                if word not in _CAST_VOCABULARY:
                    raise unknown_name(f"word in the cast {text!r}:", word, ["ROWSxCOLUMNS", *_CAST_VOCABULARY])
                name, value = _CAST_VOCABULARY[word]
                found[name] = value
        return cls(element, **found)


_CAST_WORDS = {"scale_format": "fp32", "rule": "amax", "rounding": "nearest", "overflow": "saturate"}
_CAST_VOCABULARY: dict[str, tuple[str, Any]] = {
    **{word: (name, word) for name in ("scale", *_CAST_WORDS) for word in notation.choices(Cast, name)},
    "asymmetric": ("symmetric", False),
    "hadamard": ("hadamard", True),
}
del _CAST_VOCABULARY["block"]


@dataclass(frozen=True)
class Gemm:
    """The casts of a product's two operands, in the order of the equations at the head of this module."""

    a: Cast | None = None
    b: Cast | None = None

    def __post_init__(self) -> None:
        for operand in (self.a, self.b):
            if operand is not None and not isinstance(operand, Cast):
                raise TypeError(f"a Gemm holds two casts or None, got {operand!r}")

    def __str__(self) -> str:
        """The product as one word, "-" for an operand that is not cast.

        >>> str(Gemm(Cast("int8", scale="row")))
        'int8:row*-'
        """
        return "*".join("-" if cast is None else str(cast) for cast in (self.a, self.b))

    @classmethod
    def parse(cls, text: str) -> Gemm:
        """The product a word describes; a single "-" casts neither operand.

        >>> Gemm.parse("int8:row*-").b is None
        True
        """
        parts = ["-", "-"] if text == "-" else text.split("*")
        if len(parts) != 2:
            raise ValueError(f"a product is written CAST*CAST with '-' for none, got {text!r}")
        return cls(*(None if part == "-" else Cast.parse(part) for part in parts))
