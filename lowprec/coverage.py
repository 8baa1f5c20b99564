"""How much of a model's matrix multiplication runs in which format, and what does not, with why.

    print(lp.coverage(model, batch))

One forward pass (eval mode, no gradients) is watched below autocast: every matrix product that really runs is counted
in the module that ran it. A layer that a recipe converted counts with the formats of its three products; anything else
counts in the dtype of the operands that arrived, whatever the plan says of it. Layers whose parent reads their weight
without calling them therefore show up in the parent, unconverted.

The backward pass is not run: each product has two more of the same size there (one where the weight or the input needs
no gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lowprec.apply import applied
from lowprec.formats import format as find_format
from lowprec.handlers import ModuleState
from lowprec.linear import LinearLike
from lowprec.recipe import Gemm, Recipe
from lowprec.spec import ROLES

__all__ = ["Coverage", "CoverageRow", "coverage"]

_aten = torch.ops.aten
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_NAMES[torch.int8] = "int8"


@dataclass(frozen=True)
class CoverageRow:
    """The products of one module in one format.

    Args:
        module: qualified name of the module that ran them.
        what: "output", "grad_input", "grad_weight", or the op.
        format: formats of the operands.
        flops: how many operations.
        note: why it is not in the recipe's formats, or "".
    """

    module: str
    what: str
    format: str
    flops: float
    note: str = ""


@dataclass(frozen=True)
class Coverage:
    """Where a training step's matrix products run.

    Args:
        rows: one for each module, product and format.
    """

    rows: tuple[CoverageRow, ...]

    @property
    def flops(self) -> float:
        """Operations of all products."""
        return sum(row.flops for row in self.rows)

    @property
    def shares(self) -> dict[str, float]:
        """Format -> share of all operations, largest first."""
        sums: dict[str, float] = {}
        for row in self.rows:
            sums[row.format] = sums.get(row.format, 0.0) + row.flops
        return {name: sums[name] / self.flops for name in sorted(sums, key=lambda n: -sums[n])}

    @property
    def low(self) -> float:
        """Share of products with an operand of 8 bits or fewer."""
        few = [r.flops for r in self.rows if any(find_format(w).bits <= 8 for w in r.format.split(" x "))]
        return sum(few) / self.flops if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"shares": self.shares, "low": self.low, "flops": self.flops, "rows": rows}

    def __str__(self) -> str:
        lines = [f"{share:7.1%}  {name}" for name, share in self.shares.items()]
        rest = [row for row in self.rows if row.note]
        merged: dict[tuple[str, str, str], float] = {}
        for row in rest:
            key = (row.module or "(model)", row.format, row.note)
            merged[key] = merged.get(key, 0.0) + row.flops
        lines += [f"{flops / self.flops:7.1%}  {m}: {f}, {why}" for (m, f, why), flops in merged.items()]
        return "\n".join(lines)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of modules that are not layers of ours, in the innermost module."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.stack = names, [("", False, True)]
        self.rows: list[CoverageRow] = []
        self.recipes: dict[str, Recipe] = {}

    def before(self, module: nn.Module, args: Any) -> None:
        state = getattr(module, "_lowprec", None)
        ours = isinstance(state, ModuleState)
        name = self.names.get(id(module), self.stack[-1][0])
        self.stack.append((name, ours or self.stack[-1][1], getattr(module, "weight", None) is not None))
        if ours:
            assert isinstance(state, ModuleState)
            self.recipes[name] = state.recipe
            if isinstance(module, LinearLike) and args and isinstance(args[0], torch.Tensor):
                weight = cast(torch.Tensor, module.weight)
                tokens = args[0].numel() // max(1, args[0].shape[-1])
                self._three(name, 2.0 * tokens * weight.numel(), state.recipe, bool(weight.requires_grad))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def _three(self, name: str, flops: float, recipe: Recipe, trained: bool) -> None:
        for role in ROLES if trained else ROLES[:2]:
            gemm: Gemm = getattr(recipe, role)
            words = _formats(gemm, recipe.compute)
            note = "" if gemm.a or gemm.b else f"the recipe {recipe.name} casts nothing here"
            self.rows.append(CoverageRow(name, role, words, flops, note))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, ours, has_weight = self.stack[-1]
        packet = func._overloadpacket
        count = _attention_flops if str(packet) in _ATTENTION else flop_registry.get(packet)
        is_linear = ours and name in self.recipes and has_weight and packet not in _CONVOLUTIONS
        if count is None or (is_linear and packet is not None):
            return out
        flops = float(count(*args, **(kwargs or {}), out_val=out))
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        words = _NAMES.get(operands[-1].dtype, str(operands[-1].dtype)) if operands else "fp32"
        if packet in _CONVOLUTIONS and name in self.recipes:
            self._three(name, flops, self.recipes[name], True)
            return out
        op = str(packet).removeprefix("aten.").removeprefix("aten::")
        attends = packet in _BATCHED or str(packet) in _ATTENTION
        why = "attention: by the op policy" if attends else "no handler converts this product"
        self.rows.append(CoverageRow(name, op, words, 3.0 * flops, why))
        return out


_CONVOLUTIONS = {_aten.convolution, _aten._convolution, _aten.mkldnn_convolution}
_BATCHED = {_aten.bmm, _aten.baddbmm}


# fused attention, whose products run below what is watched here
_ATTENTION = {"lowprec.attention", "aten._scaled_dot_product_flash_attention_for_cpu"}


def _attention_flops(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> int:
    """Both batched products of an attention."""
    return 4 * query.numel() * key.shape[-2]


def _formats(gemm: Gemm, compute: str) -> str:
    names = [compute if cast is None else cast.format for cast in (gemm.a, gemm.b)]
    return names[0] if names[0] == names[1] else " x ".join(names)


def coverage(model: nn.Module, batch: Any) -> Coverage:
    """Where the matrix products of a training step run.

    Args:
        model: an applied model (or any: then everything is unconverted).
        batch: what the model is called with: a tuple of arguments, a dict of keyword arguments, one argument, or a
            function that takes the model and runs a forward pass.

    Returns:
        The Coverage; print it, or read ``shares``, ``low`` and ``rows``.

    >>> import lowprec as lp
    >>> net = lp.apply(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "int8-switchback")
    >>> {name: round(share, 2) for name, share in lp.coverage(net, torch.randn(4, 16)).shares.items()}
    {'int8': 0.67, 'bf16': 0.33}
    """
    names = {id(module): name for name, module in model.named_modules()}
    seen = _Seen(names)
    training = {module: module.training for module in model.modules()}
    hooks = [register_module_forward_pre_hook(seen.before), register_module_forward_hook(seen.after)]
    try:
        model.eval()
        with torch.no_grad(), seen:
            _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, was in training.items():
            module.training = was
    plan = applied(model)
    notes = {} if plan is None else {row.name: row.note for row in plan.rows if not row.handler and row.note}
    rows = [
        row if not row.note or row.module not in notes else CoverageRow(**{**asdict(row), "note": notes[row.module]})
        for row in seen.rows
    ]
    return Coverage(tuple(rows))


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    if isinstance(batch, Callable) and not isinstance(batch, torch.Tensor):  # type: ignore[arg-type]
        return batch(model)
    return model(batch)
