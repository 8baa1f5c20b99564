"""lp.GradScaler beside torch.amp.GradScaler, and where it goes on when torch's stops."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings

import pytest
import torch
from torch import nn

from lowprec.errors import LowprecWarning
from lowprec.grad_scaler import GradScaler
from lowprec.loss_scale import DynamicScale


def _problem(seed: int = 0, cls: type = torch.optim.SGD) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, cls(model.parameters(), lr=0.1)


def _train(scaler: torch.amp.GradScaler, pattern: list[float], fused: bool = False) -> list[torch.Tensor]:
    """Steps whose gradients are multiplied by the pattern (1, Inf or NaN); every scale and weight on the way."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer
    if fused:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for i, factor in enumerate(pattern):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 3), 0.1 * (i % 5))).square().sum()).backward()
        assert model.weight.grad is not None
        model.weight.grad[0, 0] *= factor
        if i % 3 == 1 and not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen += [torch.tensor(scaler.get_scale()), model.weight.detach().clone()]
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_same_steps_and_scales_as_torch(fused: bool) -> None:
    draw = random.Random(0)
    for _ in range(8):
        pattern = [draw.choice([1.0, 1.0, 1.0, math.inf, math.nan]) for _ in range(40)]
        ours = _train(GradScaler("cpu", growth_interval=3), pattern, fused)
        theirs = _train(torch.amp.GradScaler("cpu", growth_interval=3), pattern, fused)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_state_dict_exchanges_with_torch() -> None:
    ours, theirs = GradScaler("cpu", growth_interval=5), torch.amp.GradScaler("cpu", growth_interval=5)
    _train(ours, [1.0, math.inf, 1.0])
    _train(theirs, [1.0, math.inf, 1.0])
    assert ours.state_dict() == theirs.state_dict()
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(ours.state_dict())
    assert other.state_dict() == ours.state_dict()
    fresh = GradScaler("cpu")
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state == DynamicScale(scale=32768.0, window=5, clean=1)
    assert pickle.loads(pickle.dumps(ours)).state_dict() == ours.state_dict()
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        fresh.load_state_dict({})


def test_a_richer_rule_survives_the_state_dict() -> None:
    scaler = GradScaler("cpu", preset="megatron")
    _train(scaler, [math.inf])
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state == scaler.state and scaler.state.spent == 1


def test_two_optimizers_share_one_update() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    a, opt_a = _problem(0)
    b, opt_b = _problem(1)
    scaler.scale(a(torch.ones(1, 3)).sum() + b(torch.ones(1, 3)).sum()).backward()
    assert b.weight.grad is not None
    b.weight.grad[0, 0] = math.nan
    before = [a.weight.detach().clone(), b.weight.detach().clone()]
    scaler.step(opt_a)
    scaler.step(opt_b)
    assert not scaler.skipped(opt_a) and scaler.skipped(opt_b)
    assert scaler.last_step.nan == ("group 0, parameter 0 (2, 3)",) and scaler.last_step.inf == ()
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not torch.equal(a.weight, before[0]) and torch.equal(b.weight, before[1])


def test_no_inf_checks_were_recorded_cannot_happen() -> None:
    model, optimizer = _problem()
    theirs, ours = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        theirs.step(optimizer)
    before = model.weight.detach().clone()
    ours.scale(torch.ones(()))
    ours.step(optimizer)
    ours.update()
    assert torch.equal(model.weight, before) and ours.get_scale() == 65536.0 and not ours.last_step.skipped
    ours.scale(model(torch.ones(1, 3)).sum()).backward()
    ours.step(optimizer)
    ours.update()
    assert not torch.equal(model.weight, before)


def test_attempting_to_unscale_fp16_gradients_cannot_happen() -> None:
    weights = [nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.5) for w in weights]
    for w in weights:
        w.grad = torch.full((4,), 8.0, dtype=torch.float16)
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=16.0), GradScaler("cpu", init_scale=16.0)
    theirs.scale(torch.ones(()))
    ours.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        theirs.step(optimizers[0])
    with pytest.warns(LowprecWarning, match="fp16 gradients are unscaled in place"):
        ours.step(optimizers[1])
    assert torch.equal(weights[1].detach(), torch.full((4,), 0.75, dtype=torch.float16))
    ours.update()
    weights[1].grad = torch.full((4,), math.inf, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes once
        ours.step(optimizers[1])
    assert ours.last_step.skipped


def test_stages_are_kept() -> None:
    model, optimizer = _problem()
    scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, closure=lambda: 0.0)


def test_disabled_passes_through() -> None:
    model, optimizer = _problem()
    scaler = GradScaler("cpu", enabled=False)
    loss = model(torch.ones(1, 3)).sum()
    assert scaler.scale(loss) is loss
    calls = []

    def closure() -> float:
        calls.append(1)
        return 3.0

    assert scaler.step(optimizer, closure=closure) == 3.0 and calls == [1]
    scaler.update()
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0 and not scaler.is_enabled()


def test_new_scale_and_setters() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(8)
    assert scaler.get_scale() == 8.0 and scaler.state.scale == 8.0
    scaler.update(torch.tensor(16.0))
    assert scaler.state.scale == 16.0
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 1)
    model, optimizer = _problem()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0


def test_works_where_its_device_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert GradScaler("cuda").is_enabled() and GradScaler().is_enabled()
    assert isinstance(GradScaler(), torch.amp.GradScaler)


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight.detach()[1], before[1] - 2.0) and torch.equal(table.weight[0], before[0])


def test_collapse_is_reported_once_and_recovers() -> None:
    model, optimizer = _problem()
    scaler = GradScaler("cpu")

    def step(value: float) -> None:
        scaler.scale(torch.ones(()))
        model.weight.grad = torch.full((2, 3), value)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    with pytest.warns(LowprecWarning, match=r"fell to 1 in 16 skipped steps .*NaN in group 0, parameter 0 \(2, 3\)"):
        for _ in range(16):
            step(math.nan)
    step(math.nan)
    scaler.recover()
    assert scaler.get_scale() == 65536.0
    step(1.0)
    assert not scaler.last_step.skipped


def test_a_deep_copy_keeps_its_own_state() -> None:
    scaler = GradScaler("cpu", preset="deepspeed")
    other = copy.deepcopy(scaler)
    other.scale(torch.ones(()))
    other.update(2.0)
    assert scaler.get_scale() == 65536.0 and other.get_scale() == 2.0
