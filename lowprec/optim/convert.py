"""From torch's optimizers to these, and states both ways."""

from __future__ import annotations

from typing import Any

import torch

from lowprec.optim.adam import Adam
from lowprec.optim.adamw import AdamW
from lowprec.optim.base import LowPrecOptimizer
from lowprec.optim.sgd import SGD
from lowprec.recipe import Recipe

__all__ = ["from_torch"]

_KNOWN: dict[type, type[LowPrecOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}


def from_torch(optimizer: torch.optim.Optimizer, recipe: Recipe, *, seed: int = 0) -> LowPrecOptimizer:
    """The lowprec optimizer that does what a torch optimizer does, with a recipe's states, master and update.

    The new optimizer has the same parameter group dicts (a scheduler made before goes on working).

    Args:
        optimizer: an exact `torch.optim.SGD`, `Adam`, `AdamW`, `Adafactor` or `Muon`, or one of ours (returned as is).
        recipe: says how states and masters are stored and updates rounded.
        seed: key of the stochastic draws.

    Returns:
        The optimizer, with the states the given one has already built up.

    Raises:
        ValueError: if lowprec has no counterpart.
    """
    if isinstance(optimizer, LowPrecOptimizer):
        return optimizer
    kind = _KNOWN.get(type(optimizer))
    if kind is None:
        known = ", ".join(f"torch.optim.{t.__name__}" for t in _KNOWN)
        raise ValueError(f"{type(optimizer).__name__} has no counterpart here; these have: {known}")
    options: dict[str, Any] = {"states": recipe.states, "master": recipe.master, "update": recipe.update}
    groups = optimizer.param_groups
    for group in groups:
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported: the update is one kernel")
        group.update(options, residue=None, min_quantized=4096, state_rounding=None)
        if kind is AdamW:
            group["decoupled"] = True
        else:
            group["decoupled"] = bool(group.get("decoupled_weight_decay", False))
    return kind(groups, lr=optimizer.defaults["lr"], seed=seed, **options)  # type: ignore[call-arg]
