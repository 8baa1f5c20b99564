"""Compiled linear layers: one graph, no recompiles, the eager numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import lowprec as lp

SOME = ["fp16", "fp8", "fp8-delayed", "fp8-block-fp32", "mxfp4", "nvfp4", "int8"]
REST = [name for name in lp.recipes() if name not in SOME]


def _compare(name: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = lp.apply(nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32)), name)
    other = copy.deepcopy(eager)
    frames = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(other, fullgraph=True, backend=frames)
    for _ in range(3):
        x = torch.randn(40, 48)
        losses = [net(x).float().square().mean() for net in (eager, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for p, q in zip(eager.parameters(), other.parameters()):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert frames.frame_count == 1


@pytest.mark.parametrize("name", SOME)
def test_compiled_equals_eager(name: str) -> None:
    _compare(name, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("name", REST)
def test_compiled_equals_eager_for_the_rest(name: str) -> None:
    _compare(name, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8", "fp8-delayed", "mxfp8", "int8"])
def test_inductor_equals_eager(name: str) -> None:
    _compare(name, "inductor")
