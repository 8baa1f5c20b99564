"""Weights in 16 and 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import lowprec as lp
from lowprec import gradients, storage
from lowprec.optim import AdamW


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 48), nn.Linear(48, 96), nn.LayerNorm(96), nn.Linear(96, 16))


def test_the_formats_a_recipe_says() -> None:
    model = _model()
    for m in (model[1], model[3]):
        m._lowprec = object()
    before = [id(p) for p in model.parameters()]
    found = storage.convert(model, lp.recipe("msamp-O3"))
    assert [id(p) for p in model.parameters()] == before
    assert (
        found["1.weight"] == found["3.weight"] == "fp8" and found["0.weight"] == "fp16" and found["2.weight"] == "fp32"
    )
    assert model[1].weight.dtype == torch.float8_e4m3fn
    assert gradients.sink(model[1].weight) is not None and gradients.sink(model[0].weight) is None
    assert "1.weight_scale" in model.state_dict()


def test_fp8_weights_are_exact_in_bf16_and_nearest() -> None:
    w = _model()[1]
    original = w.weight.detach().clone()
    original[3] = 0.0
    original[4] *= 1e-30
    w.weight.data = original.clone()
    w._lowprec = object()
    storage.convert(nn.Sequential(w), lp.recipe("msamp-O3"))
    value = storage.read(w.weight)
    assert torch.equal(storage.operand(w.weight, torch.bfloat16).float(), value)
    # half a step of e4m3 under a scale that wastes at most one bit
    bound = original.abs().amax(1, keepdim=True) * 2.0**-4
    assert ((value - original).abs() <= bound).all()
    relative = ((value - original).abs() / original.abs().clamp(min=1e-38))[original.abs() > bound / 4]
    assert relative.max() <= 2.0**-4 + 1e-6
    assert torch.equal(torch.frexp(w.weight_scale)[0], torch.full_like(w.weight_scale, 0.5))  # powers of two


def test_a_copy_says_what_it_lost_and_relink_mends_it() -> None:
    model = nn.Sequential(_model()[1])
    model[0]._lowprec = 1
    storage.convert(model, lp.recipe("msamp-O3"))
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="relink"):
        storage.read(other[0].weight)
    storage.relink(other)
    assert torch.equal(storage.read(other[0].weight), storage.read(model[0].weight))


def test_the_master_is_what_the_weight_was_rounded_from() -> None:
    model = nn.Sequential(_model()[1])
    exact = model[0].weight.detach().clone()
    model[0]._lowprec = 1
    recipe = lp.recipe("msamp-O3")
    storage.convert(model, recipe)
    optimizer = AdamW(model.parameters(), states=recipe.states, master=recipe.master)
    master = optimizer.masters()[model[0].weight]
    assert (master - exact).abs().max() <= exact.abs().max() * 2.0**-11
    assert (storage.read(model[0].weight) - exact).abs().max() > exact.abs().max() * 2.0**-8


def test_restore() -> None:
    model = nn.Sequential(_model()[1])
    model[0]._lowprec = 1
    storage.convert(model, lp.recipe("msamp-O3"))
    value = storage.read(model[0].weight)
    storage.restore(model)
    assert model[0].weight.dtype == torch.float32 and torch.equal(model[0].weight, value)
    assert "0.weight_scale" not in model.state_dict() and gradients.sink(model[0].weight) is None


def test_checkpointed_layers_train_with_fp8_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    lp.apply(layer, "msamp-O3")
    storage.convert(layer, lp.recipe("msamp-O3"))
    optimizer = AdamW(layer.parameters(), lr=1e-2, states=("fp8", "fp16"), master="fp16", update="stochastic")
    x = torch.randn(32, 64)
    losses = []
    for _ in range(30):
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        loss = (out.float() - x).square().mean()
        loss.backward()
        assert layer[0].weight.grad is None and gradients.sink(layer[0].weight).filled
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert layer[0].weight.dtype == torch.float8_e4m3fn
