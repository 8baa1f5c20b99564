"""Planning and applying: in place, undone exactly, and clear where it cannot be."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import lowprec as lp
from lowprec import handlers
from lowprec.recipe import Cast, Gemm

E4M3 = Gemm(Cast("e4m3"), Cast("e4m3"))
RECIPE = lp.Recipe("test", output=E4M3, grad_input=E4M3, grad_weight=E4M3)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factor


class Renamed(Scale):
    """A subclass that computes the same."""


class Other(Scale):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.factor


@lp.handles(Scale)
class HalfScale(Scale):
    lowprec_products = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factor / 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Renamed(), Other()])
        self.head = Scale()

    def forward(self, x: torch.Tensor, *, bias: float = 0.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + bias


X = torch.ones(2)


def test_plan_changes_nothing_and_says_why() -> None:
    net = Net()
    plan = lp.plan(net, RECIPE, skip=["head"])
    assert type(net) is Net and type(net.head) is Scale and not hasattr(net, "_lowprec_root")
    assert [row.name for row in plan.converted] == ["blocks.0", "blocks.1"]
    assert "overrides the forward of Scale" in plan.row("blocks.2").note
    assert plan.row("head").note == "skipped by 'head'"
    assert "2 of 4 modules converted" in str(plan)
    assert plan.to_dict()["rows"][0]["recipe"] == "test"


def test_apply_and_undo_are_in_place() -> None:
    net = Net()
    keys, head, before = list(net.state_dict()), net.head, net(X)
    seen: list[str] = []
    net.head.register_forward_hook(lambda *_: seen.append("hook"))
    assert lp.apply(net, RECIPE) is net
    assert net.head is head and isinstance(net, Net) and list(net.state_dict()) == keys
    assert net(X)[0] == 1 * 1 * 1 + 2 and seen == ["hook"]
    assert (
        type(net).__name__ == "Net"
        and str(inspect.signature(net.forward)) == "(x: 'torch.Tensor', *, bias: 'float' = 0.0) -> 'torch.Tensor'"
    )
    lp.undo(net)
    assert type(net) is Net and type(net.head) is Scale and not hasattr(net.head, "_lowprec")
    assert torch.equal(net(X), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_copies_stay_applied(copied: object) -> None:
    net = lp.apply(Net(), RECIPE)
    other = copied(net)  # type: ignore[operator]
    assert torch.equal(other(X), net(X)) and type(other) is type(net)
    assert other.head._lowprec is not net.head._lowprec
    lp.undo(other)
    assert type(other) is Net and type(other.blocks[1]) is Renamed and type(net) is not Net


def test_disabled() -> None:
    net = Net()
    before = net(X)
    lp.apply(net, RECIPE)
    low = net(X)
    with lp.disabled(net):
        assert torch.equal(net(X), before)
    assert torch.equal(net(X), low) and not torch.equal(low, before)


def test_rules_and_positions() -> None:
    other = RECIPE.replace(name="other")
    plan = lp.plan(Net(), RECIPE, rules={"blocks": other, "blocks.1": None})
    assert plan.row("blocks.0").recipe is other and plan.row("blocks.1").handler == ""
    plan = lp.plan(Net(), RECIPE.replace(first_layer="high", last_layer="high"))
    assert plan.row("blocks.0").recipe.output == Gemm() and plan.row("head").note == "last layer"  # type: ignore[union-attr]
    plan = lp.plan(Net(), RECIPE.replace(high_last_fraction=0.4))
    assert "last 40%" not in plan.row("blocks.1").note
    plan = lp.plan(Net(), RECIPE.replace(high_last_fraction=0.6))
    assert "last 60%" not in plan.row("blocks.0").note and "last 60%" in plan.row("blocks.1").note
    with pytest.warns(UserWarning, match="converts no module"):
        lp.apply(nn.ReLU(), "fp8")


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"no module matches this glob.*'block'.*did you mean 'blocks'"):
        lp.plan(Net(), RECIPE, skip=["block"])
    with pytest.raises(ValueError, match="no module matches"):
        lp.plan(Net(), RECIPE, rules={"x*": None})
    net = lp.apply(Net(), RECIPE)
    with pytest.raises(ValueError, match=r"applied already: call lowprec\.undo first"):
        lp.apply(net, RECIPE)
    with pytest.raises(ValueError, match="no recipe is applied"):
        lp.undo(Net())
    with pytest.raises(ValueError, match="this model has not"):
        lp.apply(nn.Sequential(Scale()), lp.plan(Net(), RECIPE))
    with pytest.raises(ValueError, match="compiled already"):
        lp.apply(torch.compile(Net()), RECIPE)
    with pytest.raises(ValueError, match="has a handler already"):
        handlers.handles(Scale)(type("Second", (Scale,), {}))
    with pytest.raises(TypeError, match="must be a subclass"):
        handlers.handles(nn.Bilinear)(HalfScale)


def test_public_functions_win_over_modules() -> None:
    import lowprec.apply
    import lowprec.formats

    assert callable(lowprec.apply) and callable(lowprec.formats)
