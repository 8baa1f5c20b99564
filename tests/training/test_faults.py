"""Fault injection: Inf and NaN in gradients, activations, weights, losses and optimizer states at random steps."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import pytest
import torch
from resume_worker import build
from torch import nn

import lowprec as lp
from lowprec.gradients import sink
from lowprec.loss_scale import DynamicScale

SCALED = [r for r in lp.recipes() if lp.recipe(r).loss_scale.kind != "none"]
KINDS = ("gradient", "activation", "weight", "loss", "state")


class Injector:
    """Puts one non-finite value somewhere and knows what the step must say about it."""

    def __init__(self, model: nn.Module, optimizer: Any, draw: random.Random) -> None:
        self.model, self.optimizer, self.draw = model, optimizer, draw
        self.names = [n for n, p in model.named_parameters() if p.is_floating_point()]
        self.value = 0.0

    def param(self) -> tuple[str, torch.Tensor]:
        name = self.draw.choice(self.names)
        return name, dict(self.model.named_parameters())[name]

    def put(self, tensor: torch.Tensor) -> None:
        self.value = self.draw.choice([math.nan, math.inf, -math.inf])
        with torch.no_grad():
            tensor.view(-1)[self.draw.randrange(tensor.numel())] = self.value

    def gradient(self) -> str:
        name, param = self.param()
        store = sink(param)
        if store is not None and store.filled:
            assert store.codes is not None
            self.put(store.scale if store.scale is not None else store.codes)
        elif param.grad is not None:
            self.put(param.grad)
            self.optimizer.gradients.remember()
        else:
            return ""
        return name

    def weight(self) -> str:
        name, param = self.param()
        if param.element_size() == 1:
            return ""
        self.put(param)
        return name

    def state(self) -> str:
        name, param = self.param()
        tensors = [
            t
            for k, t in self.optimizer.state[param].items()
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() > 1 and k != "master"
        ]
        if not tensors:
            return ""
        self.put(self.draw.choice(tensors))
        return name


def _one_step(model: nn.Module, optimizer: Any, step: int, kind: str, injector: Injector) -> tuple[str, Any]:
    """A step with a fault of some kind ("" for none): what was hit, and the report."""
    x = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(step))
    hit, hook = "", None
    if kind == "weight":
        hit = injector.weight()
    if kind == "state":
        hit = injector.state()
    if kind == "activation":
        hit = injector.draw.choice(["norm", "up", "down"])

        def spoil(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            out = out.clone()
            injector.put(out)
            return out

        hook = model.get_submodule(hit).register_forward_hook(spoil)
    loss = model(x, (3 * x + 1) % 17)
    if hook is not None:
        hook.remove()
    if kind == "loss":
        hit, loss = "loss", loss * injector.draw.choice([math.nan, math.inf])
    optimizer.zero_grad()
    if optimizer.backward(loss, batch=step) and kind == "gradient":
        hit = injector.gradient()
    optimizer.step()
    return hit, optimizer.last_step


def _finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p.float()).all()) for p in model.parameters())


def _check(kind: str, hit: str, report: Any, value: float, mastered: bool) -> None:
    """Every skip has the right reason and name, and nothing is skipped without one."""
    if kind == "gradient" and hit:
        assert report.kind == "gradients", report
        named = report.nan if math.isnan(value) or hit in report.nan else report.inf
        assert hit in named and hit in report.reason
        assert len(report.inf) + len(report.nan) == 1
    elif kind == "loss":
        assert report.kind == "loss" and ("NaN" in report.reason or "Inf" in report.reason)
    elif kind == "activation":
        assert not report.taken or not report.nan, report
    elif kind == "weight" and hit:
        # a weight with a master is written anew from it in any step that is taken
        assert hit in report.nan or any(hit in text for text in report.repaired) or (mastered and report.taken), report
    elif kind == "state" and hit:
        assert report.taken and any(hit in text for text in report.repaired), report


def _run(recipe: str, steps: int, seed: int, every: int) -> tuple[float, int]:
    """Mean loss of the last 50 steps, and how many faults there were; every=0 for none."""
    model, optimizer = build(recipe, repair=True, loss_scale=_quicker(recipe))
    torch.manual_seed(seed)
    draw = random.Random(seed)
    injector = Injector(model, optimizer, draw)
    losses, faults, carried = [], 0, False
    for step in range(steps):
        kind = draw.choice(KINDS) if every and step > 5 and draw.randrange(every) == 0 else ""
        hit, report = _one_step(model, optimizer, 10_000 * seed + step, kind, injector)
        assert _finite(model), (step, kind, hit)
        if kind and hit:
            faults += 1
            _check(kind, hit, report, injector.value, optimizer.recipe.master is not None)
        elif not carried:
            # a clean step after a clean step: nothing may be skipped but for an overflow of the scale
            assert report.taken or report.kind == "gradients", (step, report)
        # a weight's fault may have left a state behind that the next step meets
        carried = kind in ("weight", "activation")
        if report.loss is not None and math.isfinite(report.loss):
            losses.append(report.loss)
    tail = losses[-50:]
    return sum(tail) / len(tail), faults


def _quicker(recipe: str) -> Any:
    """A dynamic scale that grows back within the test."""
    rule = lp.recipe(recipe).loss_scale
    return DynamicScale(4096.0, window=20, cap=4096.0) if rule.kind == "dynamic" else None


def _study(recipe: str, steps: int, every: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clean = [_run(recipe, steps, seed, 0)[0] for seed in range(3)]
        loss, faults = _run(recipe, steps, 0, every)
    assert faults > steps / every / 2
    mean = sum(clean) / 3
    spread = max(clean) - min(clean)
    assert abs(loss - mean) <= max(2 * spread, 0.05 * mean, 0.02), (loss, clean, faults)


@pytest.mark.parametrize("recipe", ["fp16", "apex-O0"])
def test_faults(recipe: str) -> None:
    _study(recipe, 250, 10)


@pytest.mark.long
@pytest.mark.parametrize("recipe", SCALED)
def test_faults_over_2000_steps(recipe: str) -> None:
    _study(recipe, 2000, 40)


# -- one at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_in_a_state_is_caught_in_the_very_step(name: str, value: float) -> None:
    """Without `repair`: the kernel guards itself."""
    model, optimizer = build("fp32")
    injector = Injector(model, optimizer, random.Random(0))
    for step in range(3):
        _one_step(model, optimizer, step, "", injector)
    optimizer.state[model.up.weight][name].view(-1)[7] = value
    before = model.up.weight.detach().clone()
    with pytest.warns(lp.LowprecWarning, match=f"{name} of up.weight \\(1 elements\\)"):
        _one_step(model, optimizer, 3, "", injector)
    assert optimizer.last_step.taken and optimizer.last_step.repaired == (f"{name} of up.weight (1 elements)",)
    changed = (model.up.weight != before).view(-1)
    assert not changed[7] and int(changed.sum()) > changed.numel() * 0.9
    _one_step(model, optimizer, 4, "", injector)
    assert optimizer.last_step.repaired == () and bool((model.up.weight != before).view(-1)[7])


def test_another_optimizer_is_checked_with_repair_only() -> None:
    def run(repair: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model, optimizer = lp.prepare(model, torch.optim.RMSprop(model.parameters(), lr=0.01), "fp32", repair=repair)
        for i in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(1, 4)).square().sum())
            if i == 1:
                optimizer.state[model.weight]["square_avg"].view(-1)[3] = math.nan
            optimizer.step()
        return model, optimizer

    with pytest.warns(lp.LowprecWarning, match=r"square_avg of weight \(1 elements\)"):
        model, optimizer = run(True)
    assert bool(torch.isfinite(model.weight).all()) and optimizer.last_step.taken
    assert not bool(torch.isfinite(run(False)[0].weight).all())


def test_a_bad_weight_is_named_and_needs_a_word_to_be_zeroed() -> None:
    for repair in (False, True):
        model, optimizer = build("fp32", repair=repair)
        with torch.no_grad():
            model.head.weight[0, 0] = math.nan
        with pytest.warns(lp.LowprecWarning, match="weights are not finite: head.weight") as seen:
            _one_step(model, optimizer, 0, "", Injector(model, optimizer, random.Random(0)))
        assert optimizer.last_step.nan == ("head.weight",) and "head.weight" in optimizer.last_step.reason
        assert ("repair=True" in str(seen[0].message)) is not repair
        assert bool(torch.isfinite(model.head.weight).all()) is repair
