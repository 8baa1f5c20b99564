"""`prepare`: a recipe for a model and its optimizer, in one call.

    plan and apply      the modules compute as the recipe says                     (`lowprec.apply`)
    convert             weights are stored as the recipe says                      (`lowprec.storage`)
    map the optimizer   states, masters and updates are as the recipe says         (`lowprec.optim`)
    wrap it             loss scale, checks, clipping, reports                      (`lowprec.training.step`)

A torch SGD, Adam or AdamW becomes ours, with the same parameter groups: it takes unscaling and clipping as a factor,
and no non-finite value passes from its states to a weight. Any other optimizer is kept where the recipe leaves weights
and states in fp32, and refused with a sentence where it does not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from lowprec import loss_scale as scaling
from lowprec import storage
from lowprec.apply import Plan, applied, apply
from lowprec.recipe import LossScale, Recipe
from lowprec.recipes import recipe as lookup
from lowprec.settings import settings
from lowprec.training.guard import Guard
from lowprec.training.ranks import Ranks
from lowprec.training.report import StepOptions
from lowprec.training.step import PreparedOptimizer

__all__ = ["optimizers_of", "prepare"]

_log = logging.getLogger("lowprec")
_prepared: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[PreparedOptimizer]]] = weakref.WeakKeyDictionary()

M = TypeVar("M")


def prepare(
    model: M,
    optimizer: Any,
    recipe: Recipe | Plan | str | None = None,
    *,
    skip: Iterable[str] = (),
    rules: Mapping[str, Recipe | str | None] | None = None,
    strict: bool = False,
    clip_grad_norm: float | None = None,
    clip_embedding_norm: float | None = None,
    embedding_grad_scale: float = 1.0,
    loss_scale: scaling.ScaleState | LossScale | str | float | None = None,
    guard: Guard | str | None = None,
    repair: bool = False,
    collapse: str = "warn",
    seed: int = 0,
    process_group: Any = None,
) -> tuple[M, Any]:
    """Make a model and its optimizer train under a recipe.

    Args:
        model: a module, or several (list, tuple or dict); changed in place.
        optimizer: its optimizer, or several (one for all models, or each its own).
        recipe: a recipe, its name, or a Plan for a single model. None: that of ``LOWPREC_RECIPE``, else of the file
            ``lowprec.toml`` (whose other keys then hold where no argument is given), else that already applied to the
            model.
        skip, rules, strict: as in `lowprec.plan`.
        clip_grad_norm: largest norm of all gradients together, unscaled.
        clip_embedding_norm: embeddings are clipped apart, to this norm.
        embedding_grad_scale: factor of embedding gradients, e.g. 0.1.
        loss_scale: another loss scale than the recipe's: a state, a preset's name, or a number.
        guard: a `Guard` against sudden losses and norms, or its action by name; None for none.
        repair: replace non-finite values in weights and states, at the cost `lowprec.training.repair` states.
        collapse: what to do when skipping steps does not help: "warn" once or "raise".
        seed: key of stochastic rounding in the optimizer.
        process_group: ranks that decide together (default: all).

    Returns:
        The same model object (or objects), and an optimizer for each given.

    Raises:
        ValueError: if no recipe can be found, or the recipe cannot run on what was given; the sentence says which.
    """
    models, optimizers = _listed(model, nn.Module, "a model"), _listed(optimizer, torch.optim.Optimizer, "an optimizer")
    if recipe is None:
        chosen_outside = settings()
        recipe, skip, strict = chosen_outside.recipe, skip or chosen_outside.skip, strict or chosen_outside.strict
        rules, seed = rules or chosen_outside.module_rules(), seed or chosen_outside.seed
        guard = chosen_outside.guard if guard is None else guard
        clip_grad_norm = chosen_outside.clip_grad_norm if clip_grad_norm is None else clip_grad_norm
    options = StepOptions(clip_grad_norm, clip_embedding_norm, embedding_grad_scale, repair, collapse)  # type: ignore[arg-type]
    watch = Guard(guard) if isinstance(guard, str) else guard  # type: ignore[arg-type]
    _check(models, optimizers)
    chosen = _choose(models, recipe)
    state = scaling.resolve(chosen.loss_scale if loss_scale is None else loss_scale)
    for each in models:
        _apply(each, recipe if isinstance(recipe, Plan) else chosen, {"skip": skip, "rules": rules, "strict": strict})
    made = []
    for given in optimizers:
        own = [m for m in models if _owns(m, given)] or models
        inner = _map(given, chosen, seed, own)
        new = PreparedOptimizer(inner, own, state, options, watch, Ranks(process_group), original=given)
        new.recipe = chosen
        made.append(new)
        for each in own:
            _prepared.setdefault(each, []).append(weakref.ref(new))
    return model, _like(optimizer, made)


def optimizers_of(model: nn.Module) -> list[PreparedOptimizer]:
    """The prepared optimizers that train a model and still exist."""
    return [o for ref in _prepared.get(model, []) if (o := ref()) is not None]


# -- what was given ------------------------------------------------------------------------------------------------


def _listed(given: Any, kind: type, what: str) -> list[Any]:
    values = list(given.values()) if isinstance(given, Mapping) else given
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"prepare takes {what} (or several), got {type(value).__name__}.")
    if not values:
        raise ValueError(f"prepare takes {what}, got an empty {type(given).__name__}.")
    return values


def _like(given: Any, made: list[PreparedOptimizer]) -> Any:
    if isinstance(given, Mapping):
        return dict(zip(given, made))
    if isinstance(given, (list, tuple)):
        return type(given)(made)
    return made[0]


def _check(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    if len(set(map(id, optimizers))) != len(optimizers):
        raise ValueError("prepare got the same optimizer twice.")
    known = {id(p) for m in models for p in m.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, PreparedOptimizer):
            raise ValueError("this optimizer was prepared already: prepare a model and its optimizer once.")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if params and not any(id(p) in known for p in params):
            raise ValueError("this optimizer has none of the model's parameters: was it made for another model?")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss many times in one step: it cannot be prepared, use it as it is.")


def _owns(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _choose(models: list[nn.Module], recipe: Recipe | Plan | str | None) -> Recipe:
    if isinstance(recipe, Plan):
        if len(models) > 1:
            raise ValueError("a Plan is for one model: prepare several models with a recipe.")
        return recipe.recipe
    if recipe is not None:
        return recipe if isinstance(recipe, Recipe) else lookup(recipe)
    for model in models:
        plan = applied(_inside(model))
        if plan is not None:
            return plan.recipe
    raise ValueError(
        "prepare got no recipe: pass recipe='bf16' (lowprec recipes lists them), run the script with "
        "`lowprec run --recipe bf16 script.py`, set LOWPREC_RECIPE, or write a lowprec.toml."
    )


# -- what is done --------------------------------------------------------------------------------------------------


def _inside(model: nn.Module) -> nn.Module:
    """The user's model under a data-parallel wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _apply(model: nn.Module, recipe: Recipe | Plan, options: dict[str, Any]) -> None:
    inside = _inside(model)
    chosen = recipe.recipe if isinstance(recipe, Plan) else recipe
    wrapped = inside is not model or _sharded(model)
    if wrapped and chosen.weights != "fp32":
        raise ValueError(
            f"recipe {chosen.name} stores weights in {chosen.weights}, and this model is wrapped for several processes "
            f"already: prepare the model first, then wrap it."
        )
    before = applied(inside)
    if before is None:
        if isinstance(recipe, Plan):
            apply(inside, recipe)
        else:
            apply(inside, recipe, **options)
    elif before.recipe != chosen:
        raise ValueError(
            f"recipe {before.recipe.name} is applied to this model already, and prepare was asked for {chosen.name}: "
            f"call lowprec.undo first."
        )
    if chosen.weights != "fp32" or chosen.gradients not in ("fp32",):
        storage.convert(inside, chosen)


def _sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "placements") for p in model.parameters())


def _map(optimizer: torch.optim.Optimizer, recipe: Recipe, seed: int, models: list[nn.Module]) -> torch.optim.Optimizer:
    """The optimizer that keeps states, masters and updates as the recipe says."""
    stored = recipe.weights != "fp32" or recipe.states != ("fp32", "fp32") or recipe.update != "nearest"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "placements") for p in params):
        if stored:
            raise ValueError(
                f"recipe {recipe.name} stores optimizer states in low precision, which sharded parameters cannot have: "
                f"use a recipe with fp32 states."
            )
        return optimizer
    if not stored and any(p.device.type != "cpu" for p in params):
        return optimizer  # torch's own kernels are faster there, and nothing asks for ours
    from lowprec.optim import from_torch

    try:
        inner = from_torch(optimizer, recipe, seed=seed)
    except ValueError as error:
        if stored:
            raise ValueError(f"recipe {recipe.name} needs an optimizer of lowprec.optim: {error}") from error
        _log.info("%s is kept: %s", type(optimizer).__name__, error)
        return optimizer
    _log.info("%s is replaced by %s", type(optimizer).__name__, type(inner).__name__)
    return inner
