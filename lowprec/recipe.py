"""What a recipe is: one frozen table, without torch.

A training precision is more than a dtype. A linear layer computes three products, and each has two operands that may
be cast, each in its own way:

    output      = input       @ weight^T        contracts over features in
    grad_input  = grad_output @ weight          contracts over features out
    grad_weight = grad_output^T @ input         contracts over tokens

so a recipe holds six casts, and beside them what the rest of a step does: where sums are accumulated, which dtype the
other ops see, where weights, masters, gradients and optimizer states live and how updates are rounded, how the loss is
scaled, and which modules are treated differently.

Conventions:

* ``None`` in place of a Cast means: this operand stays in the compute dtype.
* A `Cast` is written with the contraction axis last. ``block=(1, 128)`` is 128 elements along the contraction and one
  across; ``scale="row"`` is one scale for each slice along the contraction. Whoever applies a cast to an operand whose
  contraction axis comes first turns it around.
* ``value = code * scale``, everywhere.

Values are never changed after construction. `Recipe.replace` returns a new one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Accumulator", "Cast", "Delayed", "Gemm", "LossScale", "Recipe", "Rule"]

Rounding = Literal["nearest", "nearest-away", "toward-zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "keep-inf", "ieee"]
ScaleKind = Literal["none", "tensor", "row", "column", "block"]
ScaleRule = Literal["amax", "pow2", "floor", "ceil", "even", "rceil"]


@dataclass(frozen=True)
class Cast:
    """How one tensor is brought into a low-precision format.

    Args:
        format: name of the element format.
        scale: what shares a scale: "none", the "tensor", a "row" (along the contraction), a "column" or a "block".
        block: rows and columns of a block, the second along the contraction; only with ``scale="block"``.
        scale_format: "fp32", "e8m0", or "e4m3" (two-level: e4m3 block scales under one fp32 tensor scale).
        rule: how a scale follows from amax. "amax" divides by the largest value, "pow2" rounds that up to a power of
            two; "floor", "ceil", "even", "rceil" are the rules of MX.
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

    def replace(self, **changes: Any) -> Cast:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Gemm:
    """The casts of a product's two operands, in the order of the equations at the head of this module."""

    a: Cast | None = None
    b: Cast | None = None


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: the scale of a step follows from the amax values of earlier steps.

    Args:
        history: how many past amax values are kept.
        margin: the scale leaves 2^margin of headroom.
        interval: recompute the scale every that many steps.
        algo: "max" over the history or the "most_recent" value.
        pow2: round the scale to a power of two (MS-AMP).
    """

    history: int = 1024
    margin: int = 0
    interval: int = 1
    algo: Literal["max", "most_recent"] = "max"
    pow2: bool = False


@dataclass(frozen=True)
class Accumulator:
    """A tensor core's sum: how many products are aligned at once and how many bits survive.

    Args:
        k_step: products added in one instruction.
        fraction_bits: fraction bits kept after alignment to the largest exponent; the rest is truncated.
        output_mantissa: mantissa bits of the result of an instruction.
        promote_every: elements of K after which the partial sum is added to an fp32 one; 0 for never.
    """

    k_step: int
    fraction_bits: int
    output_mantissa: int
    promote_every: int = 0


@dataclass(frozen=True)
class LossScale:
    """Loss scaling: "none", "static" (always ``init``) or "dynamic"; `lowprec.loss_scale` explains the fields."""

    kind: Literal["none", "static", "dynamic"] = "none"
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    floor: float | None = None
    cap: float | None = None
    hysteresis: int = 1


@dataclass(frozen=True)
class Rule:
    """Modules whose name matches ``glob`` follow another recipe, or stay high precision (``recipe=None``)."""

    glob: str
    recipe: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything about the precision of a training step.

    Args:
        name: the name it is listed under.
        compute: dtype of activations and of operands that are not cast: "fp32", "tf32", "bf16", "fp16".
        output, grad_input, grad_weight: the casts of the three products.
        accumulate: "fp32", the name of an accumulator model, or an `Accumulator`.
        policy: op policy: "amp" (the table of `lowprec.policy`), "uniform" (every op in ``compute``).
        delayed: delayed scaling for per-tensor casts, or None for current scaling.
        saved: activations kept for backward "high" (in compute dtype) or as "codes" (8 bits and scales).
        weights: where weights live: "fp32", "bf16", "fp16", "fp8".
        master: master weights beside them: None, "fp32", "fp16" (scaled), "bf16+16" (16 remainder bits).
        gradients: where weight gradients live: "fp32", "bf16", "fp16", "fp8".
        communication: dtype of gradient all-reduce.
        states: formats of the optimizer's first and second state: "fp32", "bf16", "fp16", "fp8", "8bit", "4bit".
        update: rounding of the weight update: "nearest", "kahan", "stochastic".
        loss_scale: loss scaling.
        norms_fp32: keep normalisation layers' parameters fp32 when ``weights`` is lower.
        embeddings: "keep" (embedding tables follow ``weights``) or "fp32".
        first_layer, last_layer: treatment of the first and last product: "same" or "high" (compute dtype).
        high_last_fraction: share of the last blocks that stays in compute dtype (NVFP4: 0.15).
        skip: globs of modules that stay as they are.
        rules: modules that follow another recipe.
        note: one line for the listing.
    """

    name: str
    compute: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    accumulate: str | Accumulator = "fp32"
    policy: Literal["amp", "uniform"] = "amp"
    delayed: Delayed | None = None
    saved: Literal["high", "codes"] = "high"
    weights: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    master: Literal["fp32", "fp16", "bf16+16"] | None = None
    gradients: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    communication: str = "fp32"
    states: tuple[str, str] = ("fp32", "fp32")
    update: Literal["nearest", "kahan", "stochastic"] = "nearest"
    loss_scale: LossScale = field(default_factory=LossScale)
    norms_fp32: bool = True
    embeddings: Literal["keep", "fp32"] = "keep"
    first_layer: Literal["same", "high"] = "same"
    last_layer: Literal["same", "high"] = "same"
    high_last_fraction: float = 0.0
    skip: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    note: str = ""

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
