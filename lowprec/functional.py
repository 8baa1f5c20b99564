"""Low-precision products for code that calls functions instead of modules.

Both follow a recipe's three products and are differentiable. They keep no state: delayed scaling needs a module, so a
recipe with it is refused here.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from lowprec.linear import Memory, apply_linear
from lowprec.recipe import Recipe
from lowprec.recipes import recipe as find_recipe
from lowprec.spec import Spec

__all__ = ["linear", "matmul"]

_step = torch.zeros((), dtype=torch.int64)


def _spec(recipe: Recipe | str, device: str) -> Spec:
    chosen = find_recipe(recipe)
    if chosen.delayed is not None:
        raise ValueError(
            f"{chosen.name} has delayed scaling, which needs a module to keep its history: apply it to one, or pass "
            "recipe.replace(delayed=None)."
        )
    return Spec.of(chosen, device)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe | str, seed: int = 0) -> Tensor:
    """`torch.nn.functional.linear` with the casts of a recipe.

    Args:
        input: (..., features in).
        weight: (features out, features in).
        bias: (features out), or None.
        recipe: a Recipe or its name.
        seed: key of stochastic rounding, where the recipe has it; every call draws anew.

    Returns:
        (..., features out), in the recipe's compute dtype.

    >>> linear(torch.ones(2, 4), torch.ones(3, 4), recipe="fp8")
    tensor([[4., 4., 4.],
            [4., 4., 4.]], dtype=torch.bfloat16)
    """
    spec = _spec(recipe, input.device.type)
    _check(input, weight.shape[-1], "weight")
    return apply_linear(input, weight, bias, spec, Memory(seed=seed & (2**63 - 1), step=_step))


def matmul(a: Tensor, b: Tensor, *, recipe: Recipe | str, seed: int = 0) -> Tensor:
    """`torch.matmul` with the casts of a recipe: `a` as the input, `b` transposed as the weight.

    Args:
        a: (..., m, k).
        b: (k, n), or (..., k, n) with the same leading dimensions as `a`.
        recipe: a Recipe or its name.
        seed: as in `linear`.

    Returns:
        (..., m, n), in the recipe's compute dtype.

    >>> matmul(torch.ones(2, 4), torch.ones(4, 3), recipe="int8").shape
    torch.Size([2, 3])
    """
    spec = _spec(recipe, a.device.type)
    _check(a, b.shape[-2] if b.dim() > 1 else -1, "second operand")
    memory = Memory(seed=(seed ^ zlib.crc32(b"matmul")) & (2**63 - 1), step=_step)
    if b.dim() == 2:
        return apply_linear(a, b.t(), None, spec, memory)
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"leading dimensions must be the same, got {tuple(a.shape)} and {tuple(b.shape)}.")
    pairs = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    made = [apply_linear(x, y.t(), None, spec, memory) for x, y in pairs]
    return torch.stack(made).reshape(*a.shape[:-1], b.shape[-1])


def _check(a: Tensor, inner: int, what: str) -> None:
    if a.dim() < 1 or a.shape[-1] != inner:
        raise ValueError(
            f"the {what} contracts over {inner} elements, the input has {tuple(a.shape)}: they must agree."
        )
