"""The anomaly guard: when it speaks, and what it does then."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowprec as lp
from lowprec.training.guard import Guard, GuardState, TrainingStoppedError


def _noise(i: int) -> float:
    """A number in -1 .. 1 that looks random."""
    return math.sin(12.9898 * i) * 43758.5453 % 2 - 1


def _settled(guard: Guard, steps: int = 200) -> GuardState:
    state = GuardState(guard)
    for i in range(steps):
        assert (
            state.judge(i, 4.0 * math.exp(-i / 100) + 1 + 0.05 * _noise(i), math.exp(0.3 * _noise(7 * i)), (i,)) == ""
        )
    return state


@pytest.mark.parametrize(("loss", "norm"), [(9.0, 1.0), (1.4, 60.0)])
def test_it_speaks_when_loss_or_norm_takes_off(loss: float, norm: float) -> None:
    state = _settled(Guard())
    why = state.judge(200, loss, norm, ("b",))
    assert ("loss 9" in why) if loss == 9.0 else ("gradient norm 60" in why)
    assert state.anomalies == [{"step": 200, "why": why, "batches": ["b"]}]
    # it entered no statistics: the same again is as strange
    assert state.judge(201, loss, norm, ("c",)) != "" and state.judge(202, 1.5, 1.0, ()) == ""


def test_it_is_silent_where_nothing_takes_off() -> None:
    """A falling loss, a noisy norm, a fall of both, and the first steps whatever they are."""
    _settled(Guard(), 1000)
    state = _settled(Guard())
    assert state.judge(200, 0.01, 1e-6, ()) == ""
    fresh = GuardState(Guard(warmup=20))
    assert all(fresh.judge(i, 10.0**i, 10.0**i, ()) == "" for i in range(10))


def test_a_new_level_is_accepted_after_patience() -> None:
    state = _settled(Guard(patience=3))
    verdicts = [bool(state.judge(200 + i, 9.0, 1.0, ())) for i in range(6)]
    assert verdicts == [True, True, True, False, False, False]


def _make(guard: Any, lr: float = 0.1) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return lp.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), "fp32", guard=guard)


def _step(model: nn.Module, optimizer: Any, i: int, factor: float = 1.0) -> torch.Tensor:
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    loss = (model(torch.tensor([[1.0, 0.1 * _noise(i)]])) - 1.0).square().sum() + 1.0 + 0.01 * _noise(i)
    optimizer.backward(loss * factor, batch=f"batch-{i}")
    optimizer.step()
    return model.weight.detach() - before


def test_skip() -> None:
    model, optimizer = _make(Guard(warmup=10))
    for i in range(30):
        _step(model, optimizer, i)
        assert optimizer.last_step.taken
    moved = _step(model, optimizer, 30, 100.0)
    report = optimizer.last_step
    assert report.kind == "guard" and report.batches == ("batch-30",) and not moved.any()
    assert optimizer.guard.anomalies[0]["batches"] == ["batch-30"]
    _step(model, optimizer, 31)
    assert optimizer.last_step.taken


def test_backoff_reduces_the_rate_and_gives_it_back() -> None:
    model, optimizer = _make(Guard("backoff", warmup=10, steps=3, factor=0.5), lr=1e-3)
    for i in range(30):
        _step(model, optimizer, i)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    _step(model, optimizer, 30, 100.0)
    assert optimizer.last_step.taken
    for i in range(31, 35):
        _step(model, optimizer, i)
    assert rates == [5e-4, 5e-4, 5e-4, 1e-3, 1e-3]
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_stop_with_a_post_mortem(tmp_path: Path) -> None:
    path = tmp_path / "why.json"
    model, optimizer = _make(Guard("stop", warmup=10, post_mortem=str(path)))
    for i in range(60):
        _step(model, optimizer, i)
    with pytest.raises(
        TrainingStoppedError, match=r"stopped at step 61, batch batch-60: loss .* deviations above"
    ) as error:
        _step(model, optimizer, 60, 100.0)
    written = json.loads(path.read_text())
    assert written == error.value.post_mortem and len(written["history"]) == 50
    assert written["batches"] == ["batch-60"] and written["history"][-2]["batches"] == ["batch-59"]


def test_state_round_trip() -> None:
    state = _settled(Guard())
    state.judge(200, 9.0, 1.0, (3,))
    other = GuardState(Guard())
    other.load(json.loads(json.dumps(state.to_dict())))
    assert other.to_dict() == state.to_dict()
    assert state.judge(201, 8.0, 2.0, ()) == other.judge(201, 8.0, 2.0, ()) != ""


def test_off_by_default_and_bad_settings() -> None:
    assert _make(None)[1].guard is None
    assert _make("stop")[1].guard.guard.action == "stop"
    with pytest.raises(ValueError, match="unknown action of the guard 'skp'; did you mean 'skip'"):
        _make("skp")
    with pytest.raises(ValueError, match="the guard's sigma cannot be 0"):
        Guard(sigma=0)
