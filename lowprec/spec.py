"""What three products need to know of a recipe, resolved for one type of device.

Beside the six casts it holds what follows from them: the engine of each product, which casts serve two products at
once, and what of the input is kept for the backward pass. All of it is fixed when a recipe is applied, so that a
layer's forward pass decides nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

import torch

from lowprec.formats import format as find_format
from lowprec.products import COMPUTE, Engine, engine, orientation_free
from lowprec.recipe import Accumulator, Cast, Delayed, Gemm, Recipe
from lowprec.units import MULTIPLE

__all__ = ["ROLES", "Spec"]

ROLES = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Spec:
    """What the linear function needs of a recipe, resolved for a device; hashable, and a string for compiled graphs."""

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    compute: str
    device: str
    accumulate: str | Accumulator = "fp32"
    codes: bool = False
    delayed: Delayed | None = None
    hardware: bool = True

    @classmethod
    def of(cls, recipe: Recipe, device: str) -> Spec:
        """The spec of a recipe on a type of device."""
        return _spec(recipe, device)

    @functools.cached_property
    def text(self) -> str:
        """The spec as a string that `Spec.parse` reads: what a compiled graph holds."""
        gemms = {role: [None if c is None else str(c) for c in (g.a, g.b)] for role, g in zip(ROLES, self.gemms)}
        rest = {"compute": self.compute, "device": self.device, "codes": self.codes, "hardware": self.hardware}
        accumulate = self.accumulate if isinstance(self.accumulate, str) else dataclasses.asdict(self.accumulate)
        delayed = None if self.delayed is None else dataclasses.asdict(self.delayed)
        return json.dumps({**gemms, **rest, "accumulate": accumulate, "delayed": delayed})

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec of a string.

        >>> spec = Spec(Gemm(Cast("e4m3"), None), Gemm(), Gemm(), "bf16", "cpu", delayed=Delayed(history=16))
        >>> Spec.parse(spec.text) == spec
        True
        """
        return _parse(text)

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        """The casts of output, grad_input and grad_weight."""
        return self.output, self.grad_input, self.grad_weight

    def unit(self, role: str) -> Engine:
        """The engine of one of the three products."""
        return engine(getattr(self, role), self.compute, self.device, self.accumulate, self.hardware)

    def fitting(self, *sizes: int) -> Spec:
        """This spec, or the one without FP8 units where a dimension is not a multiple of what they take."""
        if not self._has_units or not any(size % MULTIPLE for size in sizes):
            return self
        return dataclasses.replace(self, hardware=False)

    @functools.cached_property
    def _has_units(self) -> bool:
        return any(unit.kind == "fp8" for unit in self.units)

    @functools.cached_property
    def units(self) -> tuple[Engine, Engine, Engine]:
        """The engines of output, grad_input and grad_weight."""
        return self.unit("output"), self.unit("grad_input"), self.unit("grad_weight")

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the output."""
        return COMPUTE[self.compute]

    @functools.cached_property
    def keep(self) -> str:
        """What is kept of the input: "operand" (the forward one serves grad_weight), "codes", or "input"."""
        cast = self.grad_weight.b
        if cast is None:
            return "input"
        bits = find_format(cast.format).bits
        if self.codes and bits <= 8 and cast.rounding != "stochastic" and not cast.hadamard:
            return "codes"
        shared = cast == self.output.a and orientation_free(cast) and cast.rounding != "stochastic"
        return "operand" if shared and self.device == "cpu" and self.units[0].kind == self.units[2].kind else "input"

    @functools.cached_property
    def one_weight(self) -> bool:
        """Whether both products of the weight share one cast of it."""
        a, b = self.output.b, self.grad_input.b
        same_dtype = self.units[0].dtype == self.units[1].dtype and self.units[0].kind == self.units[1].kind
        return a == b and orientation_free(a) and same_dtype and (a is None or a.rounding != "stochastic")

    @functools.cached_property
    def one_gradient(self) -> bool:
        """Whether both products of grad_output share one cast of it."""
        a, b = self.grad_input.a, self.grad_weight.a
        same = self.units[1].dtype == self.units[2].dtype and self.units[1].kind == self.units[2].kind
        return a == b and orientation_free(a) and same and (a is None or a.rounding != "stochastic")


@functools.cache
def _spec(recipe: Recipe, device: str) -> Spec:
    codes = recipe.saved == "codes"
    gemms = (recipe.output, recipe.grad_input, recipe.grad_weight)
    return Spec(*gemms, recipe.compute, device, recipe.accumulate, codes, recipe.delayed)


@functools.cache
def _parse(text: str) -> Spec:
    fields = json.loads(text)
    gemms = [Gemm(*(None if word is None else Cast.parse(word) for word in fields.pop(role))) for role in ROLES]
    accumulate, delayed = fields.pop("accumulate"), fields.pop("delayed")
    accumulate = accumulate if isinstance(accumulate, str) else Accumulator(**accumulate)
    rule = None if delayed is None else Delayed(**delayed)
    codes, hardware = fields["codes"], fields["hardware"]
    return Spec(gemms[0], gemms[1], gemms[2], fields["compute"], fields["device"], accumulate, codes, rule, hardware)
