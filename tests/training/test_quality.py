"""fp16 on a CPU trains to fp32's loss, and without loss scaling it says so by its gradients."""

from __future__ import annotations

import pytest
import torch

import lowprec as lp
from lowprec import workloads


def _final(kind: str, recipe: str, steps: int, seed: int = 0) -> float:
    """Mean loss of the last ten steps of a built-in workload."""
    work = workloads.load(kind, size="nano")
    model = work.model(seed)
    model, optimizer = lp.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe, clip_grad_norm=1.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward(work.loss(model, work.data.train(step, seed)))
        optimizer.step()
        if optimizer.last_step.taken:
            losses.append(optimizer.last_step.loss)
    assert len(losses) >= steps - 6  # a few at the start, while the scale is found
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize(("kind", "recipe", "bound"), [("gpt", "fp16", 0.01), ("cnn", "fp16", 0.02)])
def test_fp16_reaches_the_loss_of_fp32(kind: str, recipe: str, bound: float) -> None:
    exact, low = _final(kind, "fp32", 60), _final(kind, recipe, 60)
    assert abs(low - exact) <= bound * exact, (low, exact)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_fp16_within_the_bound_over_seeds(kind: str) -> None:
    """0.3% over three seeds."""
    pairs = [(_final(kind, "fp32", 300, seed), _final(kind, "fp16", 300, seed)) for seed in range(3)]
    exact, low = (sum(p[i] for p in pairs) / 3 for i in range(2))
    assert abs(low - exact) <= 0.003 * exact + 1e-3, pairs
