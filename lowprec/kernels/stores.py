"""How optimizer states, masters and weights are stored: one table, shared by both backends.

    fp32, bf16, fp16      plain elements
    fp16-block            fp16 codes under a power-of-two scale for every 256 elements, so that an unchanged value
                          decodes and encodes to itself
    e4m3-block, e5m2-block, 8bit, 4bit      codes under one fp32 scale for every 256 (4bit: 128) elements
    ...-root              for second moments: holds the square root, so that 8 bits span the squares; a non-zero
                          moment is never stored as zero, because an update divides by it
    e4m3-row, e5m2-row    weights: power-of-two scale for each index of dim 0, so that a bf16 product carries them

`value = code * scale`. Blocks run along the dimensions after the first and never straddle dim 0: slicing a tensor along
dim 0 slices codes and scales alike. The scale of a block is amax / (largest code value), not rounded to a power of two:
a slow moving average moves through its scale even where a step is too small to change a code.

`8bit` is the dynamic map: the position of a code's leading one picks a decade, the bits below it are linear in that
decade. A decade here is three binades, [1/8, 1) of the one above it: the exponent field of a number selects it, and
value = code * slope[decade] + start[decade] needs no table of 256. `4bit` is e2m1 for a first moment, and 1/16 to 16/16
for the root of a second one, which must not be zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lowprec.errors import unknown_name

__all__ = ["RULES", "STORES", "Batch", "Program", "Rounding", "Slot", "Store", "blocks", "matrix", "store"]

Rule = Literal["sgd", "adam", "lion"]
RULES: tuple[str, ...] = ("sgd", "adam", "lion")
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Store:
    """How one tensor is kept.

    Args:
        name: the key in `STORES`.
        code: its number in the native core.
        dtype: torch dtype of the elements or codes.
        element: format of a code: a name of `lowprec.formats`, or "dynamic8", "linear4".
        block: elements under one scale; 0 for none, -1 for a whole row of dim 0.
        root: the square root is stored.
        signed: negative values exist.
        pow2: scales are powers of two.
        top: the largest value of a code.
    """

    name: str
    code: int
    dtype: torch.dtype
    element: str
    block: int = 0
    root: bool = False
    signed: bool = True
    pow2: bool = False
    top: float = 0.0

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.element in ("e2m1", "linear4") else 8 * self.dtype.itemsize


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORES: dict[str, Store] = {
    s.name: s
    for s in (
        Store("fp32", 1, torch.float32, "fp32"),
        Store("bf16", 2, torch.bfloat16, "bf16"),
        Store("fp16", 3, torch.float16, "fp16"),
        Store("fp16-block", 4, torch.float16, "fp16", 256, pow2=True, top=65504.0),
        Store("fp16-block+", 5, torch.float16, "fp16", 256, signed=False, pow2=True, top=65504.0),
        Store("e4m3-block", 6, torch.uint8, "e4m3", 256, top=448.0),
        Store("e5m2-block", 7, torch.uint8, "e5m2", 256, top=57344.0),
        Store("e4m3-root", 8, torch.uint8, "e4m3", 256, root=True, signed=False, top=448.0),
        Store("e5m2-root", 9, torch.uint8, "e5m2", 256, root=True, signed=False, top=57344.0),
        Store("8bit", 10, torch.uint8, "dynamic8", 256, top=1.0),
        Store("8bit-root", 11, torch.uint8, "dynamic8", 256, root=True, signed=False, top=1.0),
        Store("4bit", 12, torch.uint8, "e2m1", 128, top=6.0),
        Store("4bit-root", 13, torch.uint8, "linear4", 128, root=True, signed=False, top=1.0),
        Store("e4m3-row", 14, _E4M3, "e4m3", -1, pow2=True, top=448.0),
        Store("e5m2-row", 15, _E5M2, "e5m2", -1, pow2=True, top=57344.0),
        Store("remainder16", 16, torch.int16, "int16"),
    )
}


def store(name: str) -> Store:
    """Look up a store by its name."""
    if name not in STORES:
        raise unknown_name("store", name, STORES)
    return STORES[name]


@dataclass(frozen=True)
class Program:
    """What one update does: its rule, and how everything it touches is stored (None: there is none).

    Args:
        rule: "sgd", "adam" or "lion"; the coefficients of each stand in `reference.update`.
        weight: store of the weight.
        grad: store of the gradient.
        master: store of the master weight; "remainder16" makes a bf16 weight and 16 bits one exact fp32 value.
        residue: store of the Kahan compensation.
        states: stores of up to three states.
        rounding: how the weight (the master, where there is one) is rounded.
        state_rounding: how states are rounded.
        nesterov: "sgd" only: look ahead.
    """

    rule: Rule
    weight: str
    grad: str
    master: str | None = None
    residue: str | None = None
    states: tuple[str, ...] = ()
    rounding: Rounding = "nearest"
    state_rounding: Rounding = "nearest"
    nesterov: bool = False


class Slot:
    """The tensors of one parameter in one update; a scale accompanies every tensor whose store has scales."""

    __slots__ = (
        "grad", "grad_scale", "master", "master_scale", "nonfinite", "offset", "residue", "residue_scale",
        "scales", "states", "stream", "weight", "weight_scale",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None = None,
        *,
        master: torch.Tensor | None = None,
        master_scale: torch.Tensor | None = None,
        residue: torch.Tensor | None = None,
        residue_scale: torch.Tensor | None = None,
        states: Sequence[torch.Tensor] = (),
        scales: Sequence[torch.Tensor | None] = (),
        stream: int = 0,
        offset: int = 0,
    ) -> None:
        self.weight, self.weight_scale = weight, weight_scale
        self.master, self.master_scale = master, master_scale
        self.residue, self.residue_scale = residue, residue_scale
        self.states, self.scales = list(states), list(scales)
        self.stream, self.offset = stream, offset
        self.grad: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        self.nonfinite = 0


@dataclass
class Batch:
    """Parameters that are updated by one call: one program, one set of coefficients."""

    program: Program
    slots: list[Slot]
    table: Any = field(default=None, repr=False)  # the native backend's table of addresses
    addresses: list[int] | None = None  # of the gradients, for the native backend; None: ask the slots
    spoiled: bool = False  # a slot of the last native update has elements that are not finite


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that blocks are laid out in: dim 0 and everything after it (a vector is one row).

    >>> matrix((4, 3, 5)), matrix((7,)), matrix(())
    ((4, 15), (1, 7), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def blocks(s: Store, cols: int) -> int:
    """Scales in one row."""
    return 1 if s.block < 0 else -(-cols // s.block)
