"""From torch's optimizers to these, and states both ways."""

from __future__ import annotations

from typing import Any

import torch

from lowprec.kernels import optim as kernels
from lowprec.optim.adafactor import Adafactor
from lowprec.optim.adam import Adam
from lowprec.optim.adamw import AdamW
from lowprec.optim.base import LowPrecOptimizer
from lowprec.optim.muon import Muon
from lowprec.optim.sgd import SGD
from lowprec.recipe import Recipe

__all__ = ["from_torch", "load_torch_state", "torch_state"]

_KNOWN: dict[type, type[LowPrecOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.Adafactor: Adafactor,
}

if hasattr(torch.optim, "Muon"):
    _KNOWN[torch.optim.Muon] = Muon


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
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported: the update is one kernel")
    for group in optimizer.param_groups:
        group.update(options, residue=None, min_quantized=4096, state_rounding=None)
        group["decoupled"] = kind in (AdamW, Adafactor, Muon) or bool(group.get("decoupled_weight_decay", False))
    if kind is Adafactor:
        options.pop("states")
    made = kind(optimizer.param_groups, lr=optimizer.defaults["lr"], seed=seed, **options)  # type: ignore[call-arg]
    for key in ("foreach", "fused", "capturable", "differentiable"):  # choices of torch's that mean nothing here
        for group in made.param_groups:
            group.pop(key, None)
    if optimizer.state:
        load_torch_state(made, optimizer.state_dict())
    return made


def torch_state(optimizer: LowPrecOptimizer) -> dict[str, Any]:
    """The state dict that torch's optimizer of the same name loads: fp32 states, no masters.

    >>> w = torch.nn.Parameter(torch.ones(2, 2)); w.grad = torch.ones(2, 2)
    >>> ours = AdamW([w], states="bf16"); ours.step()
    >>> torch.optim.AdamW([w]).load_state_dict(torch_state(ours))
    """
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group in optimizer.param_groups:
        indices = []
        for p in group["params"]:
            if p in optimizer.state:
                state[number] = _plain(optimizer, p, group)
            indices.append(number)
            number += 1
        kept = {k: v for k, v in group.items() if k != "params" and k not in _OURS}
        groups.append({**kept, **_torch_only(optimizer), "params": indices})
    return {"state": state, "param_groups": groups}


_OURS = ("states", "master", "update", "residue", "min_quantized", "state_rounding", "products", "decoupled")


def _torch_only(optimizer: LowPrecOptimizer) -> dict[str, Any]:
    """What torch's groups have and ours have not."""
    common = {"foreach": None, "differentiable": False}
    if isinstance(optimizer, Adam):
        decoupled = isinstance(optimizer, AdamW)
        return {**common, "fused": None, "capturable": False, "decoupled_weight_decay": decoupled}
    if isinstance(optimizer, Muon):
        return {}
    return {"foreach": None} if isinstance(optimizer, Adafactor) else {**common, "fused": None}


def _plain(optimizer: LowPrecOptimizer, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    own, program = optimizer.state[p], optimizer._program(p, group)
    state: dict[str, Any] = {} if isinstance(optimizer, (SGD, Muon)) else {"step": torch.tensor(float(own["step"]))}
    for name, kept in zip(optimizer._states(group), program.states, strict=True):
        state[name] = kernels.decode(own[name], own.get(name + "_scale"), kept, p.shape).clone()
    for name in ("row_var", "col_var", "variance"):
        if name in own:
            state[name] = own[name].clone()
    return state


def load_torch_state(optimizer: LowPrecOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict of torch's optimizer of the same name, encoding its states as these settings say.

    Raises:
        ValueError: if groups, names or shapes do not fit; nothing has been changed then.
    """
    groups = state_dict["param_groups"]
    ours = [len(g["params"]) for g in optimizer.param_groups]
    if ours != [len(g["params"]) for g in groups]:
        raise ValueError(f"the saved state has groups of {[len(g['params']) for g in groups]} parameters, ours {ours}")
    fresh: dict[torch.Tensor, dict[str, Any]] = {}
    for group, other in zip(optimizer.param_groups, groups, strict=True):
        for key, p in zip(other["params"], group["params"], strict=True):
            if key in state_dict["state"]:
                fresh[p] = _encoded(optimizer, p, group, state_dict["state"][key], f"parameter {key}")
    for group, other in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in other.items() if k != "params" and k in group and k not in _OURS})
    for p, given in fresh.items():
        optimizer.state.pop(p, None)
        optimizer._state(p, optimizer._group(p)).update(given)
    optimizer._kept = None


def _encoded(
    optimizer: LowPrecOptimizer, p: torch.Tensor, group: dict[str, Any], given: dict[str, Any], who: str
) -> dict[str, Any]:
    program = optimizer._program(p, group)
    state: dict[str, Any] = {}
    wanted = dict(zip(optimizer._states(group), program.states, strict=True))
    for name in ("row_var", "col_var", "variance"):
        if name in given and isinstance(optimizer, Adafactor) and given[name] is not None:
            state[name] = given[name].float().clone()
    for name, kept in wanted.items():
        value = given.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != p.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{who}: {name} must have shape {tuple(p.shape)}, got {shape}")
        codes, scale = kernels.empty(kept, p.shape, p.device)
        rows, cols = kernels.matrix(p.shape)
        values = value.detach().to(p.device, torch.float32).reshape(rows, cols).contiguous()
        kernels.store_rows(values, codes.view(rows, -1), scale, kept, p.shape, 0, add=False)
        state[name] = codes
        if scale is not None:
            state[name + "_scale"] = scale
    # SGD and Muon of torch keep no count; that they have a momentum means a step was made
    state["step"] = int(given.get("step", 1))
    return state
