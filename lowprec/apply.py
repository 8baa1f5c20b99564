"""Applying a recipe to a model: first a plan, which changes nothing, then the model, in place.

    plan = lp.plan(model, "fp8-block", skip=["lm_head"], rules={"blocks.*.mlp.*": "mxfp8"})
    print(plan)             # a row per module: what takes over, which casts, what computes it, or why it is skipped
    lp.apply(model, plan)
    with lp.disabled(model): evaluate(model)
    lp.undo(model)

A module's recipe follows from, the first that speaks: ``skip`` and the recipe's own ``skip``; the last matching rule of
``rules``, then of the recipe; the rules about first and last layers and the last blocks; the recipe itself. A glob
matches a module's qualified name or that of any module above it ("blocks.0" means everything in that block), and one
that matches nothing is an error: it is a misspelling more often than not.

"First" and "last" product mean the order in which the modules are registered, which is the order of
`model.named_modules()`. "The last blocks" are those of the largest `nn.ModuleList` or `nn.Sequential`, their
number rounded to nearest.

The applied model's own forward runs under the recipe's op policy (`lowprec.policy`). That too is a change of class, so
it survives deepcopy, pickle and torch.compile, and `undo` takes it away.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from lowprec import handlers, policy
from lowprec.errors import LowprecWarning, unknown_name
from lowprec.handlers import ModuleState, Row, Site
from lowprec.recipe import Recipe

__all__ = ["Plan", "applied", "apply", "disabled", "load_scaling_state", "plan", "scaling_state", "undo"]

_WRAPPERS = ("FullyShardedDataParallel", "FSDPModule")
# modules whose import registers handlers, in this order
_HANDLER_MODULES = [
    "lowprec.linear",
    "lowprec.multihead",
    "lowprec.embedding",
    "lowprec.attention",
    "lowprec.losses",
    "lowprec.norms",
    "lowprec.conv",
    "lowprec.rnn",
]
# the same, where another package is loaded already: package module -> module with its handlers
_OPTIONAL_HANDLERS = {"transformers.pytorch_utils": "lowprec.conv1d"}


@dataclass(frozen=True)
class Plan:
    """What applying a recipe would do, as pure data; `print` it, keep it, compare it.

    Args:
        recipe: the recipe asked for.
        rows: one row for every module that a handler or a glob concerns.
        device: type of the device the model's parameters are on.
        strict: whether an emulated format was to be an error.
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    device: str
    strict: bool = False

    @property
    def converted(self) -> tuple[Row, ...]:
        """The rows of modules that are converted."""
        return tuple(row for row in self.rows if row.handler)

    def row(self, name: str) -> Row:
        """The row of one module.

        Raises:
            ValueError: if the plan has no such row.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name("module in this plan", name, [row.name for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"recipe": self.recipe.name, "device": self.device, "strict": self.strict, "rows": rows}

    def __str__(self) -> str:
        head = ("module", "class", "handler", "output", "grad_input", "grad_weight", "computed by / why not")
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            words = "; ".join(part for part in (row.carrier, row.note) if part)
            casts = (row.output, row.grad_input, row.grad_weight)
            lines.append((row.name or "(model)", row.cls, row.handler or "-", *(c or "-" for c in casts), words))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        text = [" ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
        done = f"{len(self.converted)} of {len(self.rows)} modules converted, recipe {self.recipe.name}, {self.device}"
        return "\n".join([*text, done])


def plan(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    skip: Iterable[str] = (),
    rules: Mapping[str, Recipe | str | None] | None = None,
    strict: bool = False,
) -> Plan:
    """Say what applying a recipe to a model would do, changing nothing.

    Args:
        model: any module.
        recipe: a Recipe, or what `lowprec.recipe` takes.
        skip: globs of modules that stay as they are.
        rules: glob -> recipe for the modules it matches (None: they stay as they are); the last match counts.
        strict: a format that this device cannot compute itself is an error instead of being emulated.

    Returns:
        The Plan.

    Raises:
        ValueError: for an unknown recipe, a glob that matches no module, or, if strict, an emulated format.
    """
    chosen = _recipe(recipe)
    _register()
    _check_plain(model)
    names = [name for name, _ in model.named_modules()]
    own = [(rule.glob, rule.recipe) for rule in chosen.rules]
    globs: list[tuple[str, Recipe | None]] = [
        (glob, None if r is None else _recipe(r)) for glob, r in [*own, *(rules or {}).items()]
    ]
    skips = [*chosen.skip, *([skip] if isinstance(skip, str) else skip)]
    for glob in [*skips, *(g for g, _ in globs)]:
        if not any(_matches(glob, name) for name in names):
            raise unknown_name("module (no module matches this glob)", glob, [name for name in names if name])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rows: list[Row] = []
    positions = _positions(model, chosen)
    for name, module in model.named_modules():
        row = _plan_module(name, module, chosen, skips, globs, positions.get(name, ""), device, strict)
        if row is not None:
            rows.append(_unread(row, rows, module))
    return Plan(chosen, tuple(rows), device.type, strict)


def _plan_module(
    name: str,
    module: nn.Module,
    recipe: Recipe,
    skips: list[str],
    globs: list[tuple[str, Recipe | None]],
    position: str,
    device: torch.device,
    strict: bool,
) -> Row | None:
    handler, why = handlers.lookup(module)
    if handler is None and not why:
        return None
    site = Site(name, module, recipe, device, strict)
    for glob in skips:
        if _matches(glob, name):
            return site.skipped(f"skipped by {glob!r}")
    if handler is None:
        return site.skipped(why)
    chosen: Recipe | None = _high(recipe) if position else recipe
    for glob, other in globs:
        if _matches(glob, name):
            chosen, position = other, f"rule {glob!r}"
            if other is None:
                return site.skipped(f"stays as it is by rule {glob!r}")
    assert chosen is not None
    site = dataclasses.replace(site, recipe=chosen)
    planned = getattr(handler, "lowprec_plan", None)
    row = planned(site) if planned is not None else site.row(handler)
    if isinstance(row, str):
        row = site.skipped(row)
    if position:
        row = dataclasses.replace(row, note="; ".join(part for part in (position, row.note) if part))
    return cast(Row, row)


def _unread(row: Row, above: list[Row], module: nn.Module) -> Row:
    """The output projection of an attention that stays as it is: its weight is read there, the layer never called."""
    if not row.handler or not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return row
    parent = next((r for r in above if r.name == row.name.rpartition(".")[0]), None)
    if parent is None or parent.handler or parent.cls != "MultiheadAttention":
        return row
    return Row(row.name, row.cls, note="its parent reads the weight without calling the layer, and stays as it is")


def _register() -> None:
    """Import the modules that register handlers."""
    optional = [name for package, name in _OPTIONAL_HANDLERS.items() if package in sys.modules]
    for name in [*_HANDLER_MODULES, *optional]:
        importlib.import_module(name)


def _recipe(recipe: Recipe | str) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    return cast(Recipe, importlib.import_module("lowprec.recipes").recipe(recipe))


def _high(recipe: Recipe) -> Recipe:
    """The recipe with all casts of products taken away."""
    from lowprec.recipe import Gemm

    return recipe.replace(output=Gemm(), grad_input=Gemm(), grad_weight=Gemm(), delayed=None)


def _matches(glob: str, name: str) -> bool:
    parts = name.split(".")
    above = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(part, glob) for part in above)


def _positions(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Names of products that the recipe's first, last and last-blocks rules keep high, with the reason."""
    products = [
        name for name, module in model.named_modules() if getattr(handlers.lookup(module)[0], "lowprec_products", False)
    ]
    found: dict[str, str] = {}
    if recipe.high_last_fraction > 0:
        lists = [
            (name, list(module.named_children()))
            for name, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential))
        ]
        name, children = max(lists, key=lambda item: len(item[1]), default=("", []))
        count = round(recipe.high_last_fraction * len(children))
        prefix = f"{name}." if name else ""
        for child, _ in children[len(children) - count :]:
            inside = f"{prefix}{child}"
            for product in products:
                if product == inside or product.startswith(inside + "."):
                    found[product] = f"among the last {recipe.high_last_fraction:.0%} of blocks"
    if products and recipe.first_layer == "high":
        found[products[0]] = "first layer"
    if products and recipe.last_layer == "high":
        found[products[-1]] = "last layer"
    return found


def _check_plain(model: nn.Module) -> None:
    """Refuse models that were applied, compiled or wrapped before, with the way out."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        classes = [cls.__name__ for cls in type(module).__mro__]
        if hasattr(module, "_lowprec") or hasattr(module, "_lowprec_root"):
            raise ValueError(f"{what} has a recipe applied already: call lowprec.undo first.")
        if "OptimizedModule" in classes or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(f"{what} is compiled already: apply the recipe first, then call torch.compile.")
        if any(wrapper in classes for wrapper in _WRAPPERS):
            raise ValueError(f"{what} is wrapped by FSDP already: apply the recipe first, then shard the model.")


# -- the applied model ---------------------------------------------------------------------------------------------


class PolicyRoot(nn.Module):
    """The class of an applied model besides its own: its forward runs under the recipe's op policy."""

    _lowprec_root: Plan

    @staticmethod
    def lowprec_body(cls: type[nn.Module]) -> dict[str, Any]:
        """A class like `cls`, of the same name (saved configurations hold it) and with the same signature."""

        @functools.wraps(cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with policy.active(*self._lowprec_policy):
                return cls.forward(self, *args, **kwargs)

        return {"forward": forward, "__name__": cls.__name__, "__module__": cls.__module__, "__doc__": cls.__doc__}


def apply(model: nn.Module, recipe: Plan | Recipe | str, **options: Any) -> nn.Module:
    """Apply a recipe or a plan to a model, in place.

    Args:
        model: the model; the same object is returned, with the same parameters, hooks, ties and state_dict keys.
        recipe: a Plan made by `plan` for this model, or a recipe to plan now.
        options: `skip`, `rules` and `strict` of `plan`, where a recipe is given.

    Returns:
        The model.

    Raises:
        ValueError: for a plan that was made for another model, and whatever `plan` raises.
    """
    if isinstance(recipe, Plan):
        if options:
            raise ValueError(f"{', '.join(options)} belong to lowprec.plan; the plan given has been made already.")
        made = recipe
        _check_plain(model)
    else:
        made = plan(model, recipe, **options)
    modules = dict(model.named_modules())
    if not made.converted and made.recipe.quantized:
        message = f"recipe {made.recipe.name} converts no module of this model: print(lowprec.plan(...)) says why."
        warnings.warn(message, LowprecWarning, stacklevel=2)
    pairs = []
    for row in made.converted:
        module = modules.get(row.name)
        handler = handlers.lookup(module)[0] if module is not None else None
        if module is None or handler is None or type(module).__name__ != row.cls:
            raise ValueError(
                f"the plan has a {row.cls} named {row.name!r}, which this model has not: make a plan for this model."
            )
        pairs.append((module, handler, row))
    for module, handler, row in pairs:
        assert row.recipe is not None
        handlers.swap(module, handler, row.name, row.recipe)
    model._lowprec_root = made  # type: ignore[assignment]
    model._lowprec_policy = (policy.key(made.recipe), made.device)  # type: ignore[assignment]
    model.__class__ = handlers.join(PolicyRoot, type(model))
    return model


def applied(model: nn.Module) -> Plan | None:
    """The plan that was applied to a model, or None."""
    return cast("Plan | None", getattr(model, "_lowprec_root", None))


def undo(model: nn.Module) -> nn.Module:
    """Take an applied recipe away: every module computes exactly as before `apply`.

    Args:
        model: the model that was applied, the same object.

    Returns:
        The model.

    Raises:
        ValueError: if no recipe is applied to it.
    """
    if applied(model) is None:
        raise ValueError("no recipe is applied to this model (undo takes the model that was given to apply).")
    del model._lowprec_root, model._lowprec_policy
    model.__class__ = type(model)._lowprec_parts[1]  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(getattr(module, "_lowprec", None), ModuleState):
            handlers.unswap(module)
    return model


@contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block the model computes without its recipe, in the precision of its parameters.

    Args:
        model: the model that was applied.

    Raises:
        ValueError: if no recipe is applied to it.
    """
    if applied(model) is None:
        raise ValueError("no recipe is applied to this model (disabled takes the model that was given to apply).")
    changed = [(model, type(model))]
    model.__class__ = type(model)._lowprec_parts[1]  # type: ignore[attr-defined]
    states = [(module, getattr(module, "_lowprec", None)) for module in model.modules()]
    for module, state in states:
        if not isinstance(state, ModuleState):
            continue
        if any(p.element_size() == 1 for p in module.parameters(recurse=False)):
            state.enabled = False
        else:
            changed.append((module, type(module)))
            module.__class__ = state.original
    try:
        yield model
    finally:
        for module, cls in reversed(changed):
            module.__class__ = cls
        for _, state in states:
            if isinstance(state, ModuleState):
                state.enabled = True


# -- state -----------------------------------------------------------------------------------------------------------


def scaling_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything of an applied model that its own state_dict leaves out, as plain tensors and numbers.

    Args:
        model: the model that was applied.

    Returns:
        Module name -> {"scale", "amax", "passes"} of delayed scaling, and "step" of stochastic rounding.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        state = getattr(module, "_lowprec", None)
        if not isinstance(state, ModuleState):
            continue
        buffers = {
            key.removeprefix("_lowprec_"): b for key, b in module._buffers.items() if key.startswith("_lowprec_")
        }
        entry: dict[str, Any] = {key: b.detach().clone() for key, b in buffers.items() if b is not None}
        if "step" in state.extra:
            entry["step"] = int(state.extra["step"])
        if entry:
            found[name] = entry
    return found


def load_scaling_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what `scaling_state` gave.

    Args:
        model: a model with the same recipe applied.
        state: what `scaling_state` gave.

    Raises:
        ValueError: if it names a module or a value that this model has not, or a shape differs; nothing is changed
        then.
    """
    here = scaling_state(model)
    for name, entry in state.items():
        if name not in here:
            raise unknown_name("module in the scaling state", name, here)
        for key, value in entry.items():
            if key not in here[name]:
                raise unknown_name(f"value of {name} in the scaling state", key, here[name])
            if isinstance(value, torch.Tensor) and value.shape != here[name][key].shape:
                raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}, not {tuple(here[name][key].shape)}.")
    modules = dict(model.named_modules())
    for name, entry in state.items():
        for key, value in entry.items():
            if key == "step":
                cast(Any, modules[name])._lowprec.extra["step"].fill_(int(value))
            else:
                cast(Any, modules[name]._buffers[f"_lowprec_{key}"]).copy_(value)
