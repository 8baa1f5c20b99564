"""What a training step will need, before there is one.

*Kept between steps* (weights, masters, gradients, states) is not a formula here: the model is put on the meta device,
the recipe's own conversion and the optimizer's own layout are asked, and the bytes of the tensors they would make are
added. What they do is what is counted.

*Activations* of a model that can run are measured on two small batches; both the bytes autograd saves and the peak are
straight lines in the batch. Those of a model that is only shapes follow from a formula for transformers with fused
attention, per token and block, b bytes an element of the compute dtype and c of what a product saves (1 where the
recipe keeps codes, b otherwise):

    inputs of the four products   c * (3 h + m)          qkv, out, up (and gate), down; m the MLP's width
    norms                         2 b h
    q, k, v and the result        4 b h
    activation function           b m                    (2 b m with a gate)
    residual stream               2 b h

and b * vocab for the logits with as much again for their gradient. That one is an estimate and is called so.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lowprec.apply import Plan
from lowprec.apply import plan as make_plan
from lowprec.gradients import sink
from lowprec.jobs import measure
from lowprec.jobs.engine import Engine, Hyper, make
from lowprec.jobs.skeleton import Sizes
from lowprec.kernels.optim import empty
from lowprec.optim import from_torch
from lowprec.recipe import Cast, Recipe
from lowprec.recipes import recipe as find_recipe
from lowprec.workloads import Workload, units_in

__all__ = ["Needs", "kept", "needs_of_shapes", "needs_of_workload"]

_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


@dataclass(frozen=True)
class Needs:
    """What a step under a recipe needs.

    Args:
        recipe: its name.
        parameters: how many.
        weights, masters, gradients, states: bytes kept, by role.
        activations: bytes kept for backward, a sample.
        peak_fixed, peak_sample: bytes at the peak: a fixed part and one for each sample.
        communication: bytes of gradients a rank sends a step.
        flops: share of the FLOPs of products by format.
        flops_a_sample: FLOPs of the products of a step, a sample.
        measured: whether activations and peak were measured or estimated.
    """

    recipe: str
    parameters: int
    weights: int
    masters: int
    gradients: int
    states: int
    activations: float
    peak_fixed: float
    peak_sample: float
    communication: int
    flops: dict[str, float]
    flops_a_sample: float
    measured: bool

    def peak(self, batch: int) -> float:
        """Bytes at the peak of a step with that many samples."""
        return self.peak_fixed + batch * self.peak_sample

    def largest_batch(self, memory: float) -> int:
        """The most samples that fit; 0 where not one does."""
        return max(0, int((memory - self.peak_fixed) // max(self.peak_sample, 1.0)))

    def to_dict(self, batch: int | None, memory: float | None) -> dict[str, Any]:
        """As plain values."""
        fits = None if memory is None else self.largest_batch(memory)
        total = None if batch is None else self.peak(batch)
        return {**asdict(self), "batch": batch, "peak": total, "largest_batch": fits}


def _convert(model: nn.Module, recipe: Recipe) -> None:
    """Store the weights and gradients of a meta model as `prepare` would."""
    if recipe.weights != "fp32" or recipe.gradients != "fp32":
        importlib.import_module("lowprec.storage").convert(model, recipe)


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _empty(store: str | None, shape: Any) -> int:
    return 0 if store is None else sum(map(_nbytes, empty(store, torch.Size(shape), torch.device("meta"))))


def kept(model: nn.Module, recipe: Recipe) -> measure.Bytes:
    """Bytes kept between steps under AdamW, by role.

    Args:
        model: a model on the meta device; changed.
        recipe: the recipe.
    """
    parameters = list(model.parameters())
    _convert(model, recipe)
    optimizer = from_torch(torch.optim.AdamW(parameters, lr=1e-3), recipe)
    weights = sum(_nbytes(t) for t in [*model.parameters(), *model.buffers()])
    weights += sum(_nbytes(getattr(p, "_lowprec_scale", None)) for p in parameters)
    gradients = sum(_nbytes(p) if (s := sink(p)) is None else _empty(s.store, p.shape) for p in parameters)
    masters = states = 0
    for row in optimizer.layout():
        masters += _empty(row["master"], row["shape"]) + _empty(row["residue"], row["shape"])
        states += sum(_empty(store, row["shape"]) for store in row["states"].values())
    return measure.Bytes(weights, masters, gradients, states)


# -- FLOPs -------------------------------------------------------------------------------------------------------------


def _words(cast: Cast | None, compute: str) -> str:
    return compute if cast is None else cast.format


def _formats(recipe: Recipe) -> list[str]:
    """The operand formats of the three products."""
    products = (recipe.output, recipe.grad_input, recipe.grad_weight)
    return [" x ".join(dict.fromkeys((_words(g.a, recipe.compute), _words(g.b, recipe.compute)))) for g in products]


def _flops(model: nn.Module, plan: Plan, recipe: Recipe, positions: Callable[[str], float]) -> dict[str, float]:
    """FLOPs of a step a sample by format, over the modules whose weight is multiplied."""
    rows = {row.name: row for row in plan.rows}
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or weight is None or weight.dim() < 2:
            continue
        row = rows.get(name)
        own = row.recipe if row is not None and row.handler and row.recipe is not None else None
        formats = _formats(own) if own is not None else [recipe.compute] * 3
        for form in formats:
            found[form] += 2.0 * weight.numel() * positions(name)
    return dict(found)


def _shares(flops: dict[str, float]) -> dict[str, float]:
    total = sum(flops.values()) or 1.0
    return {form: count / total for form, count in sorted(flops.items(), key=lambda item: -item[1])}


# -- a model that is only shapes ---------------------------------------------------------------------------------------


def _estimate(recipe: Recipe, sizes: Sizes) -> tuple[float, float]:
    """Bytes of activations and of what else the peak holds, a sample."""
    b = _BYTES[recipe.compute]
    c = 1.0 if recipe.saved == "codes" else b
    h, m, gate = sizes.hidden, sizes.mlp, 2 if sizes.gated else 1
    block = c * (3 * h + m) + 2 * b * h + 4 * b * h + b * m * gate + 2 * b * h
    activations = sizes.context * (sizes.layers * block + b * sizes.vocab)
    return activations, activations + sizes.context * b * sizes.vocab


def needs_of_shapes(build: Callable[[], tuple[nn.Module, Sizes | None]], name: str) -> tuple[Needs, Plan]:
    """What a model known by its shapes needs.

    Args:
        build: makes the model on the meta device, and its sizes where they are known.
        name: the recipe.
    """
    recipe = find_recipe(name)
    model, sizes = build()
    plan = make_plan(model, recipe)
    count = sum(p.numel() for p in model.parameters())
    flops = _flops(model, plan, recipe, lambda _: float(sizes.context if sizes else 1))
    held = kept(model, recipe)
    activations, working = _estimate(recipe, sizes) if sizes else (0.0, 0.0)
    communication = int(count * _BYTES.get(recipe.communication, 4.0))
    return (
        Needs(
            name, count, **asdict(held), activations=activations, peak_fixed=float(held.total), peak_sample=working,
            communication=communication, flops=_shares(flops), flops_a_sample=sum(flops.values()), measured=False,
        ),
        plan,
    )  # fmt: skip


# -- a model that runs -------------------------------------------------------------------------------------------------


def _part(batch: Any, count: int) -> Any:
    """The first samples of a batch."""
    if isinstance(batch, dict):
        return {k: v[:count] for k, v in batch.items()}
    return tuple(v[:count] for v in batch)


def _positions(model: nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """How often each module's weight is multiplied in a forward pass."""
    found: Counter[str] = Counter()
    hooks = []

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and isinstance(module.weight, torch.Tensor):
                found[name] += int(output.numel()) // int(module.weight.shape[0])

        return hook

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_hook(count(name)))
    with torch.no_grad():
        forward()
    for handle in hooks:
        handle.remove()
    return {name: float(value) for name, value in found.items()}


def needs_of_workload(work: Workload, name: str, seed: int = 0) -> tuple[Needs, Plan]:
    """What a job that runs needs: kept bytes from the layout, activations and peak from steps on one and two samples.

    Args:
        work: the job.
        name: the recipe.
        seed: of the start.
    """
    recipe = find_recipe(name)
    whole = work.data.train(0, seed)
    model = work.model(seed)
    count = sum(p.numel() for p in model.parameters())
    few = 1 if count > 50e6 else max(1, units_in(whole, "samples") // 4)
    less, more = _part(whole, few), _part(whole, 2 * few)
    positions = _positions(model.eval(), lambda: work.loss(model, less))
    plan = make_plan(model, recipe)
    flops = _flops(model, plan, recipe, lambda at: positions.get(at, 0.0) / few)
    held = kept(model.to("meta"), recipe)
    engine = make(work, name, Hyper(), seed)
    engine.step([more], 1e-3, 0)
    saved = [_saved(engine, batch) for batch in (less, more)]
    peaks = [_peak(engine, batch) for batch in (less, more)]
    activations = (saved[1] - saved[0]) / few
    slope = max((peaks[1] - peaks[0]) / few, activations)
    communication = int(count * _BYTES.get(recipe.communication, 4.0))
    return (
        Needs(
            name, count, **asdict(held), activations=activations, peak_fixed=peaks[1] - 2 * few * slope,
            peak_sample=slope, communication=communication, flops=_shares(flops), flops_a_sample=sum(flops.values()),
            measured=True,
        ),
        plan,
    )  # fmt: skip


def _saved(engine: Engine, batch: Any) -> int:
    return measure.saved_bytes(lambda: engine.work.loss(engine.model, batch), engine.model)


def _peak(engine: Engine, batch: Any) -> float:
    _, held, peak = engine.measure([batch], 1e-3, 1)
    return float(held.total if peak is None else peak)


def batch_of(work: Workload) -> int:
    """How many samples the job's own batches hold."""
    return units_in(work.data.train(0, 0), "samples")
