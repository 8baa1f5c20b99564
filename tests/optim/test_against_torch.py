"""fp32 settings against torch.optim, for every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowprec.optim as lo

STEPS = 120
CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (lo.SGD, torch.optim.SGD, {"lr": 0.01}),
    (lo.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (lo.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (lo.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (lo.Adam, torch.optim.Adam, {"lr": 0.01}),
    (lo.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    (lo.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (lo.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    (lo.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True}),
    (lo.AdamW, torch.optim.AdamW, {"lr": torch.tensor(0.01), "maximize": True}),
    (lo.Adafactor, torch.optim.Adafactor, {"lr": 0.01}),
    (lo.Adafactor, torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1, "maximize": True, "d": 2.0}),
]


def _compare(ours: Any, theirs: Any, options: dict[str, Any], steps: int) -> None:
    torch.manual_seed(0)
    start = torch.randn(13, 37)
    a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one = ours([a], **options)
    options = {**options, "foreach": False} if isinstance(options["lr"], torch.Tensor) else options
    two = theirs([b], **options)
    moved = torch.zeros_like(start)
    for _ in range(steps):
        before = b.detach().clone()
        a.grad = torch.randn(13, 37)
        b.grad = a.grad.clone()
        one.step()
        two.step()
        moved += (b.detach() - before).abs()
    # one ulp of the weight a step, and a few ulp of the way it went
    bound = steps * 0.5 * 2.0**-23 * b.detach().abs().clamp(min=start.abs()) + 8 * 2.0**-23 * moved
    assert ((a - b).abs() <= bound).all()
    assert (moved > 0).all()


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_fp32_settings_equal_torch(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    _compare(ours, theirs, options, STEPS)


@pytest.mark.long
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_fp32_settings_equal_torch_over_500_steps(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    _compare(ours, theirs, options, 500)
