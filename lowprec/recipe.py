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

Values are checked when they are made and never changed afterwards. `Recipe.replace` returns a new one. Each prints as
one word or one line, and parses from it (`lowprec.notation` has the grammar):

    e4m3:1x128:e8m0:pow2                            a cast
    e4m3:tensor*e5m2:tensor                         the two casts of a product
    name=mine compute=bf16 output=e4m3:row*e4m3:row a recipe; what is not named has the default of `Recipe`
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lowprec import notation
from lowprec.casting import Cast, Gemm
from lowprec.errors import unknown_name
from lowprec.op_table import OpRule

__all__ = ["ACCUMULATORS", "Accumulator", "Cast", "Delayed", "Gemm", "LossScale", "OpRule", "Recipe", "Rule"]

STATE_FORMATS = ("fp32", "bf16", "fp16", "fp8", "e5m2", "8bit", "4bit")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


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

    def __post_init__(self) -> None:
        notation.check_choices(self)
        if not (notation.is_count(self.history) and notation.is_count(self.interval)):
            raise ValueError(f"delayed scaling: history and interval are positive integers, got {self}")


@dataclass(frozen=True)
class Accumulator:
    """A tensor core's sum: how many products are aligned at once and how many bits survive.

    Args:
        k_step: products added in one instruction.
        fraction_bits: fraction bits kept after alignment to the largest exponent; the rest is truncated.
        output_mantissa: mantissa bits of the result of an instruction.
        promote_every: elements of K after which the partial sum is added to an fp32 one; 0 for never.

    >>> ACCUMULATORS["hopper-fp8"]
    Accumulator(k_step=32, fraction_bits=13, output_mantissa=13, promote_every=0)
    """

    k_step: int
    fraction_bits: int
    output_mantissa: int
    promote_every: int = 0

    def __post_init__(self) -> None:
        if not (notation.is_count(self.k_step) and self.k_step <= 256):
            raise ValueError(f"accumulator: k_step must be 1 to 256 products, got {self.k_step}")
        if not (notation.is_count(self.fraction_bits) and self.fraction_bits <= 43):
            raise ValueError(f"accumulator: fraction_bits must be 1 to 43, got {self.fraction_bits}")
        if not (notation.is_count(self.output_mantissa) and self.output_mantissa <= 23):
            raise ValueError(f"accumulator: output_mantissa must be 1 to 23, got {self.output_mantissa}")
        if self.promote_every and (not notation.is_count(self.promote_every) or self.promote_every % self.k_step):
            raise ValueError(
                f"accumulator: promote_every must be a multiple of k_step = {self.k_step}, got {self.promote_every}"
            )


# What is known of real tensor cores: products an instruction aligns, fraction bits kept, mantissa of its result. The
# "-promoted" rows add the partial sum to fp32 registers every 128 elements, as DeepSeek's kernels do on Hopper.
ACCUMULATORS: dict[str, Accumulator] = {
    "volta": Accumulator(4, 23, 23),
    "ampere": Accumulator(8, 24, 23),
    "hopper": Accumulator(16, 25, 23),
    "hopper-fp8": Accumulator(32, 13, 13),
    "hopper-fp8-promoted": Accumulator(32, 13, 13, 128),
    "blackwell": Accumulator(16, 25, 23),
    "blackwell-fp8": Accumulator(32, 25, 23),
    "blackwell-fp4": Accumulator(64, 35, 23),
}


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

    def __post_init__(self) -> None:
        notation.check_choices(self)
        if not (self.init > 0 and math.isfinite(self.init)):
            raise ValueError(f"loss scale: init must be positive and finite, got {self.init}")
        if not (self.growth >= 1 and 0 < self.backoff <= 1):
            raise ValueError("loss scale: growth is at least 1 and backoff between 0 and 1")
        if not (notation.is_count(self.window) and notation.is_count(self.hysteresis)):
            raise ValueError("loss scale: window and hysteresis are positive integers")


@dataclass(frozen=True)
class Rule:
    """Modules whose name matches ``glob`` follow another recipe, or stay high precision (``recipe=None``)."""

    glob: str
    recipe: str | None = None

    def __post_init__(self) -> None:
        _check_glob(self.glob)
        if self.recipe is not None and not _NAME.fullmatch(self.recipe):
            raise ValueError(f"rule for {self.glob}: give a recipe by its name, got {self.recipe!r}")

    def __str__(self) -> str:
        """The rule as one word: "blocks.*->mxfp8", or "head->high" for high precision."""
        return f"{self.glob}->{self.recipe or 'high'}"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule a word describes.

        >>> Rule.parse("head->high")
        Rule(glob='head', recipe=None)
        """
        glob, arrow, recipe = text.partition("->")
        if not arrow or not recipe:
            raise ValueError(f"a rule is written GLOB->RECIPE, or GLOB->high, got {text!r}")
        return cls(glob, None if recipe == "high" else recipe)


@dataclass(frozen=True)
class Recipe:
    """Everything about the precision of a training step.

    Args:
        name: the name it is listed under.
        compute: dtype of activations and of operands that are not cast: "fp32", "tf32", "bf16", "fp16".
        output, grad_input, grad_weight: the casts of the three products.
        accumulate: "fp32", the name of an accumulator model, or an `Accumulator`.
        policy: op policy: "amp" (the table of `lowprec.op_table`), "uniform" (every op in ``compute``).
        attention_pv: the product of attention's probabilities with V: "low" (compute dtype) or "high" (fp32).
        rnn: the products inside LSTM, GRU and RNN cells: "low" (as a linear layer's) or "high" (fp32).
        ops: rules of one's own for single ops, before the table's.
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
        note: one line for the listing; it is no part of what the recipe is, so equality ignores it.

    >>> r = Recipe("mine", compute="bf16", output=Gemm(Cast("int8", scale="row"), Cast("int8", scale="row")))
    >>> print(r)
    name=mine compute=bf16 output=int8:row*int8:row
    >>> Recipe.parse(str(r)) == r
    True
    """

    name: str
    compute: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    accumulate: str | Accumulator = "fp32"
    policy: Literal["amp", "uniform"] = "amp"
    attention_pv: Literal["low", "high"] = "low"
    rnn: Literal["low", "high"] = "low"
    ops: tuple[OpRule, ...] = ()
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
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("states", "skip", "rules", "ops"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise TypeError(f"recipe {self.name}: {name} is a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a recipe's name is letters, digits and . _ + -, got {self.name!r}")
        notation.check_choices(self, f"recipe {self.name}: ")
        _check_recipe(self)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed.

        >>> Recipe("mine").replace(compute="bf16").compute
        'bf16'
        """
        for name in changes.keys() - {f.name for f in dataclasses.fields(self)}:
            raise unknown_name("field of a recipe", name, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **changes)

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The three products by name, in the order of the equations."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    @property
    def casts(self) -> dict[str, Cast | None]:
        """The six casts by product and operand, as in "grad_input.weight".

        >>> list(Recipe("mine").casts)[:3]
        ['output.input', 'output.weight', 'grad_input.grad_output']
        """
        operands = {
            "output": ("input", "weight"),
            "grad_input": ("grad_output", "weight"),
            "grad_weight": ("grad_output", "input"),
        }
        return {
            f"{gemm}.{operand}": cast
            for gemm, names in operands.items()
            for operand, cast in zip(names, (self.gemms[gemm].a, self.gemms[gemm].b))
        }

    @property
    def quantized(self) -> bool:
        """Whether any operand of any product is cast."""
        return any(cast is not None for cast in self.casts.values())

    @property
    def accumulator(self) -> Accumulator | None:
        """The accumulator model, or None for plain fp32 sums."""
        if isinstance(self.accumulate, Accumulator):
            return self.accumulate
        return None if self.accumulate == "fp32" else ACCUMULATORS[self.accumulate]

    def __str__(self) -> str:
        """The recipe as one line, which `parse` and `lowprec.recipe` read."""
        return notation.write_fields(self, skip=("note",))

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe that one line of ``field=value`` describes.

        Raises:
            ValueError: if a field or a value is unknown.
        """
        return cls(**notation.read_fields(cls, text.split()))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain dicts, lists, strings and numbers, for JSON."""
        return {f.name: notation.to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Recipe:
        """The recipe `to_dict` wrote.

        >>> r = Recipe("mine", states=("fp8", "fp16"))
        >>> Recipe.from_dict(r.to_dict()) == r
        True
        """
        return cls(**notation.from_plain(cls, plain))


def _check_glob(glob: str) -> None:
    if not isinstance(glob, str) or not glob or re.search(r"\s|\||->", glob):
        raise ValueError(f"a glob of module names has no blanks, no '|' and no '->', got {glob!r}")


def _check_recipe(r: Recipe) -> None:
    """What must hold between the fields of one recipe."""
    where = f"recipe {r.name}: "
    for name, gemm in r.gemms.items():
        if not isinstance(gemm, Gemm):
            raise TypeError(f"{where}{name} must be a Gemm, got {gemm!r}")
    if not isinstance(r.accumulate, Accumulator) and r.accumulate not in ("fp32", *ACCUMULATORS):
        raise unknown_name("accumulator", r.accumulate, ["fp32", *ACCUMULATORS])
    if len(r.states) != 2:
        raise ValueError(f"{where}states names the format of the first and the second state, got {r.states}")
    for state in r.states:
        if state not in STATE_FORMATS:
            raise unknown_name(f"format of an optimizer state in {where.strip()}", state, STATE_FORMATS)
    if r.communication not in ("fp32", "bf16", "fp16", "fp8"):
        raise unknown_name(f"communication dtype in {where.strip()}", r.communication, ["fp32", "bf16", "fp16", "fp8"])
    if r.weights == "fp32" and r.master is not None:
        raise ValueError(f"{where}fp32 weights are their own master, so master must be None, got {r.master!r}")
    if r.master == "bf16+16" and r.weights != "bf16":
        raise ValueError(f"{where}master 'bf16+16' keeps the other 16 bits of bf16 weights, not of {r.weights}")
    if r.weights == "fp8" and r.master is None:
        raise ValueError(f"{where}fp8 weights cannot take small updates: give them a master, 'fp16' or 'fp32'")
    if not 0 <= r.high_last_fraction < 1:
        raise ValueError(f"{where}high_last_fraction is a share between 0 and 1, got {r.high_last_fraction}")
    if r.delayed is not None and not any(c is not None and c.scale == "tensor" for c in r.casts.values()):
        raise ValueError(f"{where}delayed scaling is for casts with one scale a tensor, and there are none")
    for glob in r.skip:
        _check_glob(glob)
    for name, cls in (("rules", Rule), ("ops", OpRule)):
        for rule in getattr(r, name):
            if not isinstance(rule, cls):
                raise TypeError(f"{where}{name} holds {cls.__name__} values, got {rule!r}")
