"""Saving, loading, exporting, settings and bad input."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch

import lowprec as lp
import lowprec.optim as lo
from lowprec.errors import LowprecWarning

KINDS: list[Any] = [
    (lo.SGD, {"momentum": 0.9}),
    (lo.Adam, {"amsgrad": True}),
    (lo.AdamW, {}),
    (lo.Lion, {}),
    (lo.Muon, {}),
]


def _params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter((torch.randn(s) * 0.1).to(dtype)) for s in ((64, 80), (70, 65))]


def _train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("states", ["fp32", "bf16", "fp8", "8bit", "4bit"])
def test_a_saved_state_goes_on_bit_for_bit(kind: Any, options: dict[str, Any], states: str) -> None:
    a = _params(torch.bfloat16)
    one = kind(a, lr=1e-2, states=states, update="stochastic", seed=5, **options)
    _train(one, 3)
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    b = [torch.nn.Parameter(p.detach().clone()) for p in a]
    two = kind(b, lr=1.0, states=states, update="stochastic", **options)
    buffer.seek(0)
    two.load_state_dict(torch.load(buffer, weights_only=True))
    _train(one, 2, seed=1)
    _train(two, 2, seed=1)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("states", ["fp32", "bf16", "fp8", "8bit", "4bit"])
def test_states_go_to_torch_and_back(states: str) -> None:
    a = _params()
    ours = lo.AdamW(a, lr=1e-2, states=states)
    _train(ours, 3)
    b = [torch.nn.Parameter(p.detach().clone()) for p in a]
    theirs = torch.optim.AdamW(b, lr=1.0)
    theirs.load_state_dict(lo.torch_state(ours))
    assert theirs.param_groups[0]["lr"] == 1e-2
    _train(ours, 1, seed=1)
    _train(theirs, 1, seed=1)
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() <= 4 * 2.0**-23  # decoded states are exact, so is the step
    back = lo.AdamW(b, lr=1e-2, states=states)
    lo.load_torch_state(back, theirs.state_dict())
    assert back.state[b[0]]["step"] == 4


def test_from_torch_takes_over_states_groups_and_schedulers() -> None:
    a = _params()
    theirs = torch.optim.AdamW(a, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.5**step)
    _train(theirs, 2)
    ours = lo.from_torch(theirs, lp.recipe("fp32").replace(states=("8bit", "8bit")))
    assert isinstance(ours, lo.AdamW) and ours.state[a[0]]["step"] == 2
    assert ours.state[a[0]]["exp_avg"].dtype == torch.uint8
    scheduler.step()
    assert ours.param_groups[0]["lr"] == 5e-3
    with pytest.raises(ValueError, match="RMSprop"):
        lo.from_torch(torch.optim.RMSprop(a), lp.recipe("fp32"))


def test_the_rule_for_small_tensors_is_visible() -> None:
    params = [torch.nn.Parameter(torch.zeros(s)) for s in ((64, 64), (63, 64), (8192,))]
    rows = lo.AdamW(params, states="8bit").layout()
    assert [r["states"]["exp_avg"] for r in rows] == ["8bit", "fp32", "fp32"]
    assert rows[0]["bytes"] == pytest.approx(4 + 2 + 8 / 256) and rows[1]["bytes"] == 12
    rows = lo.AdamW(params, states="8bit", min_quantized=0).layout()
    assert [r["states"]["exp_avg"] for r in rows] == ["8bit", "8bit", "fp32"]


def _snapshot(optimizer: Any) -> Any:
    return copy.deepcopy(
        ([p.detach().clone() for g in optimizer.param_groups for p in g["params"]], optimizer.state_dict()["state"])
    )


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and all(
        torch.equal(a[1][k][n], b[1][k][n]) for k in a[1] for n in a[1][k]
    )


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_an_error_leaves_everything_as_it_was(states: str) -> None:
    a = _params()
    optimizer = lo.AdamW([{"params": a[:1]}, {"params": a[1:]}], states=states)
    _train(optimizer, 2)
    before = _snapshot(optimizer)
    for key, value in (("lr", math.nan), ("lr", -1.0), ("eps", math.inf), ("betas", (1.0, 0.9)), ("update", "away")):
        good = optimizer.param_groups[1][key]
        optimizer.param_groups[1][key] = value
        with pytest.raises(ValueError, match=r"lr|eps|betas|update"):
            optimizer.step()
        optimizer.param_groups[1][key] = good
        assert _same(_snapshot(optimizer), before)
    with pytest.raises(ValueError, match="grad_factor"):
        optimizer.step(grad_factor=math.nan)
    a[1]._lowprec_grad = torch.zeros(3)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()
    assert _same(_snapshot(optimizer), before)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    optimizer = lo.AdamW(_params(), states="8bit")
    _train(optimizer, 2)
    before, good = _snapshot(optimizer), optimizer.state_dict()

    def _bad(change: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        change(state)
        return state

    for change, words in [
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(3, 3, dtype=torch.uint8)), "parameter 1: exp_avg"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(70, 65)), "parameter 1: exp_avg"),
        (lambda s: s["state"][0].pop("exp_avg_scale"), "exp_avg_scale"),
        (lambda s: s["param_groups"][0]["params"].pop(), "groups of"),
        (lambda s: s["param_groups"][0].update(lr=math.nan), "lr"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(_bad(change))
        assert _same(_snapshot(optimizer), before)


def test_parameters_without_gradient_empty_groups_and_zero_blocks() -> None:
    a = _params()
    optimizer = lo.AdamW([{"params": a}, {"params": []}], states="fp8", weight_decay=0.0)
    a[0].grad = torch.zeros_like(a[0])
    start = [p.detach().clone() for p in a]
    optimizer.step()
    assert torch.equal(a[0], start[0]) and torch.equal(a[1], start[1])
    assert a[1] not in optimizer.state
    for states in (("8bit", "fp32"), ("4bit", "fp32"), ("fp8", "fp32"), "8bit", "4bit"):
        p = torch.nn.Parameter(torch.zeros(256, 32))
        optimizer = lo.AdamW([p], states=states, weight_decay=0.0)
        for _ in range(3):
            p.grad = torch.randn(256, 32)
            p.grad[20:] = 0.0
            optimizer.step()
        assert (p[20:] == 0).all() and (p[:20] != 0).all()


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted() -> None:
    for states in ("fp32", "bf16", "8bit", "fp8", "4bit"):
        p = torch.nn.Parameter(torch.ones(64, 512))
        optimizer = lo.AdamW([p], states=states, weight_decay=0.0)
        p.grad = torch.ones(64, 512)
        p.grad[3, 7], p.grad[5, 9], p.grad[5, 300] = math.nan, math.inf, 1e30
        optimizer.step()
        assert optimizer.nonfinite == {p: 3}
        assert p[3, 7] == 1 and p[5, 9] == 1 and p[5, 300] == 1 and torch.isfinite(p).all()
        p.grad = torch.ones(64, 512)
        optimizer.step()
        assert optimizer.nonfinite == {} and (p != 1).all()


def test_masters_can_be_set_and_read() -> None:
    for master, exact in (("fp32", 0.0), ("bf16+16", 0.0), ("fp16", 2.0**-11)):
        p = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        optimizer = lo.AdamW([p], master=master)
        value = torch.randn(64, 64)
        optimizer.set_master(p, value)
        assert (optimizer.masters()[p] - value).abs().max() <= exact * 4
        assert (p.float() - value).abs().max() <= 4 * 2.0**-8
    with pytest.raises(ValueError, match="no master"):
        lo.AdamW([p]).set_master(p, value)
    with pytest.raises(ValueError, match="no such parameter"):
        optimizer.set_master(torch.zeros(2), value)


def test_settings_that_mean_nothing_are_refused_or_said() -> None:
    p = [torch.nn.Parameter(torch.zeros(4, 4))]
    with pytest.raises(ValueError, match="did you mean '8bit'"):
        lo.AdamW(p, states="8bits")
    with pytest.raises(ValueError, match="nothing"):
        lo.AdamW(p, master="fp32", update="kahan")
    with pytest.raises(ValueError, match=r"bf16\+16"):
        lo.AdamW([torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float16))], master="bf16+16")
    with pytest.warns(LowprecWarning, match="no effect"):
        lo.AdamW(p, update="stochastic")


def test_closures_per_group_settings_and_other_layouts() -> None:
    a = _params()
    optimizer = lo.AdamW([{"params": a[:1], "lr": 0.1}, {"params": a[1:], "states": "8bit"}], lr=0.0)
    start = [p.detach().clone() for p in a]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in a)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert not torch.equal(a[0], start[0]) and torch.equal(a[1], start[1])
    p = torch.nn.Parameter(torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last))
    q = torch.nn.Parameter(p.detach().contiguous())
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    lo.AdamW([p]).step()
    lo.AdamW([q]).step()
    assert torch.equal(p, q)
