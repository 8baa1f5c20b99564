"""What a step leaves for the next follows every change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowprec.optim as lo
from lowprec import gradients
from lowprec.optim.base import LowPrecOptimizer

SHAPES = ((40, 70), (300,), (5, 3, 7), ())


def _params(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in SHAPES]


def _grads(params: list[torch.nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def _new_data(o: Any, ps: list[Any]) -> None:
    for p in ps:
        p.data = p.data.clone() * 2


def _view_data(o: Any, ps: list[Any]) -> None:
    # the same address, other strides
    ps[0].data = torch.as_strided(ps[0].data, (40, 70), (1, 40))


def _load(o: Any, ps: list[Any]) -> None:
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def _own_state(o: Any, ps: list[Any]) -> None:
    o.state[ps[0]]["exp_avg"] = o.state[ps[0]]["exp_avg"].clone()
    o.state[ps[0]]["exp_avg"].zero_()


def _own_state_data(o: Any, ps: list[Any]) -> None:
    o.state[ps[1]]["exp_avg_sq"].data = o.state[ps[1]]["exp_avg_sq"] * 2


def _own_step(o: Any, ps: list[Any]) -> None:
    o.state[ps[2]]["step"] = 17


def _forget_state(o: Any, ps: list[Any]) -> None:
    o.state.pop(ps[0])


def _no_grad(o: Any, ps: list[Any]) -> None:
    ps[1].grad = None


def _strange_grads(o: Any, ps: list[Any]) -> None:
    ps[0].grad = ps[0].grad.t().contiguous().t()
    ps[2].grad = ps[2].grad.to_sparse()


def _accumulated(o: Any, ps: list[Any]) -> None:
    ps[0]._lowprec_grad = torch.ones_like(ps[0]) * 0.5


def _stored(o: Any, ps: list[Any]) -> None:
    for sink in gradients.install(ps):
        sink.add(torch.ones(sink.shape))
    for p in ps:
        p.grad = None


def _settings(o: Any, ps: list[Any]) -> None:
    o.param_groups[0].update(lr=0.5, weight_decay=0.3, maximize=True)


def _removed(o: Any, ps: list[Any]) -> None:
    o.param_groups[0]["params"].pop(1)


def _added(o: Any, ps: list[Any]) -> None:
    ps.append(torch.nn.Parameter(torch.ones(9)))
    ps[-1].grad = torch.ones(9)
    o.add_param_group({"params": [ps[-1]], "lr": 0.25})


def _rounding(o: Any, ps: list[Any]) -> None:
    o.param_groups[0]["state_rounding"] = "nearest"


CHANGES: tuple[Callable[[Any, list[Any]], None], ...] = (
    _new_data, _view_data, _load, _own_state, _own_state_data, _own_step, _forget_state,
    _no_grad, _strange_grads, _accumulated, _stored, _settings, _rounding, _removed, _added,
)  # fmt: skip


def _run(change: Callable[[Any, list[Any]], None] | None, keeps: bool, **options: Any) -> tuple[Any, list[Any]]:
    params = _params()
    optimizer = lo.AdamW(params, lr=0.1, min_quantized=0, **options)

    def step(seed: int, act: Callable[[Any, list[Any]], None] | None = None, **given: Any) -> None:
        if not keeps:
            optimizer._kept = None
        _grads(params, seed)
        if act is not None:
            act(optimizer, params)
        optimizer.step(**given)

    for i in range(3):
        step(i, grad_factor=1.0 / (i + 1))
    step(3, change)
    for i in range(4, 7):
        step(i, grad_factor=dict.fromkeys(params, 0.5) if i == 5 else 1.0)
    step(7, grad_factor={params[0]: 0.25})
    return optimizer, params


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("change", CHANGES)
def test_kept_batches_follow_every_change(change: Any, states: str) -> None:
    kept, plain = (_run(change, keeps, states=states) for keeps in (True, False))
    for p, q in zip(kept[1], plain[1], strict=True):
        assert torch.equal(p, q)
        ours, theirs = kept[0].state[p], plain[0].state[q]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[n]), torch.as_tensor(theirs[n])) for n in ours)


def test_batches_are_kept_and_hold_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    params = _params()
    optimizer = lo.AdamW(params)
    _grads(params, 0)
    optimizer.step()
    monkeypatch.setattr(LowPrecOptimizer, "_collect", None)
    for i in range(3):
        optimizer.zero_grad()
        _grads(params, i)
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4
    assert optimizer._kept is not None
    slots = [s for _, batch, _, _ in optimizer._kept.batches for s in batch.slots]
    assert len(slots) == len(params) and all(s.grad is None for s in slots)
    params[1].grad = torch.full((300,), torch.inf)
    optimizer.step()
    assert optimizer.nonfinite == {params[1]: 300}
    params[1].grad = torch.zeros(300)
    optimizer.step()
    assert optimizer.nonfinite == {}


def test_a_copied_optimizer_steps_its_own_parameters() -> None:
    params = _params(dtype=torch.bfloat16)
    optimizer = lo.AdamW(params, update="stochastic", seed=5, states="bf16")
    _grads(params, 0)
    optimizer.step()
    twins, twin = copy.deepcopy((params, optimizer))
    before = [p.detach().clone() for p in params]
    _grads(twins, 1)
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    _grads(params, 1)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
